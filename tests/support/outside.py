"""A model that reads a parameter outside its unit before the unit runs; the value reaches the loss of some ranks only.

The gradient of the value arrives after the unit's bucket was launched, on these ranks alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp

STEPS: Final = 3


class Reading(nn.Module):
    """Reads the weight of a layer, then calls the layer behind another one, so that its input requires a gradient."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        torch.manual_seed(1)
        self.first = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = self.layer.weight if self.reads else x
        return self.layer(self.first(x)), value


def in_forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    output, value = model(x)
    return output, value


def before_forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    value = fsdp.full_tensor(model.module.layer.weight)
    return model(x)[0], value


def shard_before_forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    value = fsdp.to_local(model.module.layer.weight)
    return model(x)[0], value


READS: Final = {"in the forward of another unit": in_forward, "full_tensor": before_forward}


def batch(rank: int, step: int) -> Tensor:
    return torch.linspace(-1, 1, 6).view(2, 3) * (rank + 1) + step


def loss_of(output: Tensor, value: Tensor, uses: bool) -> Tensor:
    return (output**2).sum() + ((value**2).sum() if uses else 0)


def wrapped(size: int, strategy: str, reads: bool = True) -> Any:
    mesh = {"mesh": (size // 2, 2)} if strategy == "HYBRID_SHARD" else {}
    return fsdp.FullyShardedDataParallel(Reading(reads), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, **mesh)


def trained(
    rank: int,
    size: int,
    users: tuple[int, ...],
    strategy: str = "FULL_SHARD",
    read: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = in_forward,
    micro: int = 1,
    sync: bool = True,
) -> dict[str, Tensor]:
    """The weights after some steps of a rank. `users`: the ranks whose loss uses the value."""
    model = wrapped(size, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(micro):
            last = number == micro - 1
            with nullcontext() if sync or last else fsdp.no_sync(model):
                loss_of(*read(model, batch(rank, step)), rank in users).backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in fsdp.full_state_dict(model, rank0_only=False).items()}


@cache
def plain(size: int, users: tuple[int, ...], micro: int = 1) -> dict[str, Tensor]:
    """The weights after the same steps on one process, with the average of all losses."""
    model = Reading()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(*model(batch(rank, step)), rank in users) * micro / size).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}
