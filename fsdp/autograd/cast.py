"""Casts the inputs and the outputs of a forward to another dtype."""

from collections.abc import MutableMapping, MutableSequence
from dataclasses import fields, is_dataclass, replace
from operator import is_, is_not
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN: Final = frozenset({type(None), bool, int, float, str})


class Cast:
    """A cast of values to another dtype. A container in which nothing is cast stays the same object."""

    __slots__ = ("_containers", "_dtype", "_tensors")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        """Each tensor that was cast, what was made of it, and how often this had been changed by then."""
        self._containers: list[tuple[Any, Any, dict[int, Any]]] = []
        """Each container that was copied, its copy, and what was given in place of the items of the copy, by their ids."""

    def __call__(self, thing: Any) -> Any:
        """`thing` with its floating-point tensors in the dtype. Plain objects in it stay as they are."""
        if isinstance(thing, Tensor):
            if not thing.is_floating_point() or thing.dtype == self._dtype:
                return thing
            tensor = thing.to(self._dtype)
            self._tensors.append((thing, tensor, _version(tensor)))
            return tensor
        if type(thing) in _PLAIN:
            return thing
        is_dataclass_object = _is_dataclass_object(thing)
        if is_dataclass_object:
            names = [field.name for field in fields(thing) if field.init]
            parts = [getattr(thing, name) for name in names]
        else:
            parts, spec = tree_flatten(thing, is_leaf=lambda one: one is not thing)
            if spec.is_leaf():
                return thing
        cast = [*map(self, parts)]
        if all(map(is_, cast, parts)):
            return thing
        copy = replace(thing, **dict(zip(names, cast, strict=True))) if is_dataclass_object else tree_unflatten(cast, spec)
        self._containers.append((thing, copy, {id(one): given for one, given in zip(cast, parts, strict=True)}))
        return copy

    def write_back(self) -> None:
        """Give to the caller what a forward has written into what was cast: a cache, a list of losses.

        A tensor that requires a gradient is left as it is.
        """
        for given, tensor, version in self._tensors:
            if (version < 0 or tensor._version != version) and not given.requires_grad:
                with torch.no_grad():
                    given.copy_(torch.where(tensor != given.to(self._dtype), tensor, given))
        for given, copy, items in self._containers:
            if isinstance(given, MutableMapping):
                now = {key: items.get(id(value), value) for key, value in copy.items()}
                for key in given.keys() - now.keys():
                    del given[key]
                for key, value in now.items():
                    if key not in given or given[key] is not value:
                        given[key] = value
            elif isinstance(given, MutableSequence):
                values = [items.get(id(value), value) for value in copy]
                if len(values) != len(given) or any(map(is_not, values, given)):
                    given.clear()
                    given.extend(values)
            elif _is_dataclass_object(given):
                for field in fields(given):
                    value = getattr(copy, field.name)
                    if (value := items.get(id(value), value)) is not getattr(given, field.name):
                        setattr(given, field.name, value)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 in inference mode, where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _is_dataclass_object(thing: Any) -> bool:
    # a dataclass that is also a mapping (for example a model output) is rebuilt as it is registered with pytree
    return is_dataclass(thing) and not isinstance(thing, type | MutableMapping)
