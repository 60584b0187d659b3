"""Shards in host memory: training has the bits of training on the host under every scheduler, and the device holds few bytes."""

from typing import Final

import pytest
import torch

import fsdp
from tests.device.on_accelerator.check_training import NOT_HERE, schedules
from tests.device.test_races import STORIES, STRATEGIES
from tests.support.accelerator.device import Scheduler, load
from tests.support.accelerator.stories import first_difference, on_accelerator, on_host
from tests.support.everything import EVERYTHING

load()
torch.set_num_threads(1)
OFFLOAD: Final = fsdp.OffloadPolicy()


def cases() -> list[tuple[str, str]]:
    """Stories and strategies. By default each story has one strategy, and training has them all."""
    names = [name for name in STORIES if name not in NOT_HERE]
    if EVERYTHING:
        return [(story, strategy) for story in names for strategy in STRATEGIES]
    chosen = ("NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP")
    return [("training", strategy) for strategy in STRATEGIES] + [
        (story, chosen[number % 3]) for number, story in enumerate(names) if story != "training"
    ]


@pytest.mark.parametrize(("story", "strategy"), cases())
def test_a_story_has_the_bits_of_the_host(story: str, strategy: str) -> None:
    size, options = STRATEGIES[strategy]
    wanted = on_host(STORIES[story], size, **options)
    few = tuple(Scheduler) if story == "training" else (Scheduler.RANDOM, Scheduler.STARVE)
    for scheduler, seed in schedules(len(story), few):
        found = on_accelerator(STORIES[story], size, scheduler, seed, offload_policy=OFFLOAD, **options)
        assert first_difference(found, wanted) is None, f"{scheduler.name}, seed {seed}"
