"""Training on W simulated ranks is single-process training on the averaged gradients."""

from functools import partial
from typing import Any

import pytest
import torch

import fsdp
from tests.support.everything import EVERYTHING
from tests.support.models import (
    CASES,
    Case,
    Trained,
    assert_close,
    assert_trained_alike,
    joined,
    own_batches,
    reference,
    train,
    wrap,
)

SIZES = [1, 2, 3, 4, 8] if EVERYTHING else [1, 3, 4]
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def sharded(case: Case, world_size: int, seed: int = 0) -> Trained:
    """Every rank's shards after training, put together."""
    found = fsdp.simulate(world_size, lambda rank: train(wrap(case), own_batches(case, rank), SGD), seed)
    return joined(found, case.model())


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_gradient_and_the_weights_are_those_of_one_process(case: Case, world_size: int) -> None:
    assert_trained_alike(sharded(case, world_size), reference(case, world_size, optimizer=SGD))


@pytest.mark.parametrize("seed", range(3))
def test_no_interleaving_of_the_ranks_changes_a_bit(seed: int) -> None:
    case = CASES["net in layers"]
    one, other = sharded(case, 3), sharded(case, 3, seed=seed + 1)
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


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
