"""Traces two steps of two processes over gloo, and saves the traces and what the groups of torch counted."""

from pathlib import Path
from typing import Any

import torch

import fsdp
from tests.support.models import Block, loss_of, make_net
from tests.support.processes import be_a_rank

X = torch.linspace(-1, 1, 12).view(2, 6)


def main(rank: int, size: int, folder: Path) -> Any:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    for _ in range(2):
        loss_of(model(X)).backward()
    with fsdp.trace(model) as trace:
        for _ in range(2):
            loss_of(model(X)).backward()
    path = trace.save(folder / "trace-{rank}.json")
    return str(path), fsdp.stats(model)


if __name__ == "__main__":
    be_a_rank(main)
