"""Trains models as rank 0 of many ranks, over a group that sends nothing, and saves the engine's peaks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
from tests.commands.rehearsal.models import MODELS, Case

SIZES = (64, 1024)
STRATEGIES = ("NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD")


def peak_of(case: Case, strategy: str) -> int:
    """Bytes that the engine held at most in two steps."""
    model = fsdp.fully_shard(case.build(), auto_wrap_policy=case.units, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    for _ in range(2):
        model(case.inputs()).float().square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return fsdp.memory_bytes(model, peak=True)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[tuple[str, str, int], int] = {}
    for ranks in SIZES:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        found |= {(name, one, ranks): peak_of(case, one) for name, case in MODELS.items() for one in STRATEGIES}
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
