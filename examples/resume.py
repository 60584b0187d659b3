"""Train, save, and after a lost rank go on from the newest checkpoint: under torchrun, Slurm, Kubernetes, or Ray Train.

    torchrun --standalone --nproc-per-node=2 --max-restarts=1 examples/resume.py runs/resume --kill-at 5

What started the job starts all ranks again when one is lost. Each start begins with `fsdp.latest`, so it repeats at most the
steps since the last checkpoint, with the same random numbers. `--kill-at` kills rank 1 in that step of the first start.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from world import join_world

import fsdp

STEPS, SAVE_EVERY = 12, 2


class Block(nn.Module):
    """(batch, 16) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def train(rank: int, folder: Path, kill_at: int | None = None, pause: float = 0.0) -> float:
    """Run all steps that are left, and return the last loss. There is a process group, or the ranks are simulated."""
    torch.manual_seed(0)
    model = fsdp.fully_shard(nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 1)), auto_wrap_policy={Block})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # each rank draws its own data; a checkpoint holds the state of the generator
    newest = fsdp.latest(folder)
    begin = fsdp.load(newest, model, optimizer)["step"] if newest is not None else 0
    if rank == 0:
        print(f"begins after step {begin}", flush=True)
    loss = float("nan")
    for step in range(begin + 1, STEPS + 1):
        if step == kill_at and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(8, 16)
        output = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        output.backward()
        fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = output.item()
        time.sleep(pause)
        if step % SAVE_EVERY == 0:
            fsdp.save(folder / f"step-{step}", model, optimizer, extra={"step": step}, keep_last=2)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for checkpoints: all hosts see it")
    parser.add_argument("--kill-at", type=int, help="kill rank 1 in this step, once")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after each step, in which the job can be stopped by hand"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    world = join_world()
    loss = train(world.rank, given.folder, given.kill_at, given.pause)
    world.say(f"step {STEPS}, loss {loss!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
