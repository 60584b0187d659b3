"""SHARD_GRADIENTS and SHARD_OPTIMIZER: whole parameters that stay between steps, and when they are gathered again."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import simulate
from tests.support.models import Block, Net, X, assert_close, gradients_of, local, loss_of, two_units, units_of, world_log
from tests.support.ranks import on_ranks

BLOCKS = 3


UNITS = BLOCKS + 1


BOTH = pytest.mark.parametrize("strategy", ["SHARD_GRADIENTS", "SHARD_OPTIMIZER"])


def wrapped(strategy: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp.fully_shard(Net(BLOCKS), auto_wrap_policy={Block}, sharding_strategy=strategy, **options)


def calls_since(before: int) -> Counter[str]:
    return Counter(call.kind for call in world_log()[before:])


@BOTH
@on_ranks(2)
def test_weights_are_gathered_once_a_step_and_not_in_between(rank: int, strategy: str) -> None:
    """4 micro-batches: one gather a unit, at the first; then a byte says that nothing has changed; one reduction a unit."""
    model = wrapped(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        before = len(world_log())
        with fsdp.no_sync(model):
            for _ in range(3):
                loss_of(model(X)).backward()
        loss_of(model(X)).backward()
        optimizer.step()
        optimizer.zero_grad()
        calls = calls_since(before)
        asked = sum(call.label == "which weights changed" for call in world_log()[before:])
        found.append((calls["all_gather"], calls["reduce_scatter"], asked))
    assert found == [(UNITS, UNITS, 3)] * 3


@BOTH
@on_ranks(2)
def test_a_loop_without_accumulation_asks_nothing(rank: int, strategy: str) -> None:
    model = wrapped(strategy)
    for _ in range(3):
        before = len(world_log())
        loss_of(model(X)).backward()
    assert sorted({call.label for call in world_log()[before:] if call.kind == "all_reduce"}) == ["which gradients came"]


@BOTH
@pytest.mark.parametrize("changed", range(2))
def test_a_change_on_one_rank_is_seen_by_all(strategy: str, changed: int) -> None:
    """Between micro-batches, a parameter of which only one rank holds anything is changed in place."""

    def fn(rank: int) -> Any:
        model = wrapped(strategy)
        with fsdp.no_sync(model):
            loss_of(model(X)).backward()
        with torch.no_grad():
            for parameter in model.blocks[1].parameters():
                if rank == changed and local(parameter).numel():
                    parameter.mul_(2)
        return model(X).detach()

    torch.manual_seed(0)
    plain = Net(BLOCKS)
    with torch.no_grad():
        parts = fsdp.simulate(2, lambda rank: [local(p).numel() for p in wrapped(strategy).blocks[1].parameters()])
        for number, parameter in enumerate(plain.blocks[1].parameters()):
            held = parts[changed][number]
            first = sum(parts[rank][number] for rank in range(changed))
            parameter.view(-1)[first : first + held] *= 2
    for found in fsdp.simulate(2, fn):
        assert torch.allclose(found, plain(X).detach(), atol=1e-6)


@BOTH
def test_an_evaluation_sees_updates_that_leave_no_trace_and_so_does_what_follows(strategy: str) -> None:
    """Weights are swapped through `.data` for an evaluation, as averages of weights are."""

    def fn(rank: int) -> list[Tensor]:
        model = wrapped(strategy)
        loss_of(model(X)).backward()
        found = []
        for factor in (2.0, 0.5):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            with torch.no_grad():
                found.append(model(X))
        return [*found, model(X).detach()]

    torch.manual_seed(0)
    plain = Net(BLOCKS)
    once = plain(X).detach()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
        twice = plain(X)
    for double, back, after in fsdp.simulate(2, fn):
        assert torch.allclose(double, twice, atol=1e-5)
        assert torch.equal(back, after) and torch.allclose(back, once, atol=1e-6)


def test_a_frozen_unit_is_gathered_once_in_a_training() -> None:
    def fn(rank: int) -> list[dict[str, int]]:
        torch.manual_seed(0)
        model = Net(BLOCKS)
        for block in model.blocks:
            block.requires_grad_(False)
        for block in model.blocks:
            fsdp.fully_shard(block, sharding_strategy="SHARD_GRADIENTS")
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(3):
            before = len(world_log())
            loss_of(model(X)).backward()
            optimizer.step()
            found.append(dict(Counter(call.label for call in world_log()[before:] if call.kind == "all_gather")))
        return found

    blocks = {f"blocks.{i}": 1 for i in range(BLOCKS)}
    assert fsdp.simulate(2, fn)[0] == [{**blocks, "Net": 1}, {"Net": 1}, {"Net": 1}]


@BOTH
def test_what_is_held_between_steps_is_what_the_table_says(strategy: str) -> None:
    def fn(rank: int) -> tuple[int, int]:
        model = wrapped(strategy)
        for _ in range(2):
            loss_of(model(X)).backward()
        flats = [flat for unit in units_of(model) for flat in unit.flats]
        held = sum(flat.shard.nbytes + flat.unsharded.nbytes for flat in flats)
        if strategy == "SHARD_OPTIMIZER":
            held += sum(flat.unsharded.nbytes for flat in flats)
        return fsdp.memory_bytes(model), held

    for found, wanted in fsdp.simulate(2, fn):
        assert found == wanted


@BOTH
def test_a_failed_step_releases_the_unsharded_parameters(strategy: str) -> None:
    def fn(rank: int) -> Any:
        model = wrapped(strategy)
        loss_of(model(X)).backward()
        model.zero_grad()
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X)
        flats = [flat for unit in units_of(model) for flat in unit.flats]
        buckets = 1 if strategy == "SHARD_OPTIMIZER" else 0
        assert fsdp.memory_bytes(model) == sum(flat.shard.nbytes + buckets * flat.unsharded.nbytes for flat in flats)
        handle.remove()
        loss_of(model(X)).backward()
        fresh = wrapped(strategy)
        loss_of(fresh(X)).backward()
        return gradients_of(model), gradients_of(fresh)

    for found, wanted in fsdp.simulate(2, fn):
        assert_close(found, wanted, within=0)


@on_ranks(2)
def test_data_assigned_outside_is_what_the_next_forward_gathers_also_ahead(rank: int) -> None:
    """The unit that is gathered ahead of its forward once was gathered before the new data was noticed."""
    model = two_units()
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert float(model(torch.ones(1, 3)).abs().sum()) == 0.0


class StepsInForward(nn.Module):
    """Calls one layer twice. In between an optimizer steps, maybe after a backward through another layer."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        # a single row: rank 1 holds nothing of it, and its optimizer skips it
        self.one, self.two = nn.Linear(3, 1, bias=False), nn.Linear(3, 3)
        self.backward = backward
        self.optimizer: torch.optim.Optimizer | None = None

    def forward(self, x: Tensor) -> Tensor:
        first = self.one(x).detach()
        if self.optimizer is not None:
            if self.backward:
                self.two(x).sum().backward()
            self.optimizer.step()
        return self.one(x) + first


def second_step(model: nn.Module, inner: StepsInForward) -> Tensor:
    """What the second forward returns, whose optimizer has the gradients of the first step."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    model(x).sum().backward()
    inner.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(x)
    output.sum().backward()
    return output.detach()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "NO_SHARD"])
@pytest.mark.parametrize("backward", [True, False], ids=["after a backward", "alone"])
def test_an_optimizer_that_steps_in_a_forward_is_seen_by_all_ranks(strategy: str, backward: bool) -> None:
    """Also by a rank that holds no element of a parameter and has a copy from before the step."""

    def fn(rank: int) -> Tensor:
        inner = StepsInForward(backward)
        return second_step(fsdp.FullyShardedDataParallel(inner, auto_wrap_policy={nn.Linear}, sharding_strategy=strategy), inner)

    plain = StepsInForward(backward)
    wanted = second_step(plain, plain)
    assert all(torch.allclose(found, wanted) for found in simulate(2, fn))
