"""Saving and loading a model with its AdamW state: ours beside FSDP2 with torch's Distributed Checkpoint, in one run over gloo.

    python benchmarks/checkpoint.py [--megabytes 400] [--ranks 2] [--repeat 3]

For saves in the background ("later"), the time until the call returns is measured. The peak of the process shows how much memory
a full export of the parameters needs besides its result.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from common import over_gloo
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp

WIDTH = 1024


def make_model(megabytes: int) -> nn.Module:
    """Linear layers of 4 MB each in units of two."""
    torch.manual_seed(0)
    blocks = max(megabytes // 8, 1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)))


def with_state(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW after one step of zeros: its state is there."""
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Settings(NamedTuple):
    megabytes: int
    repeat: int
    folder: str


class Contender(NamedTuple):
    """What is timed."""

    save: Callable[[], Any]
    later: Callable[[], Any]
    """Begin a save in the background; what it returns has a result."""
    load: Callable[[], Any]


def ours(folder: Path, megabytes: int) -> Contender:
    model = make_model(megabytes)
    fsdp.fully_shard(model, auto_wrap_policy=lambda name, module: name.isdigit())
    optimizer = with_state(model)

    return Contender(
        lambda: fsdp.save(folder / "ours", model, optimizer),
        lambda: fsdp.save(folder / "ours later", model, optimizer, async_=True),
        lambda: fsdp.load(folder / "ours", model, optimizer),
    )


def fsdp2(folder: Path, megabytes: int) -> Contender:
    from torch.distributed.fsdp import fully_shard

    model = make_model(megabytes)
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    optimizer = with_state(model)

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def load() -> None:
        there = state()
        distributed_checkpoint.load(there, checkpoint_id=folder / "fsdp2")
        set_model_state_dict(model, there["model"])
        set_optimizer_state_dict(model, optimizer, there["optimizer"])

    return Contender(
        lambda: distributed_checkpoint.save(state(), checkpoint_id=folder / "fsdp2"),
        lambda: distributed_checkpoint.async_save(state(), checkpoint_id=folder / "fsdp2 later"),
        load,
    )


def seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """Of the slowest rank; and what this one has got."""
    dist.barrier()
    begin = time.perf_counter()
    result = do()
    dist.barrier()
    return time.perf_counter() - begin, result


def growth(do: Callable[[], Any]) -> tuple[float, Any]:
    """By how many MB the peak of this process rises above what it holds now, and what came back (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = peak()
    result = do()
    return peak() - before, result


def peak() -> float:
    """Of this process, in MB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6


def export_memory(megabytes: int) -> dict[str, float]:
    """What streaming and gathering every parameter in full hold besides what they return, in MB."""
    model = make_model(megabytes)
    fsdp.fully_shard(model, auto_wrap_policy=lambda name, module: name.isdigit())

    def stream() -> None:
        for _, tensor in fsdp.iter_full_params(model):
            del tensor

    streamed, _ = growth(stream)
    gathered, state = growth(lambda: fsdp.full_state_dict(model))
    returned = sum(tensor.nbytes for tensor in state.values()) / 1e6
    return {"extra MB of iter_full_params": streamed, "extra MB of full_state_dict": gathered - returned, "returned MB": returned}


def memory(rank: int, settings: Settings) -> dict[str, float]:
    """See `export_memory`. Only rank 0's is shown."""
    return {name: round(value, 1) for name, value in export_memory(settings.megabytes).items()}


def speed(rank: int, settings: Settings) -> dict[str, float]:
    """The least seconds of each operation of both contenders, and their ratios. Only rank 0's are shown."""
    found: dict[str, float] = {}
    folder = Path(settings.folder)
    for _ in range(settings.repeat):
        for name, make in (("ours", ours), ("fsdp2", fsdp2)):
            contender = make(folder, settings.megabytes)
            # each into a folder that is not there, and its turn at a disk cache that is as full as the other's
            if rank == 0:
                shutil.rmtree(folder / name, ignore_errors=True)
                shutil.rmtree(folder / f"{name} later", ignore_errors=True)
            for what in ("save", "load", "later"):
                taken, result = seconds(getattr(contender, what))
                if what == "later":
                    result.result()
                found[f"{name} {what}"] = min(found.get(f"{name} {what}", taken), taken)
            del contender
    ratios = {f"{what}: ours / fsdp2": found[f"ours {what}"] / found[f"fsdp2 {what}"] for what in ("save", "load", "later")}
    return {name: round(value, 3) for name, value in {**found, **ratios}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=int, default=300, help="seconds")
    parser.add_argument("--what", choices=["speed", "memory"], help="one of the two only")
    args = parser.parse_args()
    for work in (speed, memory):
        if args.what in (None, work.__name__):
            with tempfile.TemporaryDirectory() as folder:
                found = over_gloo(work, Settings(args.megabytes, args.repeat, folder), args.ranks, args.limit)
            print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
