"""How much is tested where a test has many sizes: a part, or with `FSDP_TESTS=all` all of it."""

import os
from typing import Any, Final, TypeVar
from zlib import crc32

T = TypeVar("T")
_ASKED: Final = os.environ.get("FSDP_TESTS", "default")
if _ASKED not in ("default", "all"):
    raise ValueError(f"FSDP_TESTS is 'default' or 'all', not {_ASKED!r}")

EVERYTHING: Final = _ASKED == "all"
"""True if every pattern runs in every simulated world, all programs over gloo run with two and three processes, every tree
is explored, and `examples/train.py` runs with all combinations of options that its test has."""


def some(first: T, *others: T) -> list[T]:
    """Cases of a test that repeat one statement: the first, or with `FSDP_TESTS=all` all of them."""
    return [first, *others] if EVERYTHING else [first]


_PARTS: Final = {
    "state_dict/test_dimensions": 3,
    "api/test_dimensions": 3,
    "building/test_experts": 6,
    "rehearsal/test_parallel": 3,
}
"""Files of whose tests each runs with a part of its cases: one in so many."""


def runs(item: Any) -> bool:
    """Whether a test runs. Of each function of `_PARTS` the first case runs, and a part of the others, by their names."""
    case = getattr(item, "callspec", None)
    part = 1 if EVERYTHING else _PARTS.get(f"{item.path.parent.name}/{item.path.stem}", 1)
    return case is None or not any(case.indices.values()) or crc32(item.name.encode()) % part == 0
