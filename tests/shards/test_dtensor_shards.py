"""Shards on several meshes are torch's DTensors: every function of torch gives for them what it gives for torch's own."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from fsdp.compat.fully_shard import fully_shard
from tests.shards.test_operator_fuzz import WITH, functions, outcome
from tests.support.everything import EVERYTHING
from tests.support.ranks import on_ranks

CRASHES = {"Tensor.apply_", "Tensor.map_", "Tensor.map2_", "Tensor.share_memory_", "torch.from_dlpack"}
"""End the process for torch's own DTensors."""
STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def shard_of(style: type[Any], replicas: int) -> tuple[Any, Any]:
    """A sharded matrix of a model over two meshes, and a DTensor that torch has made, with the same elements."""
    shape, names = ((2, 1, 2), ("replica", "dp", "tp")) if replicas > 1 else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    parallelize_module(model, mesh["tp"], {"0": style()})
    data: dict[str, Any] = {"mesh": mesh["dp"]}
    if replicas > 1:
        data = {"mesh": mesh["replica", "dp"], "sharding_strategy": "HYBRID_SHARD"}
    fsdp.fully_shard(model, **data)
    ours: Any = next(model.parameters()).detach()
    local, spec = ours.to_local().clone(), ours._spec
    theirs = DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
    return ours, theirs


def local_values(result: Any) -> Any:
    """What this rank has of a result."""
    if isinstance(result, DTensor):
        return str(result.placements), tuple(result.shape), result.to_local()
    if isinstance(result, list | tuple):
        return [local_values(one) for one in result]
    return result


def same(one: Any, other: Any) -> bool:
    if isinstance(other, list | tuple):
        return isinstance(one, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    if not isinstance(other, Tensor):
        return type(one) is type(other)
    return (
        isinstance(one, Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(*map(known, (one, other)))
    )


def known(tensor: Tensor) -> Tensor:
    """The values with numbers in place of NaN, which equals nothing."""
    values = tensor.to(torch.complex64) if tensor.dtype is torch.complex32 else tensor
    return values.nan_to_num() if values.is_floating_point() or values.is_complex() else values


def seeded(function: Any, first: Tensor, given: tuple[Any, ...]) -> tuple[str, Any, Tensor]:
    torch.manual_seed(1)
    return outcome(function, first, given)


@pytest.mark.parametrize(("style", "replicas"), [("columns", 1), ("rows", 1), ("columns", 2)] if EVERYTHING else [("columns", 1)])
def test_every_function_gives_what_it_gives_for_torchs_dtensors(style: str, replicas: int) -> None:
    names = sorted(functions().keys() - CRASHES)
    chosen = names if EVERYTHING else names[::40]  # `make test-all` takes all

    def program(rank: int) -> tuple[list[str], int]:
        warnings.simplefilter("ignore")
        ours, theirs = shard_of(STYLES[style], replicas)
        assert type(ours) is DTensor
        wrong, returned = [], 0
        for name, function in [(name, functions()[name]) for name in chosen]:
            for what, given in WITH.items():
                found, wanted = (seeded(function, one, given) for one in (ours, theirs))
                returned += wanted[0] == "returned"
                if found[0] != wanted[0] or (found[0] == "returned" and not same(*map(local_values, (found[1], wanted[1])))):
                    wrong.append(f"{name} with {what}: {found[0]} {found[1]!r}; torch {wanted[0]} {wanted[1]!r}"[:300])
        return wrong, returned

    for wrong, returned in fsdp.simulate(4, program):
        assert not wrong, "\n".join(wrong)
        assert returned > len(chosen) // 2


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_parameters_can_be_pickled(rank: int, again: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model)
    if again:
        model.to(torch.float64)
    for parameter in model.parameters():
        torch.save(parameter, io.BytesIO())
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.is_leaf
