"""Ranks of one model go different ways, and some have no data left: `fsdp.join` and `fsdp.empty_backward`."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.runtime.uneven.joins import weights_after
from tests.runtime.uneven.test_uneven_paths import ALL, EVEN, make
from tests.support.models import assert_close
from tests.support.paths import Branching, Hop, batch
from tests.support.ranks import on_ranks, told
from tests.support.states import assert_near

UNEVEN: dict[str, Any] = {"uneven_paths": True}


@pytest.mark.parametrize("options", [{}, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("zeroes", ["before", "after"])
def test_gradients_are_zeroed_outside_the_step_beside_accumulated_ones(
    zeroes: str, strategy: str, options: dict[str, Any]
) -> None:
    def train(rank: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Branching() if rank is None else make(sharding_strategy=strategy, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with contextlib.nullcontext(optimizer) if rank is None else fsdp.join(model, optimizer.step) as joined:
            for number in range(4 if rank is None else 2 + 2 * rank):
                if zeroes == "before":
                    optimizer.zero_grad()
                with contextlib.nullcontext() if rank is None else fsdp.no_sync(model):
                    model(batch(number, 0, 0), EVEN).square().mean().backward()
                model(batch(number, 1, 0), EVEN).square().mean().backward()
                joined.step()
                if zeroes == "after":
                    optimizer.zero_grad()
        return dict(model.state_dict()) if rank is None else fsdp.full_state_dict(model, rank0_only=False)

    wanted = train(None)
    for found in fsdp.simulate(2, train):
        assert_near(found, wanted)


@on_ranks(2)
def test_backwards_of_their_own_through_one_forward_are_served(rank: int) -> None:
    """Each of them is a step of its own, so that the common path of one begins in a backward."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) * self.scale  # type: ignore[no-any-return]

    model = fsdp.fully_shard(Outside(), auto_wrap_policy={nn.Linear}, **UNEVEN)
    with fsdp.join(model, lambda: None):
        for _ in range(1 + rank):
            loss = model(torch.ones(2, 8)).square().sum()
            for _ in range(10):
                loss.backward(retain_graph=True)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_without_data_need_no_batch_whatever_paths_others_take(seed: int) -> None:
    """Some evaluate between two batches, or have no batch at all."""
    divides_by_all, zeroes = seed % 2 == 0, "before" if seed % 3 else "after"
    wanted, _ = weights_after(None, seed, 4, divides_by_all, zeroes)
    found = fsdp.simulate(4, lambda rank: weights_after(rank, seed, 4, divides_by_all, zeroes), seed)
    assert len({forwards for _, forwards in found}) > 1
    for weights, _ in found:
        assert_near(weights, wanted)


