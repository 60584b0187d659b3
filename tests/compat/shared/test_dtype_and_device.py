"""Another dtype after wrapping: values, gradients and what was set on the model stay. Training: ../fsdp1/test_instance.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.compat.shared.dtype_and_device import changes, convert
from fsdp.runtime.registry import unit_ref_of
from fsdp.shards.shard_tensor import plain
from tests.support.models import Block
from tests.support.ranks import on_ranks


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), Block(5), nn.Linear(5, 2))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def converted(model: nn.Module, fn: Callable[[Tensor], Tensor] = to_double) -> None:
    ref = unit_ref_of(model)
    convert(ref.engine, fn, [index for index, unit in enumerate(ref.engine.units) if changes(unit, fn)])


@on_ranks(2)
def test_values_and_gradients_survive_a_smaller_dtype_and_back(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    model(batch(rank, 0)).square().mean().backward()
    weights = fsdp.full_state_dict(model, rank0_only=False)
    grads = [None if p.grad is None else plain(p.grad).clone() for p in model.parameters()]
    converted(model, lambda tensor: tensor.half())
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float16}
    for key, value in fsdp.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, weights[key].half())
    converted(model, lambda tensor: tensor.float())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        if p.grad is not None and grad is not None:
            assert torch.equal(plain(p.grad), grad.half().float())
    model(batch(rank, 1)).sum().backward()


@on_ranks(2)
def test_one_unit_alone_and_what_was_set_on_the_model(rank: int) -> None:
    called: list[str] = []
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    model[1].register_forward_hook(lambda *_: called.append("forward"))
    next(model[1].parameters()).register_post_accumulate_grad_hook(lambda p: called.append("gradient"))
    fsdp.set_requires_gradient_sync(model, False)
    ref = unit_ref_of(model)
    inner = unit_ref_of(model[1])
    convert(ref.engine, to_double, [inner.index])
    assert [p.dtype for p in model.parameters()].count(torch.float64) == len([*model[1].parameters()])
    again = unit_ref_of(model)
    assert again is not None and again.engine is not ref.engine
    assert not again.engine.synchronises
    fsdp.set_requires_gradient_sync(model, True)
    model[1](torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    assert called == ["forward", "gradient"]


@on_ranks(2)
def test_it_is_refused_where_something_would_be_lost(rank: int) -> None:
    model = fsdp.fully_shard(make_net())
    before = [p.dtype for p in model.parameters()]
    with fsdp.no_sync(model):
        model(batch(rank, 0)).sum().backward()
    with pytest.raises(fsdp.ShardingError, match="to: unit 'Sequential' keeps gradients under no_sync"):
        converted(model)
    model(batch(rank, 0)).sum().backward()
    with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match="to: call it outside any forward"):
        converted(model)
    assert [p.dtype for p in model.parameters()] == before
    loss = model(batch(rank, 0)).sum()
    converted(model)
    with pytest.raises(fsdp.ShardingError, match="were changed in place between its forward and its backward"):
        loss.backward()


@on_ranks(2)
def test_a_trace_does_not_end_in_silence(rank: int) -> None:
    model = fsdp.fully_shard(make_net())
    with fsdp.trace(model), pytest.raises(fsdp.ShardingError, match="to: unit 'Sequential' is traced"):
        converted(model)
    converted(model)
