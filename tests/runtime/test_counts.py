"""How often the ranks talk, and how many bytes it takes: exact counts from the log of the simulated world."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from tests.support.models import ALONE, Block, Net, X, loss_of, world_log
from tests.support.ranks import on_ranks

BLOCKS = 4
STEPS = 3


def step(model: nn.Module) -> None:
    loss_of(model(X)).backward()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)


def kept(model: nn.Module) -> None:
    with fsdp.no_sync(model):
        step(model)


def calls(work: Callable[[nn.Module], None], size: int = 2, width: int = 8, **options: Any) -> list[Any]:
    """The calls of each of three rounds of `work`, on one rank."""

    def fn(rank: int) -> list[Any]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(Net(BLOCKS, width), auto_wrap_policy={Block}, reduction=ALONE, **options)
        rounds = []
        for _ in range(STEPS):
            before = len(world_log())
            work(model)
            rounds.append(world_log()[before:])
        return rounds

    rounds, *others = fsdp.simulate(size, fn)
    # a broadcast sends to all but one, so bytes may differ
    assert all(_names(other) == _names(rounds) for other in others)
    return rounds


def _names(rounds: list[Any]) -> list[Any]:
    return [[(call.comm, call.kind, call.label) for call in of_step] for of_step in rounds]


OPTIONS = [
    ({}, BLOCKS + 1 + BLOCKS),
    ({"sharding_strategy": "SHARD_GRAD_OP"}, BLOCKS + 1),
    ({"reshard_after_forward": False}, BLOCKS + 1),
    ({"reshard_after_forward": True}, 2 * (BLOCKS + 1)),
    ({"prefetch": 0}, BLOCKS + 1 + BLOCKS),
    ({"prefetch": 3}, BLOCKS + 1 + BLOCKS),
    ({"prefetch": 99, "reshard_after_forward": True}, 2 * (BLOCKS + 1)),
]


@pytest.mark.parametrize(("options", "gathers"), OPTIONS, ids=str)
def test_a_step_under_no_sync_gathers_the_same_and_reduces_nothing(options: dict[str, Any], gathers: int) -> None:
    for of_step in calls(kept, **options):
        assert Counter(call.kind for call in of_step) == {"all_gather": gathers}


@pytest.mark.parametrize("options", [options for options, _ in OPTIONS], ids=str)
def test_an_evaluation_gathers_each_unit_once(options: dict[str, Any]) -> None:
    for of_step in calls(evaluate, **options):
        names = ["Net", *(f"blocks.{n}" for n in range(BLOCKS))]
        assert [call.label for call in of_step] == names


@pytest.mark.parametrize(("options", "gathers"), OPTIONS, ids=str)
def test_a_step_gathers_what_the_strategy_says_reduces_each_unit_once_and_says_once_which_gradients_came(
    options: dict[str, Any], gathers: int
) -> None:
    first, *rest = calls(step, **options)
    names = ["Net", *(f"blocks.{n}" for n in range(BLOCKS))]
    for of_step in (first, *rest):
        assert Counter(call.kind for call in of_step)["all_gather"] == gathers
        assert sorted(call.label for call in of_step if call.kind == "reduce_scatter") == names
        assert [call.label for call in of_step if call.kind == "all_reduce"] == ["which gradients came"]
    # the order is settled once
    assert [call.label for call in first if call.kind == "broadcast"] == ["the order of reductions"]
    assert all(call.kind != "broadcast" for of_step in rest for call in of_step)
    assert {call.kind for call in rest[0]} == {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_halves_what_gathers_move(dtype: torch.dtype) -> None:
    def gathered(policy: Any) -> int:
        return sum(call.received for call in calls(step, width=64, mp_policy=policy)[1] if call.kind == "all_gather")

    half, full = gathered(fsdp.MixedPrecisionPolicy(param_dtype=dtype)), gathered(None)
    assert half <= full / 2 * 1.01


def test_gathers_and_reductions_have_communicators_of_their_own() -> None:
    for call in calls(step)[1]:
        assert call.comm == ("reduce" if call.kind == "reduce_scatter" else "shard")


@on_ranks(1)
def test_prefetch_gathers_ahead_of_the_need(rank: int) -> None:
    """A unit's gather is called before the forward of the unit before it."""
    model = fsdp.fully_shard(Net(BLOCKS), auto_wrap_policy={Block}, prefetch=2)
    heard: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: heard.append(len(world_log("all_gather"))))
    found = []
    for _ in range(2):
        before = len(world_log("all_gather"))
        evaluate(model)
        found.append([count - before for count in heard])
        heard.clear()
    assert found == [[2, 3, 4, 5], [4, 5, 5, 5]]
