"""FSDP2 and the drop-in module over a model that tensor parallelism has spread, on four ranks over gloo: losses and states."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import fsdp
from fsdp.compat import fully_shard as ours
from tests.building import test_experts
from tests.support.models import Block
from tests.support.processes import results_of

FULL = StateDictOptions(full_state_dict=True)
PLAN = {name: style() for block in "01" for name, style in ((f"{block}.up", ColwiseParallel), (f"{block}.down", RowwiseParallel))}


def other_dim(parameter: nn.Parameter) -> Shard:
    """Cut the dimension that tensor parallelism has not cut."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    cut = {placement.dim for placement in placements if isinstance(placement, Shard)}
    return Shard(1 if parameter.dim() > 1 and 0 in cut else 0)


def norms_of(model: nn.Module, api: Any) -> dict[float, torch.Tensor]:
    """The norm over all elements of all ranks, each counted once; last the one after clipping to 0.05."""
    if api is ours:
        norms = {power: fsdp.clip_grad_norm_(model, 1e9, power) for power in (2.0, 1.0, float("inf"))}
        fsdp.clip_grad_norm_(model, 0.05)
        return {**norms, 0.05: fsdp.clip_grad_norm_(model, 1e9)}
    # torch's own function does not combine parameters over one mesh and over two
    gradients: list[Any] = [p.grad for p in model.parameters()]
    full = [gradient.full_tensor() for gradient in gradients]
    norms = {power: nn.utils.get_total_norm(full, power) for power in (2.0, 1.0, float("inf"))}
    return {**norms, 0.05: torch.tensor(0.05)}


def script(api: Any, rank: int, path: Path, placement_fn: Any = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(6), Block(6))
    parallelize_module(model, mesh["tp"], PLAN)
    for block in model:
        api.fully_shard(block, mesh=mesh["dp"], shard_placement_fn=placement_fn)
    api.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=placement_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, norms = [], []
    for step in range(3):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + 2 * micro + mesh["dp"].get_local_rank())
            model.set_requires_gradient_sync(micro == 1)
            x, target = torch.randn(2, 3, 6, generator=generator)
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        norms.append(norms_of(model, api))
        optimizer.zero_grad()
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.grad = torch.ones_like(parameter)
    plain = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(plain, checkpoint_id=path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(plain, checkpoint_id=path)
    set_model_state_dict(model, plain["model"])
    again = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    for name, value in full.items():
        assert torch.equal(value, again[name]), name
    state = get_model_state_dict(model, options=FULL)
    set_model_state_dict(model, copy.deepcopy(state), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    placements = {name: str(p.placements) for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "full": full, "state": state, "placements": placements}


def experts(api: Any) -> dict[str, Any] | None:
    """Blocks of which the experts' parameters are cut over another mesh than the others; None if torch does not know that."""
    common: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        return None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model: Any = test_experts.make()
    everyone = mesh["edp", "ep"]._flatten("dp")
    test_experts.distribute(model, mesh)
    there = common.ShardPlacementResult(Shard(0), common.FSDPMeshInfo(mesh["edp"], shard_mesh_dim=0))
    for block in model[:2]:
        chosen = {*block.experts.parameters()}
        api.fully_shard(block, mesh=everyone, shard_placement_fn=lambda p, chosen=chosen: there if p in chosen else None)
    api.fully_shard(model, mesh=everyone)
    if api is torch_fsdp:
        for block in model[:2]:
            block.set_gradient_divide_factor(4.0)  # FSDP2 divides by the size of the mesh alone
            block.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    losses = []
    for step in range(3):
        loss = model(test_experts.batch(step, torch.distributed.get_rank())).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    placements = {name: str(p.placements) for name, p in model.named_parameters()}
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return {"losses": losses, "placements": placements, "full": full}


def refusals(path: Path) -> list[str]:
    """What a function of this engine that knows rows alone says, and wrapping without a mesh that fits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(nn.Sequential(Block(6), Block(6)), mesh["tp"], PLAN)
    alone = init_device_mesh("cpu", (4,))
    own_class = nn.Linear(4, 4)
    weight = TwoTensor(torch.eye(4)[:2], torch.eye(4)[:2])
    own_class.weight = nn.Parameter(DTensor.from_local(weight, mesh["tp"], [Shard(0)], run_check=False))
    said = []
    parts = {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for attempt in (
        lambda: ours.fully_shard(model),
        lambda: ours.fully_shard(model, mesh=alone),
        lambda: fsdp.fully_shard(model),
        lambda: ours.fully_shard(own_class, mesh=mesh["dp"]),
        lambda: copy.deepcopy(ours.fully_shard(model, mesh=mesh["dp"])),
    ):
        try:
            attempt()
        except ValueError as refusal:
            said.append(str(refusal))
    state = fsdp.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close({name: state[name] for name in parts}, parts, rtol=0, atol=0)
    return said


def run(rank: int, size: int, folder: Path) -> Any:
    results: dict[str, Any] = {}
    for name, placement_fn in (("rows", None), ("other", other_dim)):
        results[name] = {
            kind: script(api, rank, folder / f"{name}-{kind}", placement_fn)
            for kind, api in (("torch", torch_fsdp), ("ours", ours))
        }
    results["experts"] = {kind: experts(api) for kind, api in (("torch", torch_fsdp), ("ours", ours))}
    results["refusals"] = refusals(folder)
    return results


@pytest.mark.gloo
def test_tensor_parallel_parameters_are_cut_once_more(tmp_path: Path) -> None:
    for result in results_of(run, 4, tmp_path):
        for name in ("rows", "other"):
            theirs, mine = result[name]["torch"], result[name]["ours"]
            assert mine["placements"] == theirs["placements"]
            torch.testing.assert_close(mine["losses"], theirs["losses"])
            torch.testing.assert_close(mine["norms"], theirs["norms"])
            torch.testing.assert_close(mine["full"], theirs["full"])
            torch.testing.assert_close(mine["state"], theirs["state"])
        theirs, mine = result["experts"]["torch"], result["experts"]["ours"]
        if theirs is not None:  # older versions of torch have one mesh for a unit
            assert mine["placements"] == theirs["placements"]
            torch.testing.assert_close((mine["losses"], mine["full"]), (theirs["losses"], theirs["full"]))
        assert "dim=1" in result["other"]["ours"]["placements"]["0.up.weight"]
        for said, text in zip(
            result["refusals"],
            (
                "is a DTensor: give the mesh to cut it over as well",
                "which cannot be joined with",
                "is a DTensor: give the mesh to cut it over as well",
                "is a TwoTensor, a tensor class with operators of its own",
                "copy.deepcopy: FSDP does not support deepcopy of 'Sequential', which FSDP2's fully_shard has wrapped",
            ),
            strict=True,
        ):
            assert text in said
