"""Weights that change in the middle of a step in which ranks go different ways: an error on every rank, never a wrong number."""

import gc
import random
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import fsdp
from tests.runtime.uneven.test_uneven_paths import ALL, EVEN, make
from tests.support.paths import Branching, Hop, batch
from tests.support.ranks import on_ranks, told


def evaluate(model: nn.Module, number: int) -> float:
    with torch.no_grad():
        return float(model(batch(9, number, 0), ALL).sum())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ends", ["backward", "meet"])
def test_a_step_after_an_evaluation_on_one_rank_is_an_error_on_all(ends: str, fused: bool) -> None:
    def run(rank: int) -> None:
        model = make(uneven_paths=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model(batch(0, 0, rank), ALL).sum().backward()
        if rank == 1:
            evaluate(model, 0)  # rank 0 takes part in its gathers later, when it has stepped
        optimizer.step()
        model(batch(1, 0, rank), ALL).sum().backward() if ends == "backward" else fsdp.meet(model)

    first, second = told(2, run)
    assert first == second and "'Branching' were changed on rank 1 in the middle of a step" in first


def test_a_rank_that_swaps_weights_for_an_evaluation_of_its_own_is_named_with_the_unit() -> None:
    def run(rank: int) -> None:
        model = make(uneven_paths=True)
        model(batch(0, 0, rank), ALL).sum().backward()
        if rank == 1:
            evaluate(model, 0)
            with torch.no_grad():
                model.layers[2].weight.mul_(2)  # type: ignore[union-attr, index, operator]
            evaluate(model, 1)
        fsdp.meet(model)

    first, second = told(2, run)
    assert first == second and "unit 'layers.2' were changed on rank 1 in the middle" in first


@pytest.mark.parametrize("meets", [True, False])
def test_weights_may_change_after_a_meeting(meets: bool) -> None:
    def run(rank: int) -> None:
        model = make(uneven_paths=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch(step, 0, rank), ALL).sum().backward()
            for number in range(rank):
                evaluate(model, number)
            if meets:
                fsdp.meet(model)
            optimizer.step()

    assert [text.partition(":")[0] for text in told(2, run)] == ["" if meets else "ShardingError"] * 2


def test_ranks_that_take_one_path_may_change_weights_anywhere() -> None:
    def run(rank: int) -> list[float]:
        model = make(uneven_paths=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            model(batch(step, 0, rank), EVEN).square().mean().backward()
            found.append(evaluate(model, step))
            optimizer.step()
            optimizer.zero_grad()
        fsdp.meet(model)
        return found

    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for step in range(4):
        for rank in range(2):
            (model(batch(step, 0, rank), EVEN).square().mean() / 2).backward()
        wanted.append(evaluate(model, step))
        optimizer.step()
        optimizer.zero_grad()
    for found in fsdp.simulate(2, run):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps_first", [1, 2])
def test_ranks_that_take_one_path_and_step_at_different_places_get_an_error(steps_first: int, fused: bool) -> None:
    """Both evaluate twice. Rank 0 steps before the first or the second evaluation, and rank 1 after both."""

    def run(rank: int) -> None:
        model = make(uneven_paths=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model(batch(0, 0, rank), ALL).sum().backward()
        for number in range(3):
            if rank == 0 and number == steps_first:
                optimizer.step()
            evaluate(model, number)
        if rank == 1:
            optimizer.step()
        fsdp.meet(model)

    first, second = told(2, run)
    assert first == second and "or change weights at different places" in first


@pytest.mark.parametrize("empty", [False, True])
def test_ranks_that_hold_no_element_step_with_the_others(empty: bool) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = fsdp.fully_shard(nn.Linear(1, 1, bias=not empty), uneven_paths=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 1)).sum().backward()
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(1, 1))
            optimizer.step()
        fsdp.meet(model)

    assert told(3, run) == [""] * 3


@on_ranks(2)
def test_training_goes_on_after_the_error(rank: int) -> None:
    model, said = make(uneven_paths=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        try:
            model(batch(step, 0, rank), ALL[rank:]).sum().backward()
        except fsdp.ShardingError as error:
            said.append(f"{step}: {type(error).__name__}")
            continue
        if rank == 1 and step == 1:
            evaluate(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert said == ["2: ShardingError"]


def test_a_number_is_right_or_the_step_is_an_error() -> None:
    """Ranks evaluate different numbers of times, before or after the step."""
    refused = []
    for seed in range(12):
        wanted, _ = losses(seed, None)
        found = fsdp.simulate(3, partial(losses, seed), seed)
        said = {text for _, text in found}
        assert len(said) == 1
        refused.append(any(said))
        for of_rank, _ in found:
            for key, value in of_rank.items():
                torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-5)
    assert 3 <= refused.count(True) <= 9


def losses(seed: int, rank: int | None) -> tuple[dict[tuple[int, int], float], str]:
    """The evaluations of every step that came to its end, by step and rank. None: those of all ranks, in a single process."""
    model = make(uneven_paths=True) if rank is not None else _plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = random.Random(seed)
    kept: dict[tuple[int, int], float] = {}
    fresh: dict[tuple[int, int], float] = {}
    for step in range(5):
        plan = [(draw.randrange(3), draw.random() < 0.07, draw_hops(draw)) for _ in range(3)]
        try:
            for one in range(3) if rank is None else [rank]:
                (model(batch(step, 0, one), plan[one][2]).square().mean() / (3 if rank is None else 1)).backward()
        except fsdp.ShardingError as error:
            return kept, str(error).partition("\n")[0]
        kept.update(fresh)
        fresh = {}
        for one in range(3) if rank is None else [rank]:
            for _ in range(plan[one][0] if plan[one][1] else 0):
                fresh[step, one] = evaluate(model, step)
        optimizer.step()
        optimizer.zero_grad()
        for one in range(3) if rank is None else [rank]:
            for _ in range(0 if plan[one][1] else plan[one][0]):
                fresh[step, one] = evaluate(model, step)
    try:
        if rank is not None:
            fsdp.meet(model)
    except fsdp.ShardingError as error:
        return kept, str(error).partition("\n")[0]
    return kept | fresh, ""


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return Branching()


def draw_hops(draw: random.Random) -> list[Hop]:
    return [Hop(layer) for layer in range(4) if draw.random() < 0.7]


@on_ranks(1)
def test_the_hook_on_optimizers_keeps_no_model(rank: int) -> None:
    gc.collect()  # models of other tests
    before = len(torch_optimizer._global_optimizer_post_hooks)
    model: Any = make(uneven_paths=True)
    assert len(torch_optimizer._global_optimizer_post_hooks) == before + 1
    gone = weakref.ref(model.layers[0])
    del model
    gc.collect()
    assert gone() is None and len(torch_optimizer._global_optimizer_post_hooks) == before
