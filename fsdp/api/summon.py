"""Full parameters for the user: in the Parameter objects, or in place of them in torch's functions.

[Note: full values on use]
`full_parameters` sees each call of a torch function (TorchFunctionMode) and gives it full values in place of shards. Code of this
package needs the shards, so calls of it pass. The innermost frame that is not torch's says whose call it is.
A full value is a function of the unsharded parameter (gathered_copies.py): its gradient arrives there, and is reduced like
others. One gather serves all parameters of a flat buffer. When to gather again must be decided alike on every rank, so nothing
asks the version counters of the shards: a rank without elements of a unit never sees them change. They only serve to refuse.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.frames import called_by_this_package, stepping_optimizer
from fsdp.config import as_flag
from fsdp.errors import ShardingError
from fsdp.params.gathered_copies import GatheredCopies
from fsdp.params.unit import Unit, unit_of_shard
from fsdp.runtime.registry import UnitRef, units_in
from state_machine import Event

_ACCESSES: Final = {"__get__", "__set__", "__delete__"}
"""The names of torch's functions that read and write attributes of a tensor."""
_SHAPES: Final = {"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "__len__"}
"""What the unsharded parameter answers, which needs no memory for that."""
_NO_VALUES: Final = {
    *("grad", "_grad", "grad_fn", "requires_grad", "requires_grad_", "is_leaf", "retain_grad", "retains_grad", "output_nr"),
    *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *("dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_floating_point", "is_complex", "get_device"),
    *("element_size", "itemsize", "name", "names", "__hash__", "__repr__", "__deepcopy__", "__reduce_ex__", "__dir__"),
}
"""Functions and attributes that do not ask for the value of a tensor: the shard answers."""
_IN_PLACE: Final = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "data"),
}
_TARGETS: Final = ("out", "tensor", "input", "self")
"""The names of arguments that a function in place changes."""


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Give the parameters of `model` their full values inside: same Parameter objects, full shapes, the dtype of the shards.

    With `writeback`, each rank keeps its part of every change that was made inside; without it, changes are dropped. `.grad` is
    not there inside and comes back at the end, so `zero_grad` does nothing inside. A forward under `torch.no_grad()` works and
    does not communicate. Communicates on entry: every rank must call it alike. Where shards are DTensors, the modules show other
    Parameter objects inside, as a forward sees them: one that tensor parallelism has cut is a DTensor, whose `full_tensor()` is
    all of it.

    Memory: the full model, on every rank.

    Raises:
        IllegalTransition: a forward, a backward or another summon is running.
        ShardingError: `model` contains no unit, or a shard was replaced by a tensor that does not fit.
    """
    with summoned_units(units_in(model, "summon_full_params"), as_flag("summon_full_params: writeback", writeback)):
        yield


@contextmanager
def summoned_units(units: Iterable[UnitRef], writeback: bool) -> Iterator[None]:
    """Give the parameters of these units their full values inside; see `summon_full_params`. Communicates on entry."""
    entered: list[UnitRef] = []
    writes_back = False
    try:
        for unit in units:
            if not unit.unit.has_full_params:
                unit.unit.check_shards()
            unit.engine.on_event(unit.index, Event.SUMMON)
            entered.append(unit)
        yield
        for unit in entered if writeback else ():  # all of them before the first one writes
            unit.unit.check_full()
        writes_back = writeback
    finally:
        for unit in entered:
            unit.engine.on_event(unit.index, Event.UNSUMMON_WRITEBACK if writes_back else Event.UNSUMMON_DISCARD)


def full_parameters(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, torch's functions take the parameters of `model` for full parameters, which are gathered on use. Differentiable.

    Put it around a loss term on weights: `sum(p.pow(2).sum() for p in model.parameters())`, `p.norm()`, `p @ p.T`. The
    parameter objects stay what they are, so a list that was made before will do. The value has the dtype of the shard, not that
    in which the unit computes. Its gradient is averaged over the ranks like every other and added to that of the forward, if
    one backward brings both. So every rank adds the same term: a term on one rank of W counts as 1/W of it.

    Forwards, backwards, steps of optimizers and functions of this package work inside as they do outside. `.grad` is that of the
    shard. A term inside a function that activation checkpointing recomputes is refused in its backward.

    Communicates when the first parameter of a unit is used, and again after a backward or a step: every rank must use the units
    in the same order. A shape communicates nothing. Memory: each unit that is used in full, until the next backward or step, or
    the end; longer if a graph holds it.

    Raises:
        ShardingError: `model` contains no unit; or a parameter is changed in place inside.
    """
    return _full_parameters(frozenset(ref.unit for ref in units_in(model, "full_parameters")))


