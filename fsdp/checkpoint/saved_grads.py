"""Gradients in a checkpoint: a save in the middle of an accumulation.

A gradient that exists at a save may be half of a sum, or a leftover of the last step. Only the user knows which, so gradients
are saved on request. Gradients kept under `no_sync` are always half of a sum, unsharded, and different on each rank: they are
refused.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp.errors import ShardingError
from fsdp.reduction.sparse import as_rows, dense
from fsdp.runtime.registry import refusal
from fsdp.shards.shard_tensor import plain
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_shard import ParamShard, agree_on_gradients

PART = "gradients"


def refuse_each_ranks_own(model_view: ModelView, accumulated: bool) -> None:
    """Raise ShardingError if gradients wait for a backward that synchronises; or, with `accumulated`, one is not sharded."""
    for engine in model_view.engines:
        if engine.reducer.keeps_gradients:
            raise refusal(
                "save: gradients are kept under no_sync, unsharded on each rank, and no checkpoint has a place for them; save "
                "after a backward that synchronises, or zero them first.",
                engine,
            )
    for name, parameter in model_view.parameters if accumulated else ():
        if parameter.grad is not None and id(parameter) not in model_view.param_shards:
            raise ShardingError(f"save: the gradient of {name!r}, which is not sharded, is each rank's own; zero it first.")


def gradient_state(model_view: ModelView) -> dict[str, Tensor]:
    """This rank's shards of all gradients by name. Communicates. Refuses what `agree_on_gradients` refuses."""
    has_grad = agree_on_gradients(model_view.units, model_view.world_comm, "save")
    state: dict[str, Tensor] = {}
    for name, parameter in model_view.parameters:
        if has_grad.get(id(parameter)):
            local = parameter if parameter.grad is None else parameter.grad  # without a gradient, this rank has no elements
            state[name] = model_view.param_shards[id(parameter)].placement.value(name, dense(local))
    return state


def restore_gradients(model_view: ModelView, given: dict[str, Any]) -> None:
    """Set `.grad` of every sharded parameter: the shard in `given`, or None."""
    for name, parameter in model_view.parameters:
        if id(parameter) in model_view.param_shards:
            param_shard = model_view.param_shards[id(parameter)]
            if name not in given:
                parameter.grad = None
                continue
            local = param_shard.placement.part_of_value(given[name])
            assert local is not None, "it was read into memory of this rank's part"
            parameter.grad = as_rows(local) if param_shard.flat.is_sparse else param_shard.placement.as_shard(local)


def target_of_gradient(operation: str, name: str, param_shard: ParamShard | None, shape: tuple[int, ...]) -> Tensor:
    """New memory for this rank's shard of the gradient of `name`. Refused if the model has no sharded parameter like it."""
    if param_shard is None or param_shard.shape != shape:
        raise ShardingError(f"{operation}: there is a gradient of {name!r}, {shape}, and no such sharded parameter in the model.")
    return param_shard.placement.value(name, torch.empty_like(plain(param_shard.parameter)))
