"""Ranks that go different ways race on no memory of a device: shown on virtual streams (tests/support/virtual.py)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from tests.device.test_races import STRATEGIES
from tests.runtime.uneven.test_uneven_paths import ALL, EVEN, make
from tests.support.paths import batch
from tests.support.virtual import Harness, Site

Story = Callable[..., None]


def different_paths(rank: int, **options: Any) -> None:
    """Each rank leaves out other units and accumulates; one evaluates alone, one reads a parameter, and weights change."""
    model = make(uneven_paths=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        with fsdp.no_sync(model):
            model(batch(step, 1, rank), EVEN[rank % 2 :]).square().mean().backward()
        model(batch(step, 0, rank), ALL[: 1 + (rank + step) % 4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluate(model, step if rank == 0 else 0)
        for _ in range(2):
            fsdp.meet(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            if rank == 1:
                fsdp.full_tensor(model.layers[0].weight)  # type: ignore[union-attr, index, arg-type]
        evaluate(model, rank)
    fsdp.meet(model)


def evaluate(model: nn.Module, times: int) -> None:
    with torch.no_grad():
        for number in range(times):
            model(batch(9, number, 0), ALL)


def without_data(rank: int, **options: Any) -> None:
    """Ranks run out of data, and one step is without a batch on one rank."""
    model = make(uneven_paths=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with fsdp.join(model, optimizer.step) as joined:
        for number in range(2 * rank):
            model(batch(number, 0, rank), ALL[rank:]).square().mean().backward()
            joined.step()
            evaluate(model, rank)
    optimizer.zero_grad()
    if rank == 0:
        fsdp.empty_backward(model)
    else:
        model(batch(0, 0, rank), ALL).square().mean().backward()
    optimizer.step()


@cache
def harness_of(story: Story, strategy: str, skipped: Site | None = None) -> Harness:
    world = Harness(skipped)
    size, options = STRATEGIES[strategy]
    with world.patched():
        fsdp.simulate(size, world.run(lambda rank: story(rank, **options)))
    return world


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "one rank"])
@pytest.mark.parametrize("story", [different_paths, without_data])
def test_no_accesses_race(story: Story, strategy: str) -> None:
    world = harness_of(story, strategy)
    assert all(recorder.operations > 100 for recorder in world.recorders)
    assert not world.races, world.races[:5]


def test_a_race_is_found_when_any_wait_of_this_package_is_left_out() -> None:
    # `gathering` itself waits for the last reader of released memory, and a passive gather uses memory of its own
    # two ranks are quicker than four, on which alone the waits of `finish` are missed
    sites = [
        site
        for site in harness_of(different_paths, "HYBRID_SHARD").sites
        if site.where.startswith(("GatherOrder", "CommonPath")) and site.what != "gathering"
    ]
    assert len(sites) == 5, sites
    worlds = ["HYBRID_SHARD" if site.where.startswith("GatherOrder.finish") else "FULL_SHARD" for site in sites]
    assert not [site for site, world in zip(sites, worlds, strict=True) if not harness_of(different_paths, world, site).races]
