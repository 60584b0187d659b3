"""From units back to ordinary parameters: gathered one at a time, in the user's own Parameter objects."""

import torch
from torch import Tensor, nn

from fsdp.comm.exchanges import gather_parts
from fsdp.errors import ShardingError
from fsdp.params.param_info import ParamInfo
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.shards.dtensors import is_replaced
from fsdp.shards.optimizer_state import cuts
from fsdp.shards.shard_tensor import plain
from fsdp.state_dict.param_shard import HasGrad, ParamShard, param_shards_of


def refuse_losses(engine: Engine, function_name: str) -> None:
    """Raise ShardingError if an engine between two steps keeps gradients, or is inside `fsdp.join`: they would be lost."""
    name = engine.units[0].name
    if engine.reducer.keeps_gradients:
        raise ShardingError(
            f"{function_name}: unit {name!r} keeps gradients under no_sync; run the backward that synchronises first."
        )
    if engine.watcher.is_join:
        raise ShardingError(f"{function_name}: unit {name!r} is inside fsdp.join; call it after that.")


@torch.no_grad()
def dissolve(unit: Unit, has_grad: HasGrad, keeps: bool = True) -> None:
    """Turn the parameters of `unit`, which has no engine any more, into ordinary ones. Communicates.

    With `keeps` they have their full values and gradients, in memory of their own; without it they are on the meta device. What
    was a DTensor before it was sharded is one again.

    Memory: the full parameters and gradients of the unit, beside its shards; without `keeps`, one parameter.
    """
    cuts.count += 1
    for param_shard in param_shards_of(unit):
        parameter = param_shard.parameter
        full = _gather(param_shard, plain(parameter), unit)
        gradient = _gather_grad(param_shard, unit) if has_grad[id(parameter)] else None
        if not keeps:
            full, gradient = full.to("meta"), None
        flat, number = param_shard
        flat.placements[number].make_full(flat.param_infos[number], flat.unsharded_params[number], full, gradient)
    unit.dissolve()
    for sharded, info in zip(unit.sharded_params, unit.param_infos, strict=True):
        if info.parameter is not sharded:
            _replace_dtensor(sharded, info)


def _replace_dtensor(sharded: nn.Parameter, info: ParamInfo) -> None:
    """Put the parameter of `info` in the place of the DTensor `sharded`, with the hooks that the user has set on that."""
    parameter = info.parameter
    is_replaced(sharded, "was made for the shards of a module that has been unwrapped: make another one from its parameters.")
    for hook in (sharded._backward_hooks or {}).values():
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    for module, slot in info.slots:
        setattr(module, slot, parameter)


def _gather_grad(param_shard: ParamShard, unit: Unit) -> Tensor:
    gradient = param_shard.parameter.grad
    if gradient is not None and gradient.is_sparse:
        return gradient.to(param_shard.flat.device)  # of a parameter that every rank has in full
    return _gather(param_shard, plain(param_shard.parameter if gradient is None else gradient), unit)


def _gather(param_shard: ParamShard, local: Tensor, unit: Unit) -> Tensor:
    """The unsharded tensor of which `local` is this rank's part, on every rank, where that computes, in memory of its own."""
    flat, placement = param_shard.flat, param_shard.placement
    full = torch.empty(placement.extent.shape, dtype=local.dtype, device=flat.device)
    gather_parts(full, placement.cut.spans(), placement.stored(local), flat.comm, unit.name)
    return placement.unsharded(placement.shown(full).contiguous())
