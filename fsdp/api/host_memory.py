"""Moves shards and optimizer state to host memory between two phases of a program, and back.

Rule 1: no tensor is replaced. Its storage loses its memory and gets it back, so that parameters, views and the keys of optimizers
        stay what they are.
"""

import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp.building.dissolve import refuse_losses
from fsdp.device.storage import HostCopies, empty_cache, is_base, size_of
from fsdp.errors import ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_in, refusal, refuse_unless_resting, reshard
from fsdp.shards.shard_tensor import plain


class _PutAway(NamedTuple):
    """What `offload` has moved for one model."""

    copies: HostCopies
    handles: list[Any]
    """Hooks that refuse calls of the optimizers."""


_put_away: Final[weakref.WeakKeyDictionary[Engine, _PutAway]] = weakref.WeakKeyDictionary()
"""By each engine whose units are in host memory. Those of one call of `offload` have one, and come back together."""


@torch.no_grad()
def offload(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Move the shards of `model` and the state of its optimizers to host memory, and free their memory on the device.

    For a program that shares its device between phases, such as training and generating. Until `fsdp.onload`, forwards, steps,
    checkpoints and everything else that needs the weights are refused. Buffers and ignored parameters stay on the device. Every
    rank should call it; it does not communicate. What is on the host already stays there.

    Memory: on the host, this rank's shards and the state of the optimizers.

    Raises:
        ShardingError: inside a forward, a backward, a summon or `fsdp.join`, or between a forward and its backward; a parameter
            has a gradient, a state dict with values on the device is held, or gradients are kept under `no_sync`; the model is in
            host memory already, contains no unit, or is only a part of a root. Nothing was changed.
    """
    engines = engines_in(model, "offload")
    for engine in engines:
        _refuse(engine)
    put_away = _PutAway(HostCopies(), [])
    for engine in engines:
        _put_away[engine] = put_away
        reshard(engine)
        for unit in engine.units:
            unit.set_put_away(True)
        for bucket in engine.reducer.buckets:
            bucket.memory.release(engine.tracker, even_if_stays=True)
    for optimizer in optimizers:
        put_away.handles.extend(_refuse_steps(optimizer))
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, Tensor):
                put_away.copies.move(plain(value))
    for engine in engines:
        for unit in engine.units:
            for flat in unit.flats:
                put_away.copies.move(flat.shard)
    for engine in engines:
        empty_cache(engine.units[0].device)


@torch.no_grad()
def onload(model: nn.Module) -> None:
    """Move what `fsdp.offload` has moved to host memory back to the device: all of that call. Does nothing if nothing was moved.

    Raises:
        torch.OutOfMemoryError: the device has too little memory. Free some, and call this again.
        ShardingError: the model contains no unit, or is only a part of a root.
    """
    found = [_put_away[engine] for engine in engines_in(model, "onload") if engine in _put_away]
    for put_away in {id(one): one for one in found}.values():
        put_away.copies.move_back()
        for handle in put_away.handles:
            handle.remove()
        for engine in [engine for engine, one in _put_away.items() if one is put_away]:
            for unit in engine.units:
                unit.set_put_away(False)
            del _put_away[engine]


def _refuse(engine: Engine) -> None:
    """Raise ShardingError if something would be lost, or the engine is not between two steps."""
    name = engine.units[0].name
    if engine.units[0].is_put_away:
        raise ShardingError(f"offload: unit {name!r} is in host memory already; call fsdp.onload(model) first.")
    refuse_unless_resting("offload", engine)
    refuse_losses(engine, "offload")
    if engine.pending_backward.is_due:
        raise refusal(f"offload: unit {name!r} is between a forward and its backward; call it after the backward.", engine)
    for unit in engine.units:
        if any(flat.shard.device.type not in ("cpu", "meta") and is_base(flat.shard) for flat in unit.flats):
            raise ShardingError(
                f"offload: a state dict of unit {unit.name!r} is held, whose values are the memory that is to be moved; delete "
                "it first, or keep copies of its values."
            )
        for info in unit.param_infos:
            gradient = info.parameter.grad
            if gradient is not None and size_of(gradient):
                raise ShardingError(
                    f"offload: parameter {info.names[0]!r} has a gradient; step, and call optimizer.zero_grad() before."
                )


def _refuse_steps(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Let an optimizer refuse what reads its state. The handles end that."""

    def refuse(*_: Any) -> None:
        raise ShardingError("the state of this optimizer is in host memory since fsdp.offload; call fsdp.onload(model) first.")

    registers = (
        optimizer.register_step_pre_hook,
        optimizer.register_state_dict_pre_hook,
        optimizer.register_load_state_dict_pre_hook,
    )
    return [register(refuse) for register in registers]
