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
from fsdp.state_dict.param_shard import ParamShard

PART = "gradients"


def refuse_kept_gradients(model_view: ModelView) -> None:
    """Raise ShardingError if gradients wait for a backward that synchronises."""
    for engine in model_view.engines:
        if engine.reducer.keeps_gradients:
            raise refusal(
                "save: gradients are kept under no_sync, unsharded on each rank, and no checkpoint has a place for them; save "
                "after a backward that synchronises, or zero them first.",
                engine,
            )


def gradients_here(model_view: ModelView) -> dict[str, bool]:
    """Whether there is a gradient, by the name of each sharded parameter that has one or has elements on this rank.

    Refused if a parameter that is not sharded has a gradient, which differs between ranks.
    """
    found = {}
    for name, parameter in model_view.parameters:
        param_shard = model_view.param_shards.get(id(parameter))
        if param_shard is None and parameter.grad is not None:
            raise ShardingError(f"save: the gradient of {name!r}, which is not sharded, is each rank's own; zero it first.")
        if param_shard is not None and (parameter.grad is not None or param_shard.placement.part.numel):
            found[name] = parameter.grad is not None
    return found


def gradient_state(model_view: ModelView, by_rank: list[dict[str, bool]]) -> dict[str, Tensor]:
    """This rank's shards of all gradients by name, given what `gradients_here` returns on each rank.

    Raises:
        ShardingError: on every rank; of the ranks that hold elements of a parameter, some have a gradient and others have none.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model_view.parameters:
        there = [rank for rank, found in enumerate(by_rank) if found.get(name)]
        if not there:
            continue
        param_shard = model_view.param_shards[id(parameter)]
        absent = [rank for rank, found in enumerate(by_rank) if found.get(name) is False]
        if absent:
            raise ShardingError(f"save: ranks {absent} have no gradient of {name!r}, ranks {there} have; zero it on every rank.")
        local = parameter if parameter.grad is None else parameter.grad  # without a gradient, this rank has no elements
        state[name] = param_shard.placement.value(name, dense(local))
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
