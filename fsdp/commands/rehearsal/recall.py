"""Remembers what operators return on the meta device, because torch computes that in Python, and layers repeat.

Rule 1: what is remembered is the shape, strides and dtype of results. They depend on nothing but those of the tensors given and
        the other arguments, as no tensor has values.
Rule 2: an operator that changes values alone has nothing to do once it was called with arguments of the same kind. One that
        changes the shape of a tensor or returns a part of one is always called, and so is one with a tensor of another device
        or of another class.
"""

from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN: Final = (Tensor, nn.Parameter)
_Key: TypeAlias = tuple[Any, ...]


class _Kind(Enum):
    """What an operator does with tensors."""

    MAKES_NEW = auto()
    """It returns nothing but new tensors, and changes none."""
    CHANGES_VALUES = auto()
    """It changes the values of arguments, and returns the first one or nothing."""
    COLLECTIVE = auto()
    """It is a collective of torch, or waits for one."""
    OTHER = auto()


class _Result(NamedTuple):
    """How to make a tensor like the one that an operator returned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _NotRememberedError(Exception):
    """An argument whose effect on the result is not known."""


class Recall:
    """Calls operators, each only once for arguments of the same kind."""

    def __init__(self) -> None:
        self._results: dict[_Key, _Result | tuple[_Result, ...]] = {}
        self._succeeded: set[_Key] = set()
        """Calls of operators that change values alone."""
        self._kinds: dict[Any, _Kind] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns: its own result, or new tensors like those of an earlier call."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind is _Kind.OTHER:
            return func(*args, **kwargs)
        if kind is _Kind.COLLECTIVE:
            from fsdp.commands.rehearsal.torch_groups import call_collective  # the import takes half a second

            return call_collective(func, args, kwargs)
        try:
            floats = kind is _Kind.MAKES_NEW
            key = (func, _key_of(args, floats), _key_of(tuple(kwargs.items()), floats) if kwargs else ())
            if not floats:
                return self._change(key, func, args, kwargs)
            known = self._results.get(key)
        except (_NotRememberedError, TypeError):  # TypeError: an argument without a hash
            return func(*args, **kwargs)
        if known is not None:
            return known.make() if isinstance(known, _Result) else tuple(one.make() for one in known)
        result = func(*args, **kwargs)
        self._remember(key, result, tree_leaves((args, kwargs)))
        return result

    def _change(self, key: _Key, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that changes values alone, unless it succeeded before."""
        if key not in self._succeeded:
            func(*args, **kwargs)
            self._succeeded.add(key)
        return args[0] if func._schema.returns else None

    def _remember(self, key: _Key, result: Any, given: list[Any]) -> None:
        made = [result] if isinstance(result, Tensor) else result
        if not isinstance(made, list | tuple) or not made or not all(map(_can_be_made, made)):
            return
        storages = {one.untyped_storage()._cdata for one in made}
        shared = storages & {one.untyped_storage()._cdata for one in given if isinstance(one, Tensor)}
        if len(storages) < len(made) or shared:
            return
        found = tuple(_Result(tuple(one.shape), one.stride(), one.dtype) for one in made)
        self._results[key] = found[0] if isinstance(result, Tensor) else found


class Recalling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls the operators of the code inside by a `Recall`."""

    def __init__(self, recall: Recall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recall = recall

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch puts a function around the next one that keeps its compiler away, which takes as long as the rest. None runs."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if opens(types) else self._recall.call(func, args, kwargs or {})


def opens(types: Any) -> bool:
    """Whether tensors of these classes call operators of ordinary tensors, which are seen: DTensors, and results to await."""
    return any([kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types])


def is_collective(func: Any) -> bool:
    """Whether an operator is a collective of torch, or waits for one."""
    return func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def _kind_of(func: Any) -> _Kind:
    if is_collective(func):
        return _Kind.COLLECTIVE
    schema = func._schema
    returned, given = schema.returns, schema.arguments
    if any(str(one.type) != "Tensor" for one in returned) or not given:
        return _Kind.OTHER
    if all(one.alias_info is None for one in (*given, *returned)):
        return _Kind.MAKES_NEW if returned else _Kind.OTHER
    aliases = [one.alias_info for one in (*given, *returned) if one.alias_info is not None]
    only_writes = all(one.is_write for one in aliases) and torch.Tag.inplace_view not in func.tags
    # an argument `out` is resized where it has another shape
    is_in_place = given[0].alias_info is not None and not any(one.is_out for one in given)
    returns_first = len(returned) == 1 and _sets(returned[0]) == _sets(given[0]) if returned else True
    return _Kind.CHANGES_VALUES if only_writes and is_in_place and returns_first else _Kind.OTHER


def _sets(one: Any) -> Any:
    """The names of the memory behind an argument or a result of a schema."""
    return None if one.alias_info is None else one.alias_info.before_set


def _can_be_made(one: Any) -> bool:
    """Whether `empty_strided` makes a tensor with as much memory."""
    if type(one) is not Tensor or not _is_ordinary(one) or one.storage_offset() != 0:
        return False
    last = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)) + 1 if one.numel() else 0
    return one.untyped_storage().nbytes() == last * one.element_size()


def _is_ordinary(tensor: Tensor) -> bool:
    return tensor.is_meta and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _key_of(value: Any, floats: bool) -> Any:
    """What stands for an argument in a key. `floats`: with the values of floats, from which a few operators compute shapes.

    Raises:
        _NotRememberedError: nothing does.
    """
    kind = type(value)
    if kind in _PLAIN:
        if not _is_ordinary(value):
            raise _NotRememberedError
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if kind is tuple or kind is list:
        return kind, *[_key_of(one, floats) for one in value]
    if isinstance(value, Tensor):
        raise _NotRememberedError
    # 1, 1.0 and True are equal, and lead to different dtypes
    return kind if kind is float and not floats else (kind, value)
