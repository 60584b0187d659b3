"""One rank over gloo: `python -m tests.runtime.uneven.programs RANK SIZE FOLDER` runs the programs and saves what it saw."""

import faulthandler
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from tests.runtime.uneven.joins import weights_after
from tests.support.paths import Branching, Hop, batch, draw_program, sharded

LIMIT = 90
TIME_OUT = 4
"""Seconds that a rank of `waiting` waits for another one."""
SEEDS = range(4)
MESH = 2, 2
"""The mesh of four ranks."""


def main(rank: int, size: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    if size == MESH[0] * MESH[1]:
        options: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "mesh": MESH}
        found = {f"program {seed}": sharded(rank, draw_program(seed, size), **options) for seed in SEEDS}
    else:
        found = of_one_group(rank, size)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def of_one_group(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"program {seed}": sharded(rank, draw_program(seed, size)) for seed in SEEDS}
    found["replicas"] = sharded(rank, draw_program(0, size), sharding_strategy="NO_SHARD")
    found["failure"] = failing(rank)
    found["joined"] = weights_after(rank, 1, size, False, "before")
    found["waiting"] = waiting(rank, size)
    found["skipping"] = skipping(rank)  # the ranks cannot communicate after it
    return found


def model_of(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp.fully_shard(Branching(), auto_wrap_policy={nn.Linear}, **options)


def failing(rank: int) -> list[str]:
    """The last rank fails in a layer that the others do not take; then all go on, each on its own path."""
    model = model_of(uneven_paths=True)
    last = dist.get_world_size() - 1
    said = []
    for step in range(4):
        hops = [Hop(0), Hop(2)] if rank == last else [Hop(2)] * (1 + step % 2)
        handle = None
        if step == 2 and rank == last:
            handle = model.layers[0].register_forward_hook(fail)  # type: ignore[union-attr, operator]
        try:
            model(batch(step, 0, rank), hops).square().mean().backward()
        except (RuntimeError, fsdp.WorldError) as failure:
            said.append(f"step {step}: {type(failure).__name__}: {str(failure).splitlines()[0]}")
        if handle is not None:
            handle.remove()
    said.append(str(float(sum(fsdp.full_tensor(p.grad).abs().sum() for p in model.parameters() if p.grad is not None))))
    return said


def fail(module: nn.Module, args: Any, output: Any) -> None:
    raise RuntimeError("this layer is broken")


def skipping(rank: int) -> str:
    """Without the option, the error says that it exists."""
    model = model_of(prefetch=0)
    try:
        for _ in range(2):
            model(batch(0, 0, rank), [Hop(0), Hop(2)]).sum().backward()
        model(batch(0, 0, rank), [Hop(2)] if rank else [Hop(0), Hop(2)]).sum().backward()
    except fsdp.WorldError as failure:
        time.sleep(0.5)
        return str(failure)
    return ""


def waiting_hops(rank: int, size: int) -> list[Hop]:
    return [Hop(0)] if rank == size - 1 else [Hop(0), Hop(2)]


def waiting(rank: int, size: int) -> tuple[str, float]:
    """The last rank leaves a new unit out and waits in a barrier of the user, while the others gather. Then all start again."""
    model = model_of(uneven_paths=True, process_group=dist.new_group(timeout=timedelta(seconds=TIME_OUT)))
    said = ""
    model(batch(0, 0, rank), [Hop(0)]).sum().backward()
    try:
        try:
            loss = model(batch(1, 0, rank), waiting_hops(rank, size)).sum()
        finally:
            dist.barrier()
        loss.backward()
    except fsdp.PeerFailed as failure:
        said = str(failure)
    model.zero_grad()
    model(batch(1, 0, rank), waiting_hops(rank, size)).sum().backward()
    return said, float(fsdp.clip_grad_norm_(model, 1.0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
