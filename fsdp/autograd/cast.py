"""Casts the inputs and the outputs of a forward to another dtype."""

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import repeat
from operator import is_, is_not
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN: Final = frozenset({type(None), bool, int, float, str})


class Cast:
    """A cast of values to another dtype. A container in which nothing is cast stays the same object.

    A unit may write into what it is given: a list of losses, a cache. Where that is a copy, `write_back` gives it to the caller.
    """

    __slots__ = ("_containers", "_dtype", "_made", "_tensors")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[int, tuple[Any, Any]] = {}
        """Each tensor and container that was copied, and its copy, by its id: one copy, wherever it stands."""
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        """Each tensor that was cast and counts its changes, what was made of it, and how often that had been changed by then."""
        self._containers: list[tuple[Any, Any, dict[int, Any]]] = []
        """Each container that was copied, its copy, and what was given in place of the items of the copy, by their ids."""

    def __call__(self, thing: Any) -> Any:
        """`thing` with its floating-point tensors in the dtype. Plain objects in it stay as they are."""
        kind = type(thing)
        if kind in _PLAIN or (isinstance(thing, Tensor) and (not thing.is_floating_point() or thing.dtype == self._dtype)):
            return thing
        if (known := self._made.get(id(thing))) is not None:
            return known[1]
        if isinstance(thing, Tensor):
            tensor = thing.to(self._dtype)
            self._made[id(thing)] = thing, tensor
            if not (tensor.is_inference() or thing.is_inference()):
                self._tensors.append((thing, tensor, tensor._version))
            return tensor
        make: Callable[[list[Any]], Any]
        if kind is tuple or kind is list:
            parts, make = [*thing], kind
        elif kind is dict:
            parts, make = [*thing.values()], lambda values: dict(zip(thing, values, strict=True))
        elif _is_dataclass_object(thing):
            names = _attributes(thing)
            parts, make = [getattr(thing, name) for name in names], partial(_copy_with, thing, names)
        else:
            # torch's function leaves a cycle of references, in which `thing` must not be: it would live until it is collected
            is_top = repeat(False, 1)
            parts, spec = tree_flatten(thing, is_leaf=lambda _: next(is_top, True))
            if spec.is_leaf():
                return thing
            make = partial(tree_unflatten, treespec=spec)
        cast = [*map(self, parts)]
        if all(map(is_, cast, parts)):
            return thing
        made = make(cast)
        self._made[id(thing)] = thing, made
        self._containers.append((thing, made, {id(one): given for one, given in zip(cast, parts, strict=True)}))
        return made

    def write_back(self) -> None:
        """Give to the caller what a forward has written into what was cast.

        Not into a tensor that requires a gradient or an expanded one, nor what has a gradient to compute.
        """
        for given, tensor, version in self._tensors:
            is_changed = tensor._version != version and not (given.requires_grad or tensor.requires_grad)
            if is_changed and given.layout is torch.strided and torch._debug_has_internal_overlap(given) != 1:
                with torch.no_grad():
                    given.copy_(torch.where(tensor != given.to(self._dtype), tensor, given))
        for given, made, items in self._containers:
            if isinstance(given, MutableMapping):
                now = {key: items.get(id(value), value) for key, value in made.items()}
                for key in given.keys() - now.keys():
                    del given[key]
                for key, value in now.items():
                    if key not in given or given[key] is not value:
                        given[key] = value
            elif isinstance(given, MutableSequence):
                values = [items.get(id(value), value) for value in made]
                if len(values) != len(given) or any(map(is_not, values, given)):
                    given.clear()
                    given.extend(values)
            elif _is_dataclass_object(given):
                for name in _attributes(made):
                    value = items.get(id(getattr(made, name)), getattr(made, name))
                    if not hasattr(given, name) or value is not getattr(given, name):
                        object.__setattr__(given, name, value)


def _copy_with(thing: Any, names: list[str], values: list[Any]) -> Any:
    """A copy of a dataclass object that has these values of its attributes."""
    made = copy(thing)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # it may be frozen
    return made


def _attributes(thing: Any) -> list[str]:
    """The names of a dataclass object's fields that are set, and of its other attributes, such as a cached property."""
    return [
        *dict.fromkeys([*(field.name for field in fields(thing) if hasattr(thing, field.name)), *getattr(thing, "__dict__", ())])
    ]


def _is_dataclass_object(thing: Any) -> bool:
    # a dataclass that is also a mapping (for example a model output) is rebuilt as it is registered with pytree
    return is_dataclass(thing) and not isinstance(thing, type | Mapping)
