"""Programs whose units compute on several streams, ordered by the program, train as on the host."""

from typing import Any, Final

import pytest
import torch

import fsdp
from tests.device.test_races import HALF, STRATEGIES
from tests.support.accelerator.device import Scheduler, load
from tests.support.accelerator.failed_backward import SCHEDULES
from tests.support.accelerator.side_streams import STORIES
from tests.support.accelerator.stories import first_difference, on_accelerator, on_host
from tests.support.everything import EVERYTHING
from tests.support.models import ALONE

load()
torch.set_num_threads(1)
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "units alone": {"reduction": ALONE},
    "in pieces": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002)},
    "on two streams": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002, streams=2)},
    "bf16": {"mp_policy": HALF},
    "offloaded": {"offload_policy": fsdp.OffloadPolicy()},
}
CASES: Final = [
    (strategy, option) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD") for option in OPTIONS
]
FEW_CASES: Final = [
    ("FULL_SHARD", "default"),
    ("SHARD_GRAD_OP", "default"),
    ("NO_SHARD", "in pieces"),
    ("HYBRID_SHARD", "units alone"),
]
"""By default each story has one of these, and each of these two stories."""
FEW_SCHEDULES: Final = [(Scheduler.LAZY, 0), (Scheduler.RANDOM, 1)]


@pytest.mark.parametrize(
    ("name", "strategy", "option"),
    [
        (name, *case)
        for number, name in enumerate(STORIES)
        for case in (CASES if EVERYTHING else [FEW_CASES[number % len(FEW_CASES)]])
    ],
)
def test_units_on_several_streams_train_as_on_the_host(name: str, strategy: str, option: str) -> None:
    size, options = STRATEGIES[strategy]
    options = {**options, **OPTIONS[option]}
    wanted = on_host(STORIES[name], size, **options)
    found = {
        (scheduler.name, seed): difference
        for scheduler, seed in (SCHEDULES if EVERYTHING else FEW_SCHEDULES)
        if (difference := first_difference(on_accelerator(STORIES[name], size, scheduler, seed, **options), wanted)) is not None
    }
    assert not found
