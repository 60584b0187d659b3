"""How much is tested where a test has many sizes: a part, or with `FSDP_TESTS=all` all of it."""

import os
from typing import Final

_ASKED: Final = os.environ.get("FSDP_TESTS", "default")
if _ASKED not in ("default", "all"):
    raise ValueError(f"FSDP_TESTS is 'default' or 'all', not {_ASKED!r}")

EVERYTHING: Final = _ASKED == "all"
"""True if every pattern runs in every simulated world, all programs over gloo run with two and three processes, every tree
is explored, and `examples/train.py` runs with all combinations of options that its test has."""
