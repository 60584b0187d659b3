"""torch's FSDP1 and the drop-in module over a model that tensor parallelism has spread, on four ranks over gloo."""

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp.compat import torch_fsdp
from fsdp.errors import ShardingError
from tests.compat.fsdp1.test_torch_fsdp_gloo import torch_on_the_host
from tests.support.processes import results_of

OPTIONS: dict[str, dict[str, Any]] = {
    "one instance": {"use_orig_params": True},
    "instances": {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential, nn.LayerNorm}), "use_orig_params": True},
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2))
    return nn.Sequential(*blocks, nn.LayerNorm(6), nn.Linear(6, 3))


def parallel(mesh: DeviceMesh) -> nn.Sequential:
    model = make()
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def batch(step: int, group: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + group))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, group: int, accumulates: bool = False) -> list[float]:
    losses = []
    for step in steps:
        with model.no_sync() if accumulates else nullcontext():  # torch's FSDP1 fails in the second forward
            if accumulates:
                model(batch(2 * step, group)).square().mean().backward()
        loss = model(batch(2 * step + 1, group)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_through(api: Any, mesh: DeviceMesh, options: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on, load and train the same again. The states are sharded ones."""
    kind, group = api.FullyShardedDataParallel, mesh.get_local_rank("dp")
    model = kind(parallel(mesh), device_mesh=mesh["dp"], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = train(model, optimizer, range(2), group)
    with kind.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        weights, state = deepcopy(model.state_dict()), deepcopy(kind.optim_state_dict(model, optimizer))
        first = train(model, optimizer, range(2, 4), group)
        model.load_state_dict(weights)
        optimizer.load_state_dict(kind.optim_state_dict_to_load(model, optimizer, state))
    again = train(model, optimizer, range(2, 4), group)
    parts = {
        "weights": weights,
        "state": {f"{name} {key}": one for name, kept in state["state"].items() for key, one in kept.items() if key != "step"},
    }
    full = {what: {name: one.full_tensor() for name, one in found.items()} for what, found in parts.items()}
    placements = {what: {name: str(one.placements) for name, one in found.items()} for what, found in parts.items()}
    return {"losses": losses, "first": first, "again": again, "placements": placements, **full}


def norms(mesh: DeviceMesh) -> tuple[list[float], list[float]]:
    """The norms that clipping returns, and those of one process with the data of all ranks."""
    kind, alone = torch_fsdp.FullyShardedDataParallel, make()
    for group in range(2):
        (alone(batch(0, group)).square().mean() / 2).backward()
    wanted = [nn.utils.get_total_norm([p.grad for p in alone.parameters()], power).item() for power in (1.0, 2.0, float("inf"))]
    model = kind(parallel(mesh), device_mesh=mesh["dp"], **OPTIONS["instances"])
    model(batch(0, mesh.get_local_rank("dp"))).square().mean().backward()
    return [model.clip_grad_norm_(1e9, power).item() for power in (1.0, 2.0, float("inf"))], wanted


def full_values(mesh: DeviceMesh) -> bool:
    """Whether full states and full parameters have the values of the plain model, and take others."""
    kind, plain = torch_fsdp.FullyShardedDataParallel, make().state_dict()
    model = kind(parallel(mesh), device_mesh=mesh["dp"], **OPTIONS["instances"])
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for writes in (False, True):
        with kind.summon_full_params(model, writeback=writes), torch.no_grad():
            found = {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in model.named_parameters()}
            assert all(torch.equal(value, plain[name] + 1) for name, value in found.items())
            for parameter in model.parameters():
                parameter.add_(1)
    return all(torch.equal(value, plain[name] + 1 + 1) for name, value in model.state_dict().items())


def beside_one_process(shape: tuple[int, int]) -> tuple[list[float], list[float]]:
    """The losses over a mesh of which one dimension has one rank, and those of DDP. The model is converted after wrapping."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    group, plain = mesh.get_local_rank("dp"), nn.parallel.DistributedDataParallel(make())
    model = torch_fsdp.FullyShardedDataParallel(parallel(mesh), device_mesh=mesh["dp"])
    found = []
    for one in (model, plain):
        losses = train(one, torch.optim.AdamW(one.parameters(), lr=0.05), range(2), group, accumulates=True)
        one.double()
        with torch.no_grad():
            found.append([*losses, one(batch(9, group).double()).sum().item()])
    return found[0], found[1]


def refusals(mesh: DeviceMesh) -> list[str]:
    kind, said = torch_fsdp.FullyShardedDataParallel, []
    for options in ({}, {"device_mesh": mesh["dp"], "sharding_strategy": ShardingStrategy.NO_SHARD}):
        try:
            kind(parallel(mesh), **options)
        except ShardingError as refusal:
            said.append(str(refusal))
    model = kind(parallel(mesh), device_mesh=mesh["dp"], use_orig_params=True)
    try:
        with kind.summon_full_params(model, with_grads=True):
            pass
    except NotImplementedError as refusal:
        said.append(str(refusal))
    return said


def run(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = torch_on_the_host()
    pairs: dict[str, Any] = {
        name: (run_through(torch_fsdp, mesh, options), run_through(theirs, mesh, options)) for name, options in OPTIONS.items()
    }
    return {
        "pairs": pairs,
        "norms": norms(mesh),
        "full": full_values(mesh),
        "refusals": refusals(mesh),
        "one dimension": [beside_one_process(shape) for shape in ((1, 4), (4, 1))],
    }


@pytest.mark.gloo
def test_a_model_with_tensor_parallelism_trains_and_is_saved_as_by_torch(tmp_path: Path) -> None:
    for result in results_of(run, 4, tmp_path):
        for name, (ours, theirs) in result["pairs"].items():
            assert ours["first"] == ours["again"], name
            torch.testing.assert_close(ours["losses"] + ours["first"], theirs["losses"] + theirs["first"], msg=name)
            for kind in ("weights", "state"):
                assert ours["placements"][kind] == theirs["placements"][kind], name
                torch.testing.assert_close(ours[kind], theirs[kind], msg=name)
        torch.testing.assert_close(*result["norms"])
        for losses, expected in result["one dimension"]:
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        assert result["full"]
        without_mesh, no_shard, with_grads = result["refusals"]
        assert with_grads.endswith("with_grads=True needs a model without tensor parallelism; read p.grad.full_tensor().")
        assert "is a DTensor: give the mesh to cut it over as well" in without_mesh
        assert 'leave out plain_shards and "NO_SHARD"' in no_shard
