"""Training on W simulated ranks is single-process training on the averaged gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from tests.support.everything import EVERYTHING
from tests.support.models import (
    CASES,
    Case,
    assert_close,
    assert_trained_alike,
    gradients_of,
    join,
    joined,
    own_batches,
    reference,
    train,
    wrap,
)

SIZES = [1, 2, 3, 4, 8] if EVERYTHING else [1, 3, 4]
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def sharded(case: Case, world_size: int, steps: int = 3, micro: int = 1, seed: int = 0, **options: Any) -> Any:
    """Every rank's shards after training, put together."""
    accumulate = options.pop("accumulate", False)

    def fn(rank: int) -> Any:
        model = wrap(case, **options)
        more = {"accumulate": partial(fsdp.no_sync, model)} if accumulate else {}
        return train(model, own_batches(case, rank, steps, micro), SGD, **more)

    return joined(fsdp.simulate(world_size, fn, seed), case.model())


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_gradient_and_the_weights_are_those_of_one_process(case: Case, world_size: int) -> None:
    assert_trained_alike(sharded(case, world_size), reference(case, world_size, optimizer=SGD))


@pytest.mark.parametrize(
    "options",
    [
        {"in_place": True},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"prefetch": 0},
        {"prefetch": 3},
    ],
    ids=str,
)
def test_no_option_changes_a_number(options: dict[str, Any]) -> None:
    case = CASES["net"]
    assert_trained_alike(sharded(case, 3, **options), reference(case, 3, optimizer=SGD))


@pytest.mark.parametrize("seed", range(3))
def test_no_interleaving_of_the_ranks_changes_a_bit(seed: int) -> None:
    case = CASES["net in layers"]
    one, other = sharded(case, 3), sharded(case, 3, seed=seed + 1)
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("world_size", SIZES)
def test_twenty_steps_drift_no_further_than_rounding(world_size: int) -> None:
    case = CASES["net in float64"]
    found, wanted = sharded(case, world_size, steps=20), reference(case, world_size, steps=20, optimizer=SGD)
    assert_trained_alike(found, wanted, within=1e-13)


@pytest.mark.parametrize("accumulate", [False, True], ids=["reduce every time", "no_sync"])
def test_accumulation_sums_the_micro_batches(accumulate: bool) -> None:
    case = CASES["net"]
    assert_trained_alike(sharded(case, 2, micro=3, accumulate=accumulate), reference(case, 2, micro=3, optimizer=SGD))


def test_adamw_sees_the_gradients_of_one_process_at_equal_weights() -> None:
    """AdamW magnifies rounding where a gradient is near its epsilon: each step starts from the plain weights."""
    case = CASES["net"]
    plain = case.model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps = []
    for step in range(4):
        start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        steps.append((start, train(plain, [[case.batch(rank, step) for rank in range(2)]], lambda _: optimizer)))

    def fn(rank: int) -> Any:
        model = wrap(case)
        own = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for step, (start, _) in enumerate(steps):
            fsdp.load_full_state_dict(model, start)
            found.append(train(model, [[case.batch(rank, step)]], lambda _: own))
        return found

    for one, (_, wanted) in zip(zip(*fsdp.simulate(2, fn), strict=True), steps, strict=True):
        found = joined(one, plain)
        assert_close(found.gradients[0], wanted.gradients[0])
        assert_close({**found.weights}, {**wanted.weights}, within=1e-4)


def test_adamw_groups_by_dimension_hold_the_parameters_they_would() -> None:
    """Shards keep their number of dimensions, so that weights decay and norms do not."""
    case = CASES["net"]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        return [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]

    def run(model: nn.Module, batches: Any) -> Any:
        return train(model, batches, lambda _: torch.optim.SGD(groups(model), lr=0.05))

    by_rank = fsdp.simulate(3, lambda rank: run(wrap(case), own_batches(case, rank)))
    wanted = run(case.model(), [[case.batch(rank, step) for rank in range(3)] for step in range(3)])
    assert_trained_alike(joined(by_rank, case.model()), wanted)


def test_ranks_that_use_different_parameters_average_with_zeros() -> None:
    """Unused on one rank counts as zero there; unused on all ranks leaves `.grad` alone."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.right(x) if way else self.left(x)

    def make() -> Forked:
        torch.manual_seed(0)
        return Forked()

    def backward(model: nn.Module, ranks: list[int], share: int) -> dict[str, torch.Tensor | None]:
        for rank in ranks:
            (model(torch.full((2, 3), rank + 1.0), rank % 2).square().sum() / share).backward()
        return gradients_of(model)

    plain = make()
    wanted = backward(plain, [0, 1], 2)
    shapes = {name: p.shape for name, p in make().named_parameters()}
    by_rank = fsdp.simulate(2, lambda rank: backward(fsdp.fully_shard(make()), [rank], 1))
    assert_close({name: join([one[name] for one in by_rank], shape) for name, shape in shapes.items()}, wanted)