@contextmanager
def _full_parameters(units: frozenset[Unit]) -> Iterator[None]:
    values, thread = _FullValues(units), get_ident()

    def stepped(*_: Any) -> None:
        if get_ident() == thread:  # ranks may be threads
            values.forget()

    handle = register_optimizer_step_post_hook(uncompiled(stepped))
    try:
        with values:
            yield
        values.forget()
    finally:
        handle.remove()


class _FullValues(TorchFunctionMode):
    """Gives torch's functions the full values of the parameters of some units, in place of their shards."""

    def __init__(self, units: frozenset[Unit]) -> None:
        super().__init__()
        self._units = units
        self._copies: tuple[GatheredCopies, GatheredCopies] = {}, {}
        """Those that were gathered outside inference mode, and those inside, which cannot have a graph."""
        self._versions: dict[Unit, int] = {}
        """By unit: what the clock of its shards showed when they were gathered."""
        self._values: dict[tuple[nn.Parameter, bool, bool, bool], tuple[Tensor, int]] = {}
        """By parameter, and by what decides whether the value has a graph: the full value, and its version when it was made."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.__self__.__name__ if func.__name__ in _ACCESSES else func.__name__
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            result = func(*args, **kwargs)
            self.forget()
            return result
        if (
            name in _NO_VALUES
            or not (found := [p for p in tree_leaves((args, kwargs)) if isinstance(p, nn.Parameter) and self._unit_of(p)])
            or called_by_this_package()
            or stepping_optimizer()
        ):
            return func(*args, **kwargs)
        targets = tree_leaves((args[:1], [kwargs[key] for key in _TARGETS if key in kwargs]))
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or func.__name__ == "__set__"
        if (in_place or "out" in kwargs) and any(one is target for one in found for target in targets):
            raise self._changed(found[0], name)
        args, kwargs = tree_map_only(nn.Parameter, self._shape if name in _SHAPES else self._value, (args, kwargs))
        return func(*args, **kwargs)

    def forget(self) -> None:
        """Drop the values: weights will change.

        Raises:
            ShardingError: a value was changed in place, which reached no parameter.
        """
        values, self._values = self._values, {}
        for copies in self._copies:
            copies.clear()
        self._versions.clear()
        for (parameter, *_), (value, version) in values.items():
            if _version_of(value) != version:
                raise self._changed(parameter, "a change of its full value")

    def _unit_of(self, parameter: nn.Parameter) -> Unit | None:
        """The unit of a sharded parameter; None for one that is in full now."""
        unit = unit_of_shard(parameter)
        return unit if unit in self._units else None

    def _shape(self, parameter: nn.Parameter) -> Tensor:
        unit = self._unit_of(parameter)
        return parameter if unit is None else unit.unsharded_of(parameter)

    def _value(self, parameter: nn.Parameter) -> Tensor:
        unit = self._unit_of(parameter)
        if unit is None:
            return parameter
        if self._versions.setdefault(unit, unit.versions.now()) != unit.versions.now():
            raise self._changed(parameter, "a change of its shard")
        key = parameter, parameter.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if key not in self._values:
            value = unit.full_value(parameter, self._copies[torch.is_inference_mode_enabled()])
            self._values[key] = value, _version_of(value)
        return self._values[key][0]

    def _changed(self, parameter: nn.Parameter, cause: str) -> ShardingError:
        unit = self._unit_of(parameter)
        assert unit is not None, "only shards have values here"
        infos = zip(unit.sharded_params, unit.param_infos, strict=True)
        label = next(info.names[0] for sharded, info in infos if sharded is parameter)
        return ShardingError(
            f"parameter {label!r} of unit {unit.name!r} is changed inside full_parameters, by {cause}, where its full value is a "
            "copy. Change weights after the block, or full values inside fsdp.summon_full_params(model, writeback=True)."
        )


def _version_of(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version  # torch counts no changes of a tensor made in inference mode
