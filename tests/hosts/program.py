"""A rank that trains until a peer fails: python -m tests.hosts.program RANK SIZE FOLDER SECONDS

It traces its first steps, and then writes `FOLDER / "trace-RANK.json"`, its trace, and `FOLDER / "RANK.stats"`, its waits and its
process. How it ended is in `FOLDER / "RANK.json"`: the error, and the rank that the error names. `SECONDS`: what the last rank
sleeps before each step, as a slow data loader does.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp

PORT = 29400
TRACED = 10


def meet(rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("h0", PORT, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def main(rank: int, size: int, folder: Path, seconds: float) -> None:
    meet(rank, size)
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = fsdp.FullyShardedDataParallel(blocks, auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, object] = {}
    waited, step = 0.0, 0
    (folder / f"{rank}.process").write_text(f"{os.getpid()}")

    def take_step() -> None:
        if rank == size - 1:
            time.sleep(seconds)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        with fsdp.trace(model) as trace:
            for step in range(TRACED):
                take_step()
                if step:  # the first connects, and learns the order
                    numbers = fsdp.stats(model)
                    waited += numbers["gather_wait_s"] + numbers["reduce_wait_s"]
        trace.save(folder / "trace-{rank}.json")
        (folder / f"{rank}.stats").write_text(json.dumps(waited))
        while not (folder / "stop").exists():
            take_step()
            step += 1
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
    ended = folder / f"{rank}.ended"
    ended.write_text(json.dumps({**found, "step": step}))
    ended.rename(folder / f"{rank}.json")  # who waits for it reads it at once


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
