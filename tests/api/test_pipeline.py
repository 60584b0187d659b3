"""Stages whose parameters are released between the two halves of a backward: the gradients of inputs, then those of weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import fsdp
from fsdp.compat.fully_shard import fully_shard


def stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 4)) for _ in range(4)]


def batch(group: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(group))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "FSDP2"])
def test_zero_bubble_trains_as_one_process(strategy: str) -> None:
    wanted = nn.Sequential(*stages())
    for group in range(2):
        (nn.functional.mse_loss(wanted(batch(group)), batch(group)) / 2).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        place, data, every, mine = mesh["pp"].get_local_rank(), batch(mesh["dp"].get_local_rank()), stages(), []
        for number in (place, place + 2):
            if strategy == "FSDP2":
                fully_shard(every[number], mesh=mesh["dp"])
            else:
                fsdp.fully_shard(every[number], mesh=mesh["dp"], sharding_strategy=strategy)
            mine.append(fsdp.PipelineStage(every[number], number, 4, torch.device("cpu"), group=mesh.get_group("pp")))
        schedule = ScheduleInterleavedZeroBubble(mine, 4, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
        schedule.step(*[data] * (place == 0), **({"target": data, "losses": []} if place else {}))  # type: ignore[arg-type]
        for number in (place, place + 2):
            for name, p in every[number].named_parameters():
                torch.testing.assert_close(fsdp.full_tensor(p.grad), wanted[number].get_parameter(name).grad)

    fsdp.simulate(4, program)
