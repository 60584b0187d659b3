"""Another dtype after wrapping: it trains as a plain model that was converted, and what was set on the model stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.compat.shared.dtype_and_device import changes, convert
from fsdp.runtime.registry import unit_ref_of
from fsdp.shards.shard_tensor import plain
from tests.support.models import Block
from tests.support.ranks import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"sharding_strategy": "NO_SHARD"},
    "plain shards": {"plain_shards": True},
    "mixed precision": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for one in batches:
        optimizer.zero_grad()
        model(one).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(3)
def test_it_trains_like_a_plain_model_that_was_converted(rank: int, name: str) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **OPTIONS[name])
    objects = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, [batch(rank, 0)])
    converted(model)
    assert all(one is other and one.dtype is torch.float64 for one, other in zip(objects, model.parameters(), strict=True))
    for kept in optimizer.state.values():
        kept["momentum_buffer"] = kept["momentum_buffer"].double()
    train(model, optimizer, [batch(rank, step).double() for step in (1, 2)])
    found = fsdp.full_state_dict(model, rank0_only=False)

    plain = make_net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, plain_optimizer, [torch.cat([batch(one, 0) for one in range(3)])])
    plain.double()
    for kept in plain_optimizer.state.values():
        kept["momentum_buffer"] = kept["momentum_buffer"].double()
    train(plain, plain_optimizer, [torch.cat([batch(one, step) for one in range(3)]).double() for step in (1, 2)])
    tolerance = 2e-2 if name == "mixed precision" else 1e-6
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


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
