"""Training patterns on the pretend accelerator have the bits of the host: some of them by default, else all of them."""

from typing import Final
from zlib import crc32

import pytest
import torch

from tests.patterns.every import PATTERNS
from tests.support.accelerator.device import Scheduler, load
from tests.support.accelerator.patterns import NOT_HERE, OPTIONS, WITHIN_ROUNDING, difference
from tests.support.everything import EVERYTHING

load()
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
FOUND_RACES: Final = (
    "a momentum update of another unit inside the root's forward",
    "a unit that is called, edited and called again in one forward",
)
"""Patterns that found a race of the engine here."""
SHARE: Final = 14
"""By default, one of so many patterns runs."""
NAMES: Final = [name for name, of in PATTERNS.items() if name not in NOT_HERE and not of.slow and not of.disagrees]
SCHEDULES: Final = [(Scheduler.EAGER, 0), (Scheduler.LAZY, 0), (Scheduler.RANDOM, 1), *((Scheduler.STARVE, n) for n in range(6))]


def schedules(name: str) -> list[tuple[Scheduler, int]]:
    """The schedulers and seeds of a pattern: all of them, or by default one that a hash of the name chooses."""
    return SCHEDULES if EVERYTHING else [SCHEDULES[crc32(name.encode()) // SHARE % len(SCHEDULES)]]


def options(name: str) -> list[str]:
    """The options of a pattern, in the same way."""
    return list(OPTIONS) if EVERYTHING else [list(OPTIONS)[crc32(name.encode()) // SHARE % len(OPTIONS)]]


CASES: Final = [
    (name, scheduler, seed, option)
    for name in NAMES
    for scheduler, seed in schedules(name)
    for option in options(name)
    if EVERYTHING or name in FOUND_RACES or crc32(name.encode()) % SHARE == 0
]


@pytest.mark.parametrize(("name", "scheduler", "seed", "option"), CASES, ids=str)
def test_a_pattern_has_the_bits_of_the_host(name: str, scheduler: Scheduler, seed: int, option: str) -> None:
    assert difference(name, scheduler, seed, option) is None


def test_the_exceptions_are_patterns() -> None:
    assert NOT_HERE.keys() | WITHIN_ROUNDING.keys() <= PATTERNS.keys()


def test_a_backward_that_failed_a_moment_ago_keeps_no_node_for_the_first_forward() -> None:
    """The thread of autograd that ran it may drop its graph later than the error is raised."""
    for seed in range(6):
        assert difference("the norm of a shard as a penalty", Scheduler.STARVE, seed) is None
