"""Gradients kept under no_sync: they add up, they die with zero_grad, and nothing else touches them."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import (
    Block,
    X,
    assert_close,
    gradients_of,
    is_at_rest,
    join_all,
    local,
    loss_of,
    make_net,
    two_units,
    units_of,
    world_log,
)
from tests.support.ranks import on_ranks

Program = Callable[[nn.Module, int], None]


def gradients(size: int, program: Program, **options: Any) -> dict[str, Tensor | None]:
    """What is in `.grad` after a program, joined over the ranks."""

    def fn(rank: int) -> dict[str, Tensor | None]:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **options)
        program(model, rank)
        assert is_at_rest(model)
        return {name: p.grad for name, p in model.named_parameters()}

    return join_all(fsdp.simulate(size, fn), dict(make_net().named_parameters()))


def wanted(size: int, *factors: float) -> dict[str, Tensor | None]:
    """One process: the sum over `factors` of the mean over the ranks."""
    net = make_net()
    for factor in factors:
        for rank in range(size):
            (loss_of(net(X * (factor + rank))) / size).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def backward(model: nn.Module, rank: int, factor: float, *, kept: bool = False) -> None:
    with fsdp.no_sync(model) if kept else nullcontext():
        loss_of(model(X * (factor + rank))).backward()


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "around the context, which restores it"])
def test_the_switch_does_what_the_context_does(inside: bool) -> None:
    def program(model: nn.Module, rank: int) -> None:
        fsdp.set_requires_gradient_sync(model, False)
        backward(model, rank, 1, kept=inside)
        backward(model, rank, 2)
        assert not world_log("reduce_scatter")
        fsdp.set_requires_gradient_sync(model, True)
        backward(model, rank, 3)

    assert_close(gradients(2, program), wanted(2, 1, 2, 3))


@on_ranks(2)
def test_the_method_of_the_wrapper_is_the_function(rank: int) -> None:
    model = fsdp.FullyShardedDataParallel(make_net())
    with model.no_sync():
        loss_of(model(X)).backward()
    assert not world_log("reduce_scatter")
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    loss_of(model(X)).backward()
    assert len(world_log("reduce_scatter")) == 1


class Stop(Exception):
    """Raised by a test inside a backward."""


def failing_backward(model: nn.Module, rank: int, where: int) -> None:
    def stop(gradient: Tensor) -> None:
        raise Stop

    handle = model.blocks[where].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
    try:
        with pytest.raises(Stop):
            backward(model, rank, 9)
    finally:
        handle.remove()
    assert is_at_rest(model)


@pytest.mark.parametrize("kept", [False, True])
def test_a_failed_backward_leaves_no_trace_in_the_gradients(kept: bool) -> None:
    def program(model: nn.Module, rank: int) -> None:
        backward(model, rank, 1)
        before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        with fsdp.no_sync(model) if kept else nullcontext():
            failing_backward(model, rank, 1)
        assert_close({name: p.grad for name, p in model.named_parameters()}, before, within=0)
        backward(model, rank, 3)

    assert_close(gradients(2, program), wanted(2, 1, 3))


@on_ranks(2)
def test_editing_kept_gradients_is_refused_where_they_would_be_used(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    backward(model, rank, 1, kept=True)
    for p in model.parameters():
        if p.grad is not None:
            with pytest.raises(fsdp.ShardingError, match="is kept under no_sync: it is not reduced"):
                p.grad.mul_(0.5)
            local(p.grad).mul_(0.5)  # past the shard, as an ordinary gradient is edited
    with pytest.raises(fsdp.ShardingError, match="was edited while gradients are kept under no_sync; scale or clip after"):
        backward(model, rank, 2)
    assert is_at_rest(model)
    model.zero_grad()
    backward(model, rank, 3)


@on_ranks(2)
def test_no_sync_keeps_memory_for_unsharded_gradients_and_releases_it(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    backward(model, rank, 1, kept=True)
    assert all(len(bucket.accumulated) == len(bucket.views) for bucket in _buckets(model))
    backward(model, rank, 1)
    assert not any(bucket.accumulated for bucket in _buckets(model))
    backward(model, rank, 1, kept=True)
    model.zero_grad()
    backward(model, rank, 1)
    assert not any(bucket.accumulated for bucket in _buckets(model))


def _buckets(model: nn.Module) -> list[Any]:

    sharded = unit_ref_of(model)
    assert len(units_of(model)) == 4
    return list(sharded.engine.reducer.buckets)


def test_what_no_sync_kept_is_reduced_though_it_was_frozen_since() -> None:
    def one_rank(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Linear(1, 8))
        model(torch.ones(1, 1)).sum().backward()
        with fsdp.no_sync(model):
            model(torch.ones(1, 1)).sum().backward()
        model.weight.requires_grad_(False)
        model(torch.ones(1, 1)).sum().backward()
        return torch.empty(0) if model.weight.grad is None else local(model.weight.grad).flatten()

    assert torch.cat(simulate(2, one_rank)).tolist() == [2.0] * 8


def test_writing_weights_drops_nothing_that_no_sync_kept() -> None:
    """A rank without elements of a parameter keeps its part of the gradient of others."""

    def one_rank(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Linear(1, 1, bias=False))  # the other rank holds nothing
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            with fsdp.no_sync(model):
                model(torch.ones(1, 1)).sum().backward()
            with fsdp.summon_full_params(model, writeback=True), torch.no_grad():
                model.weight.fill_(1)
            model(torch.ones(1, 1)).sum().backward()
        return local(model.weight.grad).flatten()

    assert torch.cat(simulate(2, one_rank)).tolist() == [2.0]


@on_ranks(2)
def test_gradients_kept_under_no_sync_are_in_the_books(rank: int) -> None:
    model = two_units()
    before = fsdp.memory_bytes(model)
    with fsdp.no_sync(model):
        model(torch.ones(1, 3)).sum().backward()
    assert fsdp.memory_bytes(model) == before + 2 * (9 + 3) * 4
    model(torch.ones(1, 3)).sum().backward()
    assert fsdp.memory_bytes(model) == before


WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


@WORLDS
def test_an_outer_root_can_be_made_when_nothing_is_kept_under_no_sync_any_more(world_size: int) -> None:
    """What was kept was lost with the inner root; that it is refused is told in tests/patterns."""

    def train(inner: nn.Module, outer: Callable[[], nn.Module]) -> None:
        inner(torch.ones(1, 4)).sum().backward()
        outer()(torch.ones(1, 4)).square().sum().backward()

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Linear(4, 4), nn.Linear(4, 4)

    plain = nn.Sequential(*make())
    plain[0](torch.ones(1, 4)).sum().backward()
    train(plain[0], lambda: plain)

    def one_rank(rank: int) -> dict[str, Tensor | None]:
        inner, last = make()
        fsdp.fully_shard(inner)
        model = nn.Sequential(inner, last)
        with fsdp.no_sync(inner):
            inner(torch.ones(1, 4)).sum().backward()
        if world_size > 1:  # one rank keeps nothing
            with pytest.raises(fsdp.ShardingError, match="fully_shard: unit 'Linear' keeps gradients under no_sync"):
                fsdp.fully_shard(model)
        train(inner, lambda: fsdp.fully_shard(model))
        assert is_at_rest(model)
        return gradients_of(model)

    found = simulate(world_size, one_rank)
    assert_close(join_all(found, dict(plain.named_parameters())), gradients_of(plain))


@on_ranks(3)
def test_a_kept_gradient_that_one_rank_holds_alone_is_not_scaled_through_data(rank: int) -> None:
    """The other ranks have gradients of the parameter as well, which such a change would not reach."""
    model = fsdp.fully_shard(nn.Linear(4, 4), plain_shards=True)
    with fsdp.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    gradient = model.bias.grad
    if rank == 2:
        assert gradient is not None and gradient.shape == (4,)
        with pytest.raises(fsdp.ShardingError, match=r"`\.data` of a gradient that is kept under no_sync"):
            gradient.data.mul_(0.5)
    model(torch.ones(1, 4)).sum().backward()
    if rank == 2:
        assert torch.equal(gradients_of(model)["bias"], torch.full((4,), 2.0))


ON_ONE_RANK = pytest.mark.parametrize(
    "options",
    [
        *({}, {"dtensors": True}, {"sharding_strategy": "NO_SHARD"}),
        {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    ],
    ids=str,
)


@ON_ONE_RANK
@on_ranks(1)
def test_one_rank_shows_all_gradients_under_no_sync_and_they_may_be_changed(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4), **options)
    losses = [model(torch.ones(1, 4)).sum() for _ in range(3)]
    with fsdp.no_sync(model), torch.no_grad():
        for count, loss in enumerate(losses[:2], 1):
            loss.backward()
            assert torch.equal(fsdp.to_local(model.bias.grad).view(-1), torch.full((4,), float(count)))
        model.bias.grad.mul_(0.5)
    losses[2].backward()
    assert torch.equal(gradients_of(model)["bias"].view(-1), torch.full((4,), 2.0))


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"dtensors": True}, {"plain_shards": True}, {"sharding_strategy": "NO_SHARD"}),
        {"sharding_strategy": "NO_SHARD", "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ],
    ids=str,
)
@on_ranks(2)
def test_each_rank_shows_its_part_of_all_micro_batches_under_no_sync(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4), **options)
    with fsdp.no_sync(model):
        for count in range(1, 4):
            model(torch.ones(1, 4)).sum().backward()
            part = local(model.weight.grad)
            assert part.numel() and torch.equal(part, torch.full_like(part, float(count)))
    # `.grad` may be zeroed as after the first one
    model.zero_grad(set_to_none=False)
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(local(model.weight.grad), torch.ones_like(part))


@on_ranks(2)
def test_each_rank_shows_its_sparse_gradient_of_all_micro_batches_under_no_sync(rank: int) -> None:
    model = fsdp.fully_shard(nn.Embedding(3, 2, sparse=True), sharding_strategy="NO_SHARD")
    with fsdp.no_sync(model):
        for count in range(1, 4):
            model(torch.tensor([0, 2])).sum().backward()
            assert torch.equal(model.weight.grad.to_dense()[:, 0], torch.tensor([1.0, 0.0, 1.0]) * count)


@ON_ONE_RANK
@on_ranks(1)
def test_one_rank_adds_to_a_gradient_from_before_under_no_sync(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4), **options)
    losses = [model(torch.ones(1, 4)).sum() for _ in range(2)]
    losses[0].backward()
    with fsdp.no_sync(model):
        losses[1].backward()
    assert torch.equal(fsdp.to_local(model.bias.grad).view(-1), torch.full((4,), 2.0))


@pytest.mark.parametrize("options", [{"dtensors": True}, {"plain_shards": True}], ids=str)
@on_ranks(2)
def test_no_copy_is_made_of_a_gradient_that_is_kept(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4), **options)
    with fsdp.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(fsdp.ShardingError, match=r"copy\.deepcopy of a gradient that is kept under no_sync"):
        copy.deepcopy(model.weight.grad)
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(copy.deepcopy(fsdp.to_local(model.weight.grad)), torch.full_like(fsdp.to_local(model.weight.grad), 2.0))
