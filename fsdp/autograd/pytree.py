"""Finds the tensors in the inputs and outputs of a forward, and the modules below a module."""

from collections import deque
from collections.abc import Collection, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import is_dataclass
from typing import Any, Final

from torch import Tensor, nn

DEPTH: Final = 8
"""How many levels of nested containers are searched."""


def tensors_in(thing: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, deques, mappings, sets, dataclasses and plain objects (for example a cache class)."""
    if isinstance(thing, Tensor):
        yield thing
    elif depth == 0 or thing is None or isinstance(thing, str | bytes | int | float | complex | type | nn.Module):
        return
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors_in(value, depth - 1)
        if hasattr(thing, "__dict__") or is_dataclass(thing):  # for example a model output, which is a mapping with fields
            yield from _in_attributes(thing, depth)
    elif isinstance(thing, tuple | list | set | frozenset | deque | ValuesView | ItemsView):
        for value in thing:
            yield from tensors_in(value, depth - 1)
    elif not callable(thing):
        yield from _in_attributes(thing, depth)


def modules_within(module: nn.Module, others: Collection[int]) -> Iterator[nn.Module]:
    """`module` and the modules below it, without those whose ids are in `others` and without what is below those."""
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from modules_within(child, others)


MANAGED: Final = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""The attributes by which other libraries know a module of a unit, as torch's FSDP sets them.

transformers asks for the first one: then all ranks run a layer, or a step of `generate`, that one of them needs. The compiler of
torch asks for both, and does not compile a module that has the first alone. Both are False with `uneven_paths`.
"""


def _in_attributes(thing: Any, depth: int) -> Iterator[Tensor]:
    for value in list(getattr(thing, "__dict__", {}).values()):
        yield from tensors_in(value, depth - 1)
    for owner in type(thing).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield from tensors_in(getattr(thing, name, None), depth - 1)
