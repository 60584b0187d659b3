"""Tensors inside whatever a forward takes and returns, and modules inside modules."""

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

DEPTH: Final = 8
"""How deep containers in containers are searched."""


def tensors_in(thing: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings, sets, dataclasses and plain objects (a cache class, for example)."""
    if isinstance(thing, Tensor):
        yield thing
    elif depth == 0 or thing is None or isinstance(thing, str | bytes | int | float | complex | type | nn.Module):
        return
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors_in(value, depth - 1)
        if hasattr(thing, "__dict__") or is_dataclass(thing):  # a model output that is a mapping and has fields
            yield from _in_attributes(thing, depth)
    elif isinstance(thing, tuple | list | set | frozenset):
        for value in thing:
            yield from tensors_in(value, depth - 1)
    elif not callable(thing):
        yield from _in_attributes(thing, depth)


def modules_within(module: nn.Module, others: Collection[int]) -> Iterator[nn.Module]:
    """`module` and the modules below it, but for those whose ids are in `others` and what is below them."""
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from modules_within(child, others)


class Attributes:
    """What a module's author or user keeps on it, beside parameters, buffers, modules and torch's own."""

    __slots__ = ("_count", "_module", "_names")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._count = -1
        self._names: list[str] = []

    def values(self) -> list[Any]:
        """The values now. As fast as can be: it is asked in every forward."""
        now = vars(self._module())
        if len(now) != self._count:
            self._count = len(now)
            self._names = [name for name in now if name not in _OWN_TO_TORCH]
        return list(map(now.get, self._names))


_OWN_TO_TORCH: Final = frozenset(vars(nn.Module()))


def _in_attributes(thing: Any, depth: int) -> Iterator[Tensor]:
    for value in list(getattr(thing, "__dict__", {}).values()):
        yield from tensors_in(value, depth - 1)
    for owner in type(thing).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield from tensors_in(getattr(thing, name, None), depth - 1)


def cast_floating(thing: Any, dtype: torch.dtype) -> Any:
    """The same structure with its floating-point tensors in `dtype`; plain objects are left as they are."""
    return tree_map(partial(_cast_leaf, dtype), thing, is_leaf=_is_dataclass_object)


def _cast_leaf(dtype: torch.dtype, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype != dtype else leaf
    if _is_dataclass_object(leaf):
        return replace(leaf, **{one.name: cast_floating(getattr(leaf, one.name), dtype) for one in fields(leaf) if one.init})
    return leaf


def _is_dataclass_object(thing: Any) -> bool:
    # one that is a mapping too (a model output, for example) has its own way of being rebuilt
    return is_dataclass(thing) and not isinstance(thing, type | Mapping)
