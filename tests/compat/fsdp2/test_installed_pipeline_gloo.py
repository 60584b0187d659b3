"""A pipeline of torch's over two gloo processes, imported after the names of FSDP2 were replaced, with two sharded stages."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
import fsdp.compat
from fsdp.reduction.in_flight import ReductionQueue
from tests.support.processes import results_of


def run(rank: int, size: int, folder: Path) -> Any:
    assert not any(name.startswith("torch.distributed.pipelining") for name in sys.modules)
    fsdp.compat.install("fully_shard")
    from torch.distributed import pipelining
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    mine, x = layers[rank], torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    fully_shard(mine[0], mesh=mesh["dp"])
    fully_shard(mine, mesh=mesh["dp"])
    assert isinstance(mine, fsdp.compat.fully_shard.FSDPModule)
    stage = pipelining.PipelineStage(mine, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    launched = count_reductions()
    losses: list[torch.Tensor] = []
    for kind in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        mine.zero_grad()
        schedule = kind(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        schedule.step(x) if rank == 0 else schedule.step(target=torch.zeros(4, 8), losses=losses)
    grads = [parameter.grad.full_tensor() for parameter in mine.parameters()]  # type: ignore[union-attr]
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    alone_losses = [nn.functional.mse_loss(alone(part), torch.zeros(2, 8)) for part in x.split(2)]
    (sum(alone_losses) / 2).backward()  # type: ignore[union-attr]
    expected = [parameter.grad for parameter in alone[rank].parameters()]
    # one unit with parameters, in two steps of two micro-batches
    return {"found": (losses, grads, len(launched)), "expected": (alone_losses if rank else [], expected, 2)}


def count_reductions() -> list[str]:
    """A list that grows by one unit's name with each reduction."""
    names: list[str] = []
    launch = ReductionQueue.launch

    def count(queue: ReductionQueue, buckets: Any, remainder: bool) -> bool:
        names.append(buckets[0].name)
        return launch(queue, buckets, remainder)

    setattr(ReductionQueue, launch.__name__, count)
    return names


@pytest.mark.gloo
def test_a_pipeline_that_is_imported_after_install_trains_as_one_process(tmp_path: Path) -> None:
    for result in results_of(run, 2, tmp_path):
        torch.testing.assert_close(result["found"], result["expected"])
