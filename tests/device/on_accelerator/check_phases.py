"""`fsdp.offload` and `fsdp.onload`: the device is really free between phases, and training goes on with the same bits."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.runtime.registry import engines_in
from tests.device.on_accelerator.check_offload import batch, full_weights, model_of, step
from tests.device.test_races import STRATEGIES
from tests.support.accelerator.device import NAME, Scheduler, load, memory_limit
from tests.support.accelerator.stories import first_difference
from tests.support.accelerator.world import run
from tests.support.models import loss_of

load()
torch.set_num_threads(1)
module: Any = torch.get_device_module(NAME)
FIRST = "call fsdp.onload\\(model\\) first"


SCALARS = 8192
"""More bytes than the numbers that the engine keeps on a device, each in 512 bytes."""


def trained(rank: int, device: str, phases: bool, **options: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights after four steps, with the model in host memory after two of them; and bytes of the device before and then."""
    gc.collect()
    start = 0 if device == "cpu" else int(module.memory_allocated(rank))
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    fsdp.fully_shard(model, auto_wrap_policy={nn.Linear}, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    held = []
    for number in range(4):
        if number == 2 and phases:
            tracker = engines_in(model, "stats")[0].tracker
            before = tracker.held.get("shards", 0)
            if device != "cpu":
                held.append(int(module.memory_allocated(rank)) - start)
            fsdp.offload(model, optimizer)
            if device != "cpu":
                held += [int(module.memory_allocated(rank)) - start, tracker.now]
            fsdp.onload(model)
            fsdp.onload(model)  # nothing is there any more
            assert tracker.held.get("shards", 0) == before
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * number + rank)).to(device)
        model(x).square().mean().backward()
        fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        del x
    return full_weights(model), held


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_device_is_free_between_phases_and_training_goes_on(strategy: str) -> None:
    size, options = STRATEGIES[strategy]
    wanted = fsdp.simulate(size, lambda rank: trained(rank, "cpu", False, **options)[0])
    for scheduler in (Scheduler.RANDOM, Scheduler.STARVE):
        found = run(size, lambda rank: trained(rank, f"{NAME}:{rank}", True, **options), scheduler, 1)
        assert first_difference([weights for weights, _ in found], wanted) is None
        for _, (before, then, counted) in found:
            assert then <= SCALARS < before / 3 and counted == 0, (before, then, counted)


def test_on_the_host_nothing_moves_and_the_same_calls_are_refused() -> None:
    wanted = fsdp.simulate(2, lambda rank: trained(rank, "cpu", False)[0])
    found = fsdp.simulate(2, lambda rank: trained(rank, "cpu", True)[0])
    assert first_difference(found, wanted) is None
    fsdp.simulate(2, lambda rank: refusals(rank, "cpu"))


def refusals(rank: int, device: str, path: Path | None = None) -> None:
    model, optimizer = model_of(device)
    loss = loss_of(model(batch(rank, 0, device)))
    with pytest.raises(fsdp.ShardingError, match=r"offload: unit .* is between a forward and its backward"):
        fsdp.offload(model, optimizer)
    loss.backward()
    with pytest.raises(fsdp.ShardingError, match=r"offload: parameter .* has a gradient; step, and call"):
        fsdp.offload(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match="outside any forward, backward"):
        fsdp.offload(model, optimizer)
    before = full_weights(model)
    fsdp.offload(model, optimizer)
    refused: list[Callable[[], object]] = [
        lambda: model(batch(rank, 1, device)),
        lambda: model.state_dict(),
        lambda: fsdp.full_state_dict(model),
        lambda: fsdp.clip_grad_norm_(model, 1.0),
        lambda: fsdp.full_tensor(next(model.parameters())),
        lambda: optimizer.step(),
        lambda: optimizer.state_dict(),
        lambda: fsdp.save("checkpoint", model, optimizer),
    ]
    for call in refused:
        with pytest.raises(fsdp.ShardingError, match=FIRST):
            call()
    with pytest.raises(fsdp.ShardingError, match="in host memory already"):
        fsdp.offload(model)
    fsdp.onload(model)
    after = full_weights(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    step(model, optimizer, rank, device, 1)


def test_what_needs_the_weights_is_refused_until_they_are_back() -> None:
    run(2, lambda rank: refusals(rank, f"{NAME}:{rank}"), Scheduler.RANDOM, 1)


def test_a_device_that_is_full_when_weights_come_back_may_try_again() -> None:
    def train(rank: int) -> None:
        device = f"{NAME}:{rank}"
        model, optimizer = model_of(device)
        step(model, optimizer, rank, device, 0)
        before = full_weights(model)
        fsdp.offload(model, optimizer)
        with memory_limit(rank, int(module.memory_allocated(rank)) + 1024), pytest.raises(torch.OutOfMemoryError):
            fsdp.onload(model)
        with pytest.raises(fsdp.ShardingError, match=FIRST):
            model(batch(rank, 1, device))
        fsdp.onload(model)
        after = full_weights(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        step(model, optimizer, rank, device, 1)

    run(2, train, Scheduler.RANDOM, 1)


def test_a_model_that_is_no_sharded_one_is_refused() -> None:
    for call in (fsdp.offload, fsdp.onload):
        with pytest.raises(fsdp.ShardingError, match="contains no unit"):
            call(nn.Linear(2, 2))
