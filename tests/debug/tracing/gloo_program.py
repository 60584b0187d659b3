"""Traces two steps of two processes over gloo, and saves the traces and what the groups of torch counted."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp
from tests.support.models import Block, loss_of, make_net

X = torch.linspace(-1, 1, 12).view(2, 6)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    for _ in range(2):
        loss_of(model(X)).backward()
    with fsdp.trace(model) as trace:
        for _ in range(2):
            loss_of(model(X)).backward()
    path = trace.save(folder / "trace-{rank}.json")
    torch.save((str(path), fsdp.stats(model)), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
