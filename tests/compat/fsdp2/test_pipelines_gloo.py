"""Schedules of torch's pipelining over stages that the drop-in module shards, and torch's FSDP2, over gloo processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

import fsdp
from fsdp.compat import fully_shard as ours
from fsdp.runtime.registry import engines_in
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of

SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
ZERO_BUBBLE: dict[str, tuple[Any, int]] = {"zero bubble": (ScheduleInterleavedZeroBubble, 2), "zbv": (ScheduleZBVZeroBubble, 2)}
WIDTH, MICRO_BATCHES = 6, 4


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(count)]


def flats_in(modules: list[nn.Module]) -> list[Any]:
    return [flat for module in modules for engine in engines_in(module, "test") for unit in engine.units for flat in unit.flats]


def train(api: Any, kind: str, rank: int, size: int, shards: int) -> dict[str, Any]:
    """Train a pipeline of `size // shards` ranks, each stage sharded over `shards`; the losses of the last and all parameters."""
    schedule_class, stages_of_rank = {**SCHEDULES, **ZERO_BUBBLE}[kind]
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("pp", "dp"))
    depth, place = size // shards, mesh["pp"].get_local_rank()
    numbers = [place, 2 * depth - 1 - place] if kind == "zbv" else [place + depth * turn for turn in range(stages_of_rank)]
    modules = layers(depth * stages_of_rank)
    mine = [modules[number] for number in numbers]
    is_native = api is fsdp
    for module in mine:
        if is_native:
            fsdp.fully_shard(module, mesh=mesh["dp"], auto_wrap_policy={nn.Linear}, sharding_strategy="SHARD_GRADIENTS")
            continue
        for layer in (module[0], module[2]):
            api.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        api.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    stages = [
        (fsdp.PipelineStage if is_native or (api is ours and kind in ZERO_BUBBLE) else PipelineStage)(
            module, number, len(modules), torch.device("cpu"), group=mesh.get_group("pp")
        )
        for number, module in zip(numbers, mine, strict=True)
    ]
    schedule = schedule_class(stages if stages_of_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in mine for p in module.parameters()], lr=0.05)
    losses: list[float] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        batch, target = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator)
        found: list[torch.Tensor] = []
        given = (batch,) if place == 0 else ()
        schedule.step(*given, **({"target": target, "losses": found} if len(modules) - 1 in numbers else {}))
        if is_native:  # the unsharded parameters are freed after the last micro-batch
            assert all(not flat.unsharded.untyped_storage().nbytes() for flat in flats_in(mine))
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in found]
    if is_native:
        stats = fsdp.stats(mine[0])
        full = {f"{n}.{name}": p for n, module in zip(numbers, mine, strict=True) for name, p in fsdp.iter_full_params(module)}
        return {"losses": losses, "params": full, "gathers": stats["gathers"], "reductions": stats["reductions"]}
    params = {f"{n}.{name}": p for n, module in zip(numbers, mine, strict=True) for name, p in module.named_parameters()}
    assert all(isinstance(p, DTensor) for p in params.values())
    return {"losses": losses, "params": {name: p.full_tensor().detach() for name, p in params.items()}}  # type: ignore[attr-defined]


def save_and_load(rank: int, folder: Path) -> bool:
    """Write with DTensors of the drop-in module, and read into torch's FSDP2 and back."""
    values = []
    for api in (ours, torch_fsdp, ours):
        torch.manual_seed(len(values))
        model: Any = api.fully_shard(nn.Linear(5, 3))
        if values:
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=folder / f"{len(values) - 1}")
            set_model_state_dict(model, state)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder / f"{len(values)}")
        values.append(model.weight.full_tensor())
    return torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def run(rank: int, size: int, folder: Path) -> Any:
    results: dict[str, Any] = {"states": save_and_load(rank, folder)}
    apis = (("torch", torch_fsdp), ("ours", ours), ("native", fsdp))
    for kind in (*SCHEDULES, *ZERO_BUBBLE):
        shards = 1 if size == 2 else 2
        results[kind] = {name: train(api, kind, rank, size, shards) for name, api in apis}
    return results


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4] if EVERYTHING else [2])
def test_the_schedules_of_pipelining_train_as_with_fsdp2(tmp_path: Path, size: int) -> None:
    results = results_of(run, size, tmp_path)
    for result in results:
        assert result["states"]
        for kind in ("gpipe", "1f1b", "interleaved", "zero bubble", "zbv"):
            torch.testing.assert_close(result[kind]["ours"], result[kind]["torch"])
            native = result[kind]["native"]
            torch.testing.assert_close({key: native[key] for key in ("losses", "params")}, result[kind]["torch"])
            # as FSDP2: two units, each gathered and reduced once a step; over one rank nothing is sent
            assert (native["gathers"], native["reductions"]) == (2, 2)
    assert len(results[-1]["gpipe"]["ours"]["losses"]) == 12
