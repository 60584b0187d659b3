"""Gradients in a checkpoint: a save in the middle of an accumulation.

A gradient that is there at a save may be one half of a sum, or what the last step left behind; only the user knows. So they
are saved if asked for. Gradients kept under `no_sync` are surely half a sum, whole, and each rank's own: they are refused.
"""

from typing import Any

from torch import Tensor, nn

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.reduction.sparse import as_rows, dense
from fsdp.runtime.registry import engines_in, refusal
from fsdp.state_dict.fqns import entries
from fsdp.state_dict.param_shard import ParamShard, param_shards_in

PART = "gradients"


def refuse_kept_gradients(model: nn.Module) -> None:
    """Raises:
    ShardingError: gradients wait for a backward that synchronises.
    """
    for engine in engines_in(model, "save"):
        if engine.reducer.keeps_gradients:
            raise refusal(
                "save: gradients are kept under no_sync, whole on each rank, and no checkpoint has a place for them; save after "
                "a backward that synchronises, or zero them first.",
                engine,
            )


def names_of_gradients(model: nn.Module) -> list[str]:
    """The sharded parameters whose part on this rank has a gradient.

    Raises:
        ShardingError: one that is not sharded has one, which is each rank's own.
    """
    param_shards = param_shards_in(model)
    names = []
    for name, tensor in _first(model):
        if tensor.grad is None:
            continue
        if id(tensor) not in param_shards:
            raise ShardingError(f"save: the gradient of {name!r}, which is not sharded, is each rank's own; zero it first.")
        names.append(name)
    return names


def gradient_state(model: nn.Module, by_rank: list[list[str]], world_comm: Communicator) -> dict[str, Tensor]:
    """This rank's parts of all gradients, by name, given which names each rank has.

    Raises:
        ShardingError: on every rank; some ranks have a gradient of a parameter and others, which hold some of it, do not.
    """
    param_shards = param_shards_in(model)
    state: dict[str, Tensor] = {}
    for name, tensor in _first(model):
        there = [rank for rank, names in enumerate(by_rank) if name in names]
        if not there:
            continue
        param_shard = param_shards[id(tensor)]
        size = param_shard.flat.num_shards
        # the ranks of a row of a mesh follow each other, and all rows hold the same
        absent = [rank for rank in range(world_comm.size) if rank % size in param_shard.holders and rank not in there]
        if absent:
            raise ShardingError(f"save: ranks {absent} have no gradient of {name!r}, ranks {there} have; zero it on every rank.")
        part = tensor if tensor.grad is None else tensor.grad  # no elements here, if there is none
        state[name] = param_shard.value(name, dense(part.detach()))
    return state


def take_gradients(model: nn.Module, given: dict[str, Any]) -> None:
    """Give the parameters the gradients that were read, and the others none."""
    param_shards = param_shards_in(model)
    for name, tensor in _first(model):
        if id(tensor) in param_shards:
            param_shard = param_shards[id(tensor)]
            gradient = given[name].local if name in given and param_shard.part.numel else None
            tensor.grad = as_rows(gradient) if gradient is not None and param_shard.flat.is_sparse else gradient


def target_of_gradient(caller: str, name: str, param_shard: ParamShard | None, shape: tuple[int, ...]) -> Tensor:
    """New memory for this rank's part of the gradient of `name`.

    Raises:
        ShardingError: the model has no such parameter, or it has another shape.
    """
    if param_shard is None or param_shard.shape != shape:
        raise ShardingError(f"{caller}: there is a gradient of {name!r}, {shape}, and no such sharded parameter in the model.")
    return param_shard.value(name, param_shard.parameter.detach().new_empty(param_shard.part.shape))


def _first(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter under its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, tensor in entries(model):
        if isinstance(tensor, nn.Parameter):
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())
