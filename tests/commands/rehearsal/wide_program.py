"""Trains models as rank 0 of many ranks, over a group that sends nothing, and saves the engine's peaks."""

import torch

import fsdp
from tests.commands.rehearsal.models import MODELS, Case
from tests.support.processes import be_alone, rank_0_of

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


def measured() -> dict[tuple[str, str, int], int]:
    found: dict[tuple[str, str, int], int] = {}
    for ranks in SIZES:
        with rank_0_of(ranks):
            found |= {(name, one, ranks): peak_of(case, one) for name, case in MODELS.items() for one in STRATEGIES}
    return found


if __name__ == "__main__":
    be_alone(measured)
