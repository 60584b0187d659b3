"""One rank of four over gloo, 2 x 2: a step fails on one rank, or on all, over a model that tensor parallelism has spread."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from tests.support.processes import be_a_rank


def run(rank: int, size: int, folder: Path) -> None:
    os.environ["FSDP_RETURN_SECONDS"] = "3"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["dp"], auto_wrap_policy={nn.Sequential})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failing: list[int] = []

    def fail(*_: Any) -> None:
        if failing:
            raise ValueError(f"first cause {failing.pop()}")

    model[1].register_forward_pre_hook(fail)

    def step() -> str:
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        try:
            model(torch.randn(2, 6, generator=generator)).square().mean().backward()
        except Exception as failure:
            optimizer.zero_grad()
            return f"{type(failure).__name__}: {failure}"
        optimizer.step()
        optimizer.zero_grad()
        return "fine"

    said = [step()]
    failing.append(rank)
    said += [step(), step()]
    weights = [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    failing += [rank] * (rank == 0)
    dist.barrier()
    begin = time.monotonic()
    said += [step()]
    if rank == 0:
        said += [step()]  # the ranks of the other dimension have not abandoned the step
    result = {"said": said, "weights": weights, "seconds": time.monotonic() - begin}
    torch.save(result, folder / f"{rank}.pt")
    while rank == 2 and not (folder / "0.pt").exists():
        time.sleep(0.05)  # the first rank waits for this one, and would be told of its end
    os._exit(0)  # torch's groups cannot be used any more


if __name__ == "__main__":
    be_a_rank(run)
