"""A training script for torchrun: it begins at the newest checkpoint, and any number of ranks trains on the same global batches.

python tests/hosts/resumes.py FOLDER SECONDS    each rank sleeps SECONDS in a step; rank 0 writes its losses to FOLDER/losses.txt
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from world import join_world

import fsdp

STEPS = 24
EVERY = 4
BATCH = 4


def main(folder: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    world = join_world()
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    newest = fsdp.latest(folder / "checkpoints")
    begin = 0 if newest is None else int(fsdp.load(newest, model, optimizer)["step"])
    for step in range(begin, STEPS):
        batch = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(batch.chunk(world.size)[world.rank]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss)
        if world.rank == 0:
            with open(folder / "losses.txt", "a") as opened:
                opened.write(f"{step} {mean!r} {world.size}\n")
        if (step + 1) % EVERY == 0:
            fsdp.save(folder / "checkpoints" / f"step-{step + 1}", model, optimizer, extra={"step": step + 1}, keep_last=2)
        time.sleep(seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
