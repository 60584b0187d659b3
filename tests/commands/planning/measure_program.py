"""Measures the links of two processes over gloo, and plans with them."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp
from tests.commands.rehearsal.models import MODELS


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = fsdp.measure_links()
    case = MODELS["GPT"]
    plan = fsdp.plan(case.build, 4, inputs=case.inputs, checkpointing=[False], strategies=["FULL_SHARD"], **found)
    torch.save((found, str(plan)), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
