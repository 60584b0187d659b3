"""Gradients in a checkpoint: a save in the middle of an accumulation.

A gradient that exists at a save may be half of a sum, or a leftover of the last step. Only the user knows which, so gradients
are saved on request. Gradients kept under `no_sync` are always half of a sum, unsharded, and different on each rank: they are
refused.
"""

from typing import Any

from torch import Tensor

from fsdp.errors import ShardingError
from fsdp.reduction.sparse import as_rows, dense
from fsdp.runtime.registry import refusal
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_shard import ParamShard

PART = "gradients"


def refuse_kept_gradients(model_view: ModelView) -> None:
    """Raises:
    ShardingError: gradients wait for a backward that synchronises.
    """
    for engine in model_view.engines:
        if engine.reducer.keeps_gradients:
            raise refusal(
                "save: gradients are kept under no_sync, unsharded on each rank, and no checkpoint has a place for them; save "
                "after a backward that synchronises, or zero them first.",
                engine,
            )


def names_of_gradients(model_view: ModelView) -> list[str]:
    """The names of the sharded parameters whose shard on this rank has a gradient.

    Raises:
        ShardingError: a parameter that is not sharded has a gradient, which differs between ranks.
    """
    names = []
    for name, parameter in model_view.parameters:
        if parameter.grad is None:
            continue
        if id(parameter) not in model_view.param_shards:
            raise ShardingError(f"save: the gradient of {name!r}, which is not sharded, is each rank's own; zero it first.")
        names.append(name)
    return names


def gradient_state(model_view: ModelView, by_rank: list[list[str]]) -> dict[str, Tensor]:
    """This rank's shards of all gradients by name, given the names of the gradients on each rank.

    Raises:
        ShardingError: on every rank; of the ranks that hold elements of a parameter, some have a gradient and others have none.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model_view.parameters:
        there = [rank for rank, names in enumerate(by_rank) if name in names]
        if not there:
            continue
        param_shard = model_view.param_shards[id(parameter)]
        size = param_shard.flat.num_shards
        # the ranks of a mesh row have consecutive numbers, and all rows hold the same shards
        absent = [r for r in range(model_view.world_comm.size) if r % size in param_shard.holders and r not in there]
        if absent:
            raise ShardingError(f"save: ranks {absent} have no gradient of {name!r}, ranks {there} have; zero it on every rank.")
        local = parameter if parameter.grad is None else parameter.grad  # without a gradient, this rank has no elements
        state[name] = param_shard.value(name, dense(local))
    return state


def restore_gradients(model_view: ModelView, given: dict[str, Any]) -> None:
    """Set `.grad` of every sharded parameter: the shard in `given`, or None."""
    for name, parameter in model_view.parameters:
        if id(parameter) in model_view.param_shards:
            param_shard = model_view.param_shards[id(parameter)]
            if name not in given:
                parameter.grad = None
            elif param_shard.flat.is_sparse:
                parameter.grad = as_rows(given[name].local)
            else:
                parameter.grad = param_shard.placement.as_shard(given[name].local)


def target_of_gradient(operation: str, name: str, param_shard: ParamShard | None, shape: tuple[int, ...]) -> Tensor:
    """New memory for this rank's shard of the gradient of `name`. Errors begin with `operation`.

    Raises:
        ShardingError: the model has no such parameter, or it has another shape.
    """
    if param_shard is None or param_shard.shape != shape:
        raise ShardingError(f"{operation}: there is a gradient of {name!r}, {shape}, and no such sharded parameter in the model.")
    return param_shard.value(name, param_shard.flat.shard.new_empty(param_shard.part.shape))
