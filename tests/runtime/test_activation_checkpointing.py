"""Activation checkpointing around, inside and across units, of every make: the gradients are the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fairscale.nn.checkpoint import checkpoint_wrapper as fairscale_wrapper
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as torch_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fsdp
from tests.support.models import Block, Net, assert_close, is_at_rest, join, local, loss_of, make_net, world_log
from tests.support.ranks import on_ranks

X = torch.linspace(-1, 1, 12).view(2, 6)
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
Run = Callable[[Net, Tensor], Tensor]


def plain_gradients(size: int, steps: int = 2) -> dict[str, Tensor | None]:
    net = make_net()
    for _ in range(steps):
        for rank in range(size):
            (loss_of(net(X * (rank + 1))) / size).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def check(shard: Callable[[Net], nn.Module], run: Callable[[Any, Tensor], Tensor] | None = None, size: int = 2) -> None:
    """Two steps, each rank with data of its own, against one process without checkpoints."""

    def fn(rank: int) -> list[Tensor | None]:
        model = shard(make_net())
        for _ in range(2):
            loss_of(run(model, X * (rank + 1)) if run else model(X * (rank + 1))).backward()
            assert is_at_rest(model)
        assert len(world_log("reduce_scatter")) % 2 == 0
        return [p.grad for p in model.parameters()]

    by_rank = fsdp.simulate(size, fn)
    wanted = plain_gradients(size)
    shapes = [p.shape for p in make_net().parameters()]
    joined = [join(parts, shape) for parts, shape in zip(zip(*by_rank, strict=True), shapes, strict=True)]
    assert_close(dict(zip(wanted, joined, strict=True)), wanted)


def through_blocks(net: Net, x: Tensor, blocks: Callable[[Net, Tensor], Tensor]) -> Tensor:
    """The forward of Net with its blocks run another way."""
    return net.leave(blocks(net, torch.tanh(net.enter(x)) * net.scale + net.shift))


class Checkpointed(Net):
    """Chooses in its forward how its blocks are checkpointed."""

    way: Callable[[Net, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return through_blocks(self, x, self.way)


def each(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def all_at_once(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    def run(x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x)
        return x

    return checkpoint(run, x, use_reentrant=reentrant)


def in_segments(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint_sequential(net.blocks, 2, x, use_reentrant=reentrant)


def nested(net: Net, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(partial(each, net, reentrant=reentrant), x, use_reentrant=reentrant)


# torch says so of a reentrant checkpoint inside another one
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@REENTRANT
@STRATEGIES
@pytest.mark.parametrize("way", [each, all_at_once, in_segments, nested], ids=lambda way: way.__name__)
def test_around_and_across_units(way: Callable[..., Tensor], reentrant: bool, strategy: str) -> None:
    def shard(net: Net) -> nn.Module:
        net.__class__ = Checkpointed
        net.way = partial(way, reentrant=reentrant)
        return fsdp.fully_shard(net, auto_wrap_policy={Block}, sharding_strategy=strategy)

    check(shard)


@REENTRANT
@STRATEGIES
@pytest.mark.parametrize("policy", [None, {Block}, {Block, nn.Linear}], ids=["one unit", "blocks", "layers in blocks"])
def test_inside_units(policy: Any, reentrant: bool, strategy: str) -> None:
    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def shard(net: Net) -> nn.Module:
        for block in net.blocks:
            block.__class__ = Inside
        return fsdp.fully_shard(net, auto_wrap_policy=policy, sharding_strategy=strategy)

    check(shard)


@REENTRANT
def test_around_the_root(reentrant: bool) -> None:
    shard = partial(fsdp.fully_shard, auto_wrap_policy={Block})
    check(shard, lambda model, x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant))


@pytest.mark.parametrize("order", ["checkpoint outside", "checkpoint inside"])
@pytest.mark.parametrize(
    "wrapper",
    [
        partial(torch_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        partial(torch_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        fairscale_wrapper,
    ],
    ids=["torch", "torch reentrant", "fairscale"],
)
@STRATEGIES
def test_wrappers_of_either_make(wrapper: Any, order: str, strategy: str) -> None:
    def shard(net: Net) -> nn.Module:
        unit = partial(fsdp.FullyShardedDataParallel, sharding_strategy=strategy)
        for number, block in enumerate(net.blocks):
            net.blocks[number] = wrapper(unit(block)) if order == "checkpoint outside" else unit(wrapper(block))
        return unit(net)

    check(shard, size=3)


def test_wrappers_put_on_after_sharding() -> None:
    def shard(net: Net) -> nn.Module:
        model = fsdp.fully_shard(net, auto_wrap_policy={Block})
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return model

    check(shard)


@REENTRANT
def test_under_no_sync_kept_gradients_add_up(reentrant: bool) -> None:
    def fn(rank: int) -> list[Tensor | None]:
        net = make_net()
        net.__class__ = Checkpointed
        net.way = partial(each, reentrant=reentrant)
        model = fsdp.fully_shard(net, auto_wrap_policy={Block})
        with fsdp.no_sync(model):
            loss_of(model(X * (rank + 1))).backward()
        loss_of(model(X * (rank + 1))).backward()
        return [p.grad for p in model.parameters()]

    by_rank, wanted = fsdp.simulate(2, fn), plain_gradients(2)
    shapes = [p.shape for p in make_net().parameters()]
    joined = [join(parts, shape) for parts, shape in zip(zip(*by_rank, strict=True), shapes, strict=True)]
    assert_close(dict(zip(wanted, joined, strict=True)), wanted)


@REENTRANT
@on_ranks(2)
def test_a_checkpoint_costs_one_more_gather_at_most(rank: int, reentrant: bool) -> None:
    """The replay gathers for the backward behind it as well."""
    net = make_net()
    net.__class__ = Checkpointed
    net.way = partial(each, reentrant=reentrant)
    model = fsdp.fully_shard(net, auto_wrap_policy={Block})
    for _ in range(2):
        before = len(world_log("all_gather"))
        loss_of(model(X)).backward()
        assert len(world_log("all_gather")) - before == 4 + 3


def test_what_a_recompute_reads_of_another_root_belongs_to_the_backward_around_the_checkpoint() -> None:
    """Its gradient comes in a graph task of the checkpoint's own, whose end is not the end of the backward."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            def part(x: Tensor) -> Tensor:
                return torch.tanh(nn.functional.linear(x, self.inner.weight))

            return checkpoint(part, part(x), use_reentrant=True)

    def run(model: nn.Module) -> tuple[Tensor, int]:
        calls: list[Tensor] = []
        weight = model.inner.weight
        weight.register_post_accumulate_grad_hook(calls.append)
        model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
        assert weight.grad is not None
        return local(weight.grad), len(calls)

    def one_rank(rank: int) -> tuple[Tensor, int]:
        model = Reads()
        fsdp.fully_shard(model.inner)
        return run(model)

    wanted, _ = run(Reads())
    found = fsdp.simulate(2, one_rank)
    assert [calls for _, calls in found] == [1, 1]
    torch.testing.assert_close(torch.cat([gradient for gradient, _ in found]), wanted)
