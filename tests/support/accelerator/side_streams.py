"""Stories whose units compute on several streams, ordered by the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from tests.device.test_races import batch, sgd
from tests.support.models import Block, loss_of


@contextmanager
def beside(streams: list[Any], number: int) -> Iterator[None]:
    """On stream `number` of a program, after what the current one has so far. The current one waits for it at the end."""
    device = torch.empty(0).device
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    while len(streams) <= number:
        streams.append(module.Stream(device))
    outer, inner = module.current_stream(device), streams[number]
    inner.wait_stream(outer)
    with module.stream(inner):
        yield
    outer.wait_stream(inner)


class Towers(nn.Module):
    """Two branches, each of them on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 2)
        self.left = nn.Sequential(Block(8), Block(8))
        self.right = nn.Sequential(Block(8), Block(8))
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        with beside(self.streams, 0):
            left = self.left(x)
        with beside(self.streams, 1):
            right = self.right(x)
        return self.leave(left * right)


class Shared(Towers):
    """Both branches use the same units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        with beside(self.streams, 0):
            left = self.left(x)
        with beside(self.streams, 1):
            right = self.left(self.right(x))
        return self.leave(left * right)


def trained(towers: type[Towers], **options: Any) -> None:
    """Three steps. The first and the last accumulate two backwards."""
    torch.manual_seed(3)
    model = fsdp.fully_shard(towers(), auto_wrap_policy={Block}, **options)
    optimizer = sgd(model)
    for step in range(3):
        for part in range(2 - step % 2):
            loss_of(model(batch(step + part))).backward()
        optimizer.step()
        optimizer.zero_grad()


def moved(towers: type[Towers], **options: Any) -> None:
    """Each step on another stream, while an output of an earlier forward is kept, and with it a part of the graph."""
    torch.manual_seed(3)
    model = fsdp.fully_shard(towers(), auto_wrap_policy={Block}, **options)
    optimizer, streams, kept = sgd(model), list[Any](), list[Tensor]()
    model.right[0].register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[union-attr, index, operator]
    for step in range(3):
        with beside(streams, step):
            loss_of(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()


STORIES: Final[dict[str, Callable[..., None]]] = {
    "branches on streams of their own": partial(trained, Towers),
    "branches that share units": partial(trained, Shared),
    "steps on streams of their own": partial(moved, Towers),
    "steps that share units": partial(moved, Shared),
}
"""By name."""
