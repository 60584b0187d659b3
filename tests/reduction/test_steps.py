"""Ranks whose optimizers step differently are named in the next backward, and nothing else is taken for that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import current_rank
from tests.support.models import Block, Net, loss_of
from tests.support.ranks import on_ranks

Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "SGD in a loop": lambda parameters: torch.optim.SGD(parameters, lr=0.01, foreach=False, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 12).view(2, 6)


def shard(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    return fsdp.fully_shard(Net(1), auto_wrap_policy={Block}, **options)


def backward(model: nn.Module, rank: int) -> None:
    loss_of(model(batch(rank))).backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {}),
        (2, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (2, {"sharding_strategy": "SHARD_GRADIENTS"}),
        (4, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
    ],
    ids=["2", "3", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "HYBRID_SHARD"],
)
@pytest.mark.parametrize("skips", [0, 1])
def test_a_rank_that_skips_a_step_is_named_on_all(name: str, size: int, options: dict[str, Any], skips: int) -> None:
    def fn(rank: int) -> str:
        model = shard(**options)
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                with pytest.raises(fsdp.ShardingError) as caught:
                    backward(model, rank)
                assert all(p.grad is None for p in model.parameters())
                # said once; what is done about it is the user's
                backward(model, rank)
                return str(caught.value)
            backward(model, rank)
            if step == 0 or rank != skips:
                optimizer.step()
        raise AssertionError

    for said in fsdp.simulate(size, fn):
        assert " was changed on rank" in said
        assert (
            f"since the last backward, and nothing was changed on rank {skips}: an optimizer has stepped on some ranks only"
            in said
        )
        assert "Load a checkpoint, and let a condition or a scaler decide alike on all ranks whether to step." in said


def step_alike(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def all_skip(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step % 2:
        optimizer.step()


def twice_on_one_rank(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Not noticed, but not taken for something else either."""
    for _ in range(1 + rank):
        optimizer.step()


def by_data(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def in_place(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def more_on_one_rank(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        for parameter in list(model.parameters())[rank:]:
            parameter.clamp_(-1, 1)


def only_one_parameter(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Another in each step. A rank may hold none of it."""
    parameters = list(model.parameters())
    torch.optim.SGD([parameters[step % len(parameters)]], lr=0.01).step()


def where_some_elements_have_a_gradient(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    """As optimizers do that leave a parameter out by its local values, beside others that they step."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if (number + step + rank) % 2 and parameter.grad is not None:
                parameter.sub_(parameter.grad)


def fused(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    """It counts no version, so that nothing is known."""
    torch.optim.AdamW(model.parameters(), lr=0.01, fused=True).step()


def state(model: nn.Module, rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    full = fsdp.full_state_dict(model, rank0_only=False)
    fsdp.load_full_state_dict(model, full)
    with fsdp.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


RIGHT = (step_alike, all_skip, twice_on_one_rank, by_data, in_place, more_on_one_rank, only_one_parameter, fused, state)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS", "NO_SHARD"])
@pytest.mark.parametrize("update", [*RIGHT, where_some_elements_have_a_gradient])
@on_ranks(3)
def test_what_ranks_do_alike_or_may_do_apart_is_not_refused(rank: int, strategy: str, update: Callable[..., None]) -> None:
    model = shard(sharding_strategy=strategy)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for step in range(8):
        backward(model, rank)
        update(model, rank, step, optimizer)
        if step % 3 == 1:
            optimizer.zero_grad()


@on_ranks(3)
def test_two_optimizers_in_turns_are_not_refused(rank: int) -> None:
    model = shard()
    parameters = list(model.parameters())
    optimizers = [OPTIMIZERS["SGD"](parameters[:3]), OPTIMIZERS["AdamW"](parameters[3:])]
    for step in range(6):
        backward(model, rank)
        optimizers[step % 2].step()


@on_ranks(2)
def test_frozen_units_and_no_sync_are_not_refused(rank: int) -> None:
    model = shard()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for step in range(6):
        model.blocks[0].requires_grad_(step % 3 == 0)
        with fsdp.no_sync(model):
            backward(model, rank)
        backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_join_is_not_refused(rank: int) -> None:
    model = shard()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with fsdp.join(model, optimizer.step) as joined:
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            backward(model, rank)
            if step < 3:
                joined.step()
    optimizer.zero_grad()
    backward(model, rank)  # since the last backward no rank has stepped, also not the one without data


class Broken(Exception):
    pass


def fail(*args: Any) -> None:
    raise Broken


def fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(fail)


@pytest.mark.parametrize("failing", [fail, fail_in_backward])
@on_ranks(2)
def test_a_step_that_was_given_up_is_not_compared(rank: int, failing: Callable[..., None]) -> None:
    model = shard()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        if step == 2:
            handle = model.blocks[0].register_forward_hook(failing) if rank else None
            with pytest.raises(Broken if rank else fsdp.PeerFailed):
                backward(model, rank)
            if handle is not None:
                handle.remove()
        backward(model, rank)
        optimizer.step()


@on_ranks(2)
def test_only_parameters_of_several_ranks_are_compared_and_no_collective_is_added(rank: int) -> None:
    model = shard()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, rank)
        optimizer.step()
    here = current_rank()
    optimizer.zero_grad()
    before = len(here.log)
    backward(model, rank)
    assert [call.label for call in here.log[before:] if call.kind in ("all_reduce", "gather_objects")] == ["which gradients came"]
