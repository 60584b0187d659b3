"""plain_shards=True: shards are ordinary parameters, and what the engine does with them is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.shards.shard_tensor import ShardTensor
from tests.support.models import Block, Net
from tests.support.ranks import on_ranks

RANKS = 3


def trained(plain: bool, then: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Any]:
    """What `then` returns on each rank after two steps."""

    def one_rank(rank: int) -> Any:
        torch.manual_seed(0)
        model = fsdp.fully_shard(Net(2, 8), auto_wrap_policy={Block}, plain_shards=plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 6), rank + step + 1.0)).square().sum().backward()
            optimizer.step()
        return then(model, optimizer)

    return fsdp.simulate(RANKS, one_rank)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_parameters_gradients_and_optimizer_state_are_ordinary_tensors_of_the_parts() -> None:
    def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        held = 0
        for parameter in model.parameters():
            assert type(parameter) is nn.Parameter
            assert parameter.numel() == fsdp.to_local(parameter).numel()
            assert len(parameter.detach().view(-1).tolist()) == parameter.numel()
            # as without shards that know what they are, an optimizer does not see a part without elements
            assert (parameter.grad is None) == (parameter.numel() == 0)
            kept = [parameter.grad, *optimizer.state[parameter].values()] if parameter.grad is not None else []
            assert not any(isinstance(one, ShardTensor) for one in kept)
            held += parameter.numel()
        return held

    counts = trained(True, check)
    assert sum(counts) == sum(p.numel() for p in Net(2, 8).parameters())
    assert all(count < sum(counts) for count in counts)


@pytest.mark.parametrize("get", ["model", "optimizer", "norm", "summoned", "full"])
def test_the_engine_computes_the_same_with_either_kind_of_shard(get: str) -> None:
    def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        if get == "model":
            return fsdp.full_state_dict(model, rank0_only=False)
        if get == "optimizer":
            return fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        if get == "norm":
            return fsdp.clip_grad_norm_(model, 0.1)
        if get == "full":
            return [fsdp.full_tensor(parameter).detach() for parameter in model.parameters()]
        before = [parameter.grad for parameter in model.parameters()]
        with fsdp.summon_full_params(model, writeback=True):
            found = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data.mul_(2)
        assert all(one is other.grad for one, other in zip(before, model.parameters(), strict=True))
        return found, fsdp.full_state_dict(model, rank0_only=False)

    same(trained(True, values), trained(False, values))


def test_a_checkpoint_of_one_kind_is_loaded_into_the_other(tmp_path: Path) -> None:
    def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        fsdp.save(tmp_path / "saved", model, optimizer)
        return fsdp.full_state_dict(model, rank0_only=False)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for parameter in model.parameters():
            parameter.data.zero_()
        fsdp.load(tmp_path / "saved", model, optimizer)
        return fsdp.full_state_dict(model, rank0_only=False)

    saved = trained(True, save)
    same(trained(False, load), saved)
    same(trained(True, load), saved)


@on_ranks(2)
def test_a_hook_gets_the_part_of_a_gradient(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4, bias=False), plain_shards=True)
    seen: list[tuple[type, torch.Size]] = []

    def hook(gradient: Tensor) -> None:
        seen.append((type(gradient), gradient.shape))

    model.weight.register_hook(hook)
    model(torch.ones(1, 4)).sum().backward()
    assert seen == [(Tensor, torch.Size([2, 4]))]


@on_ranks(2)
def test_a_unit_with_plain_shards_stands_inside_one_without(rank: int) -> None:
    inner = fsdp.fully_shard(nn.Linear(4, 4), plain_shards=True)
    model = fsdp.fully_shard(nn.Sequential(inner, nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()
    fsdp.clip_grad_norm_(model, 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert [isinstance(parameter, ShardTensor) for parameter in model.parameters()] == [False, False, True, True]
