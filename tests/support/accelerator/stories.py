"""The training stories of tests/device/test_races.py on the pretend accelerator, beside the same ones on the host."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import current_rank
from tests.device import test_races as races
from tests.support.accelerator.device import NAME, Scheduler
from tests.support.accelerator.world import run
from tests.support.models import loss_of

Weights = list[dict[str, Tensor]]
"""The full weights of each rank after a story, on the host."""
Story = Callable[..., None]


def scaled(**options: Any) -> None:
    """A scaler that skips the second step, because one rank has an infinite gradient."""
    model, rank = races.net(**options), current_rank()
    assert rank is not None
    optimizer, scaler = races.sgd(model), fsdp.ShardedGradScaler(model, init_scale=8.0)
    for step in range(3):
        factor = float("inf") if step == 1 and rank.rank == rank.size - 1 else 1.0
        scaler.scale(loss_of(model(races.batch(step))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


STORIES: Final = {**races.STORIES, "a scaler that skips a step": scaled}
"""By name."""


def on_host(story: Story, size: int, seed: int = 0, **options: Any) -> Weights:
    """The weights after a story on simulated ranks on the host."""
    return fsdp.simulate(size, lambda rank: _weights_after(story, options), seed)


def on_accelerator(story: Story, size: int, scheduler: Scheduler, seed: int = 0, **options: Any) -> Weights:
    """The weights after a story on simulated ranks on the pretend accelerator."""

    def on_device(rank: int) -> dict[str, Tensor]:
        with torch.device(NAME, rank):
            return _weights_after(story, options)

    return run(size, on_device, scheduler, seed)


def first_difference(found: Weights, wanted: Weights) -> str | None:
    """The first weight whose bits differ; None if there is none. NaN is no number of a story."""
    for rank, (here, there) in enumerate(zip(found, wanted, strict=True)):
        assert here.keys() == there.keys() and here, "a story made no model, or another one"
        for name, value in here.items():
            if not torch.equal(value, there[name]):
                return f"{name} of rank {rank}"
    return None


def _weights_after(story: Story, options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of all models that a story makes."""
    rank = current_rank()
    assert rank is not None
    made = _made[rank.rank] = []
    story(**options)
    return {
        f"{number}.{name}": value.cpu().clone()
        for number, model in enumerate(made)
        for name, value in fsdp.full_state_dict(model, rank0_only=False).items()
    }


_made: dict[int, list[nn.Module]] = {}
"""For each rank, the models of its story."""
_fully_shard = fsdp.fully_shard


def _recorded(*args: Any, **kwargs: Any) -> Any:
    model = _fully_shard(*args, **kwargs)
    rank = current_rank()
    if rank is not None and rank.rank in _made:
        _made[rank.rank].append(model)
    return model


fsdp.fully_shard = _recorded  # for the whole process, which runs nothing else