def test_each_rank_steps_by_itself_where_nothing_is_sharded() -> None:
    def run(rank: int, counts: tuple[int, ...]) -> dict[str, Tensor]:
        model = make(sharding_strategy="NO_SHARD", **UNEVEN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with fsdp.join(model):
            for number in range(counts[rank]):
                model(batch(number, 0, rank), ALL[rank:]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    counts = (1, 3, 2)
    torch.manual_seed(0)
    plain = Branching()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for number in range(3):
        left = [rank for rank, count in enumerate(counts) if count > number]
        for rank in left:
            (plain(batch(number, 0, rank), ALL[rank:]).square().mean() / len(left)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in fsdp.simulate(3, partial(run, counts=counts)):
        assert_close(found, {name: p.detach() for name, p in plain.named_parameters()})


def test_a_rank_that_trains_outside_of_the_join_is_named() -> None:
    def run(rank: int) -> None:
        model = make(**UNEVEN)
        if rank == 0:
            with fsdp.join(model, lambda: None):
                pass
        else:
            model(batch(0, 0, rank), ALL).sum().backward()

    for text in told(2, run):
        assert "waits at the end of fsdp.join, and rank 1 ended a backward outside of it" in text


def test_a_step_on_some_ranks_and_a_backward_on_others_do_not_go_together() -> None:
    def run(rank: int, other: Any) -> None:
        model = make(**UNEVEN)
        with fsdp.join(model, lambda: None) as joined:
            loss = model(batch(0, 0, rank), ALL).sum()
            if rank == 2:
                return  # it serves the others
            joined.step() if rank else other(model, loss)

    cases = (
        ("are at a backward's end", lambda model, loss: loss.backward()),
        ("have called fsdp.meet", lambda model, loss: fsdp.meet(model)),
    )
    for words, other in cases:
        for text in told(3, partial(run, other=other)):
            assert f"some ranks have called joined.step(), and others {words} and would wait for ever" in text


def test_a_rank_that_fails_is_named_to_ranks_without_data_and_the_model_trains_on() -> None:
    def run(rank: int) -> tuple[str, float]:
        model, said = make(**UNEVEN), ""
        try:
            with fsdp.join(model, lambda: None):
                for number in range(2 * rank):
                    hops = [Hop(7)] if number else ALL  # there is no such layer
                    model(batch(number, 0, rank), hops).sum().backward()
        except (IndexError, fsdp.PeerFailed) as failure:
            said = f"{type(failure).__name__}: {failure}".partition(" in ")[0]
        for parameter in model.parameters():
            parameter.grad = None
        model(batch(0, 0, rank), ALL[rank:]).sum().backward()
        return said, float(fsdp.clip_grad_norm_(model, 1.0))

    first, second = fsdp.simulate(2, run)
    assert first[0].startswith("PeerFailed: rank 1 has abandoned the step") and second[0].startswith("IndexError")
    torch.manual_seed(0)
    plain = Branching()
    for rank in range(2):
        (plain(batch(0, 0, rank), ALL[rank:]).sum() / 2).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    assert abs(first[1] - norm) < 1e-4 * norm and first[1] == second[1]


def test_a_rank_without_data_is_not_named_where_others_step_differently() -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = fsdp.fully_shard(nn.Linear(8, 8), **UNEVEN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdp.join(model, lambda: None):
            for number in range(3 if rank else 1):
                model(torch.ones(2, 8)).sum().backward()
                if rank == 1 and number == 1:
                    optimizer.step()

    for text in told(3, run):
        assert "was changed on rank 1 since the last backward, and nothing was changed on rank 2:" in text


def test_ranks_meet_inside_a_join() -> None:
    def run(rank: int) -> float:
        model = make(**UNEVEN)
        with fsdp.join(model, lambda: None):
            if rank:
                model(batch(0, 0, rank), ALL).sum().backward()
                fsdp.meet(model)
        return float(fsdp.clip_grad_norm_(model, 1.0))

    first, second = fsdp.simulate(2, run)
    assert first == second > 0


@on_ranks(1)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    model = make(**UNEVEN)
    with pytest.raises(fsdp.ShardingError, match="a rank without a batch computes nothing, so leave inputs out"):
        fsdp.join(model, lambda: None, inputs=(1,)).__enter__()
    with fsdp.join(model, lambda: None), pytest.raises(fsdp.ShardingError, match="inside another join"):
        fsdp.join(model, lambda: None).__enter__()
    with pytest.raises(fsdp.ShardingError, match="empty_backward: all ranks of this model compute the same"):
        fsdp.empty_backward(make())


# a backward without a batch ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "NO_SHARD"])
def test_a_rank_without_a_batch_takes_part_in_a_step(strategy: str) -> None:
    """In each step another rank has nothing, and in the last one no rank has anything."""

    def train(rank: int | None) -> list[dict[str, Tensor | None]]:
        torch.manual_seed(0)
        model: nn.Module = Branching() if rank is None else make(sharding_strategy=strategy, **UNEVEN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        for step in range(5):
            for one in range(3) if rank is None else [rank]:
                if step % 3 != one and step < 4:
                    (model(batch(step, 0, one), ALL[:2]).square().mean() / (3 if rank is None else 1)).backward()
                elif rank is not None:
                    with fsdp.no_sync(model):
                        fsdp.empty_backward(model)  # nothing is reduced
                    fsdp.empty_backward(model)
            found.append({name: None if p.grad is None else full(p.grad).clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        return found

    def full(gradient: Tensor) -> Tensor:
        return fsdp.full_tensor(gradient) if hasattr(gradient, "shard_info") else gradient

    wanted = train(None)
    for found in fsdp.simulate(3, train):
        for mine, other in zip(found, wanted, strict=True):
            assert [name for name, one in mine.items() if one is None] == [name for name, one in other.items() if one is None]
            for name, value in other.items():
                if value is not None:
                    torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)


def test_a_rank_without_a_batch_keeps_what_it_accumulated() -> None:
    def run(rank: int) -> Tensor:
        model = make(**UNEVEN)
        with fsdp.no_sync(model):
            model(batch(0, 0, rank), ALL[:1]).sum().backward()
        if rank:
            fsdp.empty_backward(model)
        else:
            model(batch(0, 1, rank), ALL[:1]).sum().backward()
        return fsdp.full_tensor(model.head.weight.grad)  # type: ignore[union-attr, arg-type, return-value]

    torch.manual_seed(0)
    plain = Branching()
    for rank, number in ((0, 0), (0, 1), (1, 0)):
        (plain(batch(0, number, rank), ALL[:1]).sum() / 2).backward()
    for found in fsdp.simulate(2, run):
        torch.testing.assert_close(found, plain.head.weight.grad, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_a_rank_without_data_has_a_scale(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), fsdp.ShardedGradScaler(model, init_scale=4.0)

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with fsdp.join(model, step) as joined:
        for _ in range(2 if rank == 0 else 0):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            joined.step()
    assert scaler.get_scale() == 4.0
