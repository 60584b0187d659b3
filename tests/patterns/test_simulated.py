"""Every pattern in the simulated world, with one rank, two and three."""

from functools import cache
from typing import Any

import pytest

import fsdp
from tests.patterns.every import PATTERNS
from tests.patterns.harness import Outcome, attempt, compare, perform

WORLDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 0, {}),
    "two ranks": (2, 0, {}),
    "two ranks, nothing freed after forward": (2, 1, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "three ranks, root freed too, deep prefetch": (3, 2, {"reshard_after_forward": True, "prefetch": 3}),
}
"""Number of ranks, seed of the world, options of `fully_shard`."""

# torch says so of reentrant checkpoints inside others
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@cache
def outcomes(name: str, world: str) -> list[Outcome]:
    size, seed, options = WORLDS[world]
    of = PATTERNS[name]
    run = attempt if of.disagrees else perform
    return fsdp.simulate(size, lambda rank: run(of, rank, size, **options), seed)


CASES = [(name, world) for name, of in PATTERNS.items() for world in (["two ranks"] if of.slow else WORLDS)]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_simulated(name: str, world: str) -> None:
    compare(PATTERNS[name], outcomes(name, world))


@pytest.mark.parametrize("name", [name for name, of in PATTERNS.items() if (of.gathers, of.reductions) != (None, None)])
def test_cost(name: str) -> None:
    """Exactly as often as was reasoned, with the default options."""
    of, calls = PATTERNS[name], outcomes(name, "two ranks")[0].calls
    found = {"gathers": calls["all_gather"], "reductions": calls["reduce_scatter"]}
    wanted = {"gathers": of.gathers, "reductions": of.reductions}
    for kind, number in wanted.items():
        assert number in (None, found[kind]), f"{found[kind]} {kind}, not {number} ({of.cost or 'no derivation'})"
