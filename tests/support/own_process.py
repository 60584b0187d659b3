"""What needs an interpreter of its own: its memory, its end. Run as a script.

python -m tests.support.own_process FOLDER    prints peaks of memory in bytes, as JSON; ends while a save is under way
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn

import fsdp
from fsdp.checkpoint import dcp
from fsdp.commands.main import main as command

TENSOR = 8 << 20
TENSORS = 20


def peak_of(do: Callable[[], Any]) -> int:
    """By how much the memory of this process rises above what it is now, mapped files included (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")

    def highest() -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) * 1024

    before = highest()
    do()
    return highest() - before


def convert(folder: Path) -> dict[str, int]:
    """From each form into another."""
    state = {f"layer.{i}": torch.full((TENSOR // 4,), float(i)) for i in range(TENSORS)}
    distributed_checkpoint.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
    del state

    def converted(source: str, to: str) -> Callable[[], Any]:
        return lambda: command(["convert", str(folder / source), str(folder / to), "--to", to, "--max-shard-size", "9MB"])

    converted("dcp", "torch")()  # imports what it needs
    os.rename(folder / "torch", folder / "before")
    found = {f"{source} to {to}": peak_of(converted(source, to)) for source, to in (("dcp", "torch"), ("dcp", "safetensors"))}
    os.rename(folder / "dcp", folder / "first")
    found["safetensors to dcp"] = peak_of(converted("safetensors", "dcp"))
    again = torch.load(folder / "torch", weights_only=True)["model"]
    assert all(bool((again[f"layer.{i}"] == i).all()) for i in range(TENSORS))
    return found


def export() -> dict[str, int]:
    """What gathering a model in full holds on two ranks besides what rank 0 gets."""
    found = {}

    def fn(rank: int) -> None:
        model = fsdp.fully_shard(nn.Sequential(*(nn.Linear(2048, 1024) for _ in range(TENSORS))))
        nbytes = 4 * TENSORS * (2048 * 1024 + 1024)
        if rank == 1:
            fsdp.full_state_dict(model)
        else:
            found["export"] = peak_of(lambda: fsdp.full_state_dict(model)) - nbytes

    fsdp.simulate(2, fn)
    return found


def end(folder: Path) -> None:
    """Leave a save under way."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    real = dcp.FileSystemWriter.write_data

    def slow(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(0.5)  # the interpreter ends first
        return real(self, plan, planner)

    dcp.FileSystemWriter.write_data = slow  # type: ignore[method-assign]
    model = fsdp.fully_shard(nn.Linear(4, 4))
    fsdp.save(folder / "a", model, extra={"step": 1}, async_=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n" + json.dumps({**convert(Path(sys.argv[1])), **export()}))
    end(Path(sys.argv[1]))
