"""Steps of several forwards that fail, or are left out, where no hook hears it; on every rank of a real group, each on a group
of its own. What they return is how often a step was told of a peer, by rank, and the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from tests.support.models import Block, Net, X, weights_of

Found = tuple[int, dict[str, Tensor]]


class Mine(Exception):
    """What the user's code raises."""


class FailsOnce(torch.autograd.Function):
    """Lets a tensor pass, and the gradient unless it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if FailsOnce.armed:
            FailsOnce.armed = False
            raise Mine("in a node")
        return gradient


@contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


def wrapped(group: dist.ProcessGroup, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp.FullyShardedDataParallel(Net(2), auto_wrap_policy={Block}, process_group=group, **options)


def steps(part: Callable[[int, int], None], update: Callable[[], None]) -> int:
    """Three steps, each tried until it is through; how often this rank was told of a peer."""
    told = 0
    for step in range(3):
        for attempt in range(4):
            try:
                part(step, attempt)
                break
            except Mine:
                pass
            except fsdp.PeerFailed:
                told += 1
        else:
            raise AssertionError(f"step {step} was tried four times")
        update()
    return told


def two_losses(rank: int) -> Found:
    """The first of two losses fails once, on rank 1; the caller holds nothing of it."""
    with own_group() as group:
        model = wrapped(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def part(step: int, attempt: int) -> None:
            one = model(X).square().mean()
            if rank == 1 and step == 1 and attempt == 0:
                raise Mine("in a loss")
            (one + model(X + 1).square().mean()).backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return steps(part, update), weights_of(model)


def two_models(rank: int) -> Found:
    """One behind the other on one group, of which the backward fails between them, once, on rank 0."""
    with own_group() as group:
        behind, before = wrapped(group), wrapped(group)
        into = nn.Linear(2, 6)
        optimizer = torch.optim.SGD([*behind.parameters(), *before.parameters()], lr=0.1)

        def part(step: int, attempt: int) -> None:
            FailsOnce.armed = rank == 0 and step == 1 and attempt == 0
            optimizer.zero_grad()
            before(X).square().mean().backward()
            with torch.no_grad():
                into.weight.fill_(0.1)
            before(FailsOnce.apply(into(behind(X)))).square().mean().backward()  # type: ignore[no-untyped-call]

        return steps(part, optimizer.step), {**weights_of(behind), **{f"d.{k}": v for k, v in weights_of(before).items()}}


def joined(rank: int) -> Found:
    """Two forwards a step, and rank 1 has no data at all."""
    with own_group() as group:
        model = wrapped(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdp.join(model, optimizer.step, inputs=(X,)) as uneven:
            for _ in range(3 if rank == 0 else 0):
                (model(X).square().mean() + model(X + 1).square().mean()).backward()
                uneven.step()
                optimizer.zero_grad()
        return 0, weights_of(model)


def left_out(rank: int) -> Found:
    """A backward under `no_sync` that would communicate nothing is left out on rank 1."""
    with own_group() as group:
        model = wrapped(group, sharding_strategy="SHARD_GRAD_OP")
        for step in range(2):
            with fsdp.no_sync(model):
                for micro in range(3):
                    loss = model(X).square().mean()
                    if not (step == micro == rank == 1):
                        loss.backward()
            model(X).square().mean().backward()
        return 0, weights_of(model)


UNHEARD: Final[dict[str, Callable[[int], Found]]] = {
    "two losses, of which one fails": two_losses,
    "two models, between which a backward fails": two_models,
    "two forwards a step, joined": joined,
    "a backward that needs nobody left out": left_out,
}
