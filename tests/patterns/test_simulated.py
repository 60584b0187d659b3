"""Every pattern on two simulated ranks, and in one more simulated world that follows from its name.

If all is asked for (see tests/support/everything.py), every pattern runs in every world.
"""

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any
from zlib import crc32

import pytest

import fsdp
from tests.patterns import visits
from tests.patterns.every import PATTERNS
from tests.patterns.harness import Outcome, attempt, compare, perform
from tests.patterns.turns import Turn, recorded
from tests.state_machine_tests.stories import TOLD, tell
from tests.support.everything import EVERYTHING

SHARED = fsdp.ReductionPolicy(bucket_cap_mb=1, first_bucket_mb=0.0002)
CUT = fsdp.ReductionPolicy(bucket_cap_mb=0.0001)
WORLDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 0, {}),
    "two ranks": (2, 0, {}),
    "two ranks, nothing freed after forward, buckets shared": (
        2,
        1,
        {"sharding_strategy": "SHARD_GRAD_OP", "reduction": SHARED},
    ),
    "three ranks, root freed too, deep prefetch, units in pieces": (
        3,
        2,
        {"reshard_after_forward": True, "prefetch": 3, "reduction": CUT},
    ),
    "two ranks, never freed": (2, 3, {"sharding_strategy": "SHARD_GRADIENTS"}),
}
"""Number of ranks, seed of the world, options of `fully_shard`."""

# torch says so of reentrant checkpoints inside others
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@cache
def simulated(name: str, world: str) -> tuple[list[Outcome], set[Turn]]:
    """What the pattern left on every rank, and what the units went through."""
    size, seed, options = WORLDS[world]
    of = PATTERNS[name]
    run = attempt if of.disagrees else perform
    with recorded() as turns, visits.checked():
        return fsdp.simulate(size, lambda rank: run(of, rank, size, **options), seed), turns


DEFAULT = "two ranks"
OTHERS = [world for world in WORLDS if world != DEFAULT]


def worlds_of(name: str) -> list[str]:
    """The worlds that this pattern runs in. The second one is chosen by a hash that is the same in every process."""
    if PATTERNS[name].slow:
        return [DEFAULT]
    return list(WORLDS) if EVERYTHING else [DEFAULT, OTHERS[crc32(name.encode()) % len(OTHERS)]]


CASES = [(name, world) for name in PATTERNS for world in worlds_of(name)]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_simulated(name: str, world: str) -> None:
    compare(PATTERNS[name], simulated(name, world)[0])


@pytest.mark.parametrize("name", [name for name, of in PATTERNS.items() if (of.gathers, of.reductions) != (None, None)])
def test_cost(name: str) -> None:
    """Exactly as often as was reasoned, with the default options."""
    of, calls = PATTERNS[name], simulated(name, "two ranks")[0][0].calls
    found = {"gathers": calls["all_gather"], "reductions": calls["reduce_scatter"]}
    wanted = {"gathers": of.gathers, "reductions": of.reductions}
    for kind, number in wanted.items():
        assert number in (None, found[kind]), f"{found[kind]} {kind}, not {number} ({of.cost or 'no derivation'})"


def test_every_world_is_that_of_many_patterns() -> None:
    """Of the worlds beside the first, each gets at least half of its share."""
    patterns_in = Counter(world for _, world in CASES)
    quick = sum(not of.slow for of in PATTERNS.values())
    assert patterns_in[DEFAULT] == len(PATTERNS)
    assert all(patterns_in[world] >= quick / len(OTHERS) / 2 for world in OTHERS), patterns_in


def test_stories_contain_every_two_rows_that_follow_each_other() -> None:
    """Of the patterns there is a story at the level of the lifecycle for any two rows that follow each other."""
    told = set()
    for story, strategy in TOLD:
        rows = [(state, event) for state, event, refused in tell(story, strategy) if not refused]
        told |= {Turn(strategy, before, after) for before, after in pairwise(rows)}
    missing = {str(turn): name for name, world in CASES for turn in simulated(name, world)[1] - told}
    assert missing == {}, "no story tells of these, which one of the patterns goes through"
