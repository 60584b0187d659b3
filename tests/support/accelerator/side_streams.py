"""Stories whose units compute on several streams, ordered by the program."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from tests.device.test_races import batch, sgd
from tests.support.models import Block, loss_of


def beside(streams: list[Any], number: int, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a module on stream `number` of a program, after what the current stream has so far, which then waits for it.

    What one stream allocates and another one reads is given to `record_stream`, as torch asks for.
    """
    if x.device.type == "cpu":
        return module(x)
    outer = torch.accelerator.current_stream(x.device.index)
    while len(streams) <= number:
        streams.append(torch.Stream(x.device))
    inner = streams[number]
    inner.wait_stream(outer)
    x.record_stream(inner)
    with torch.get_device_module(x.device).stream(inner):
        y = module(x)
    outer.wait_stream(inner)
    y.record_stream(outer)
    return y


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
        left, right = beside(self.streams, 0, self.left, x), beside(self.streams, 1, self.right, x)
        return self.leave(left * right)


class Shared(Towers):
    """Both branches use the same units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        left = beside(self.streams, 0, self.left, x)
        right = beside(self.streams, 1, lambda x: self.left(self.right(x)), x)
        return self.leave(left * right)


class Same(Towers):
    """Both branches are the same units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.right(self.enter(x))
        return self.leave(beside(self.streams, 0, self.left, x) * beside(self.streams, 1, self.left, x))


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

    def train(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step in range(3):
        beside(streams, step, train, batch(step))


class Inside(Block):
    """A unit that computes a part of its forward on a stream of its own."""

    def __init__(self) -> None:
        super().__init__(8)
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return beside(self.streams, 0, lambda x: self.down(torch.tanh(self.up(x))), x) + super().forward(x)


def inside(**options: Any) -> None:
    """Units whose forwards use a stream of their own."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), Inside(), Inside(), nn.Linear(8, 2))
    model = fsdp.fully_shard(net, auto_wrap_policy={Inside}, **options)
    optimizer = sgd(model)
    for step in range(3):
        loss_of(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def split(accumulates: bool = False, **options: Any) -> None:
    """Forwards on another stream than backwards. Then the program takes memory on the stream of the forward.

    `accumulates`: the first two backwards of a step do not reduce.
    """
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = fsdp.fully_shard(net, auto_wrap_policy={nn.Linear}, **options)
    optimizer, streams = sgd(model), list[Any]()
    for step in range(3):
        for part in range(2 * accumulates + 1):
            with fsdp.no_sync(model) if part < 2 * accumulates else nullcontext():
                beside(streams, 0, lambda x: loss_of(model(x)), batch(step + part)).backward()
            take_memory(streams)
        optimizer.step()
        optimizer.zero_grad()


def take_memory(streams: list[Any]) -> None:
    """Write to memory that was released to these streams, which wait for nothing."""
    for stream in streams:
        with torch.get_device_module(stream.device).stream(stream):
            for power in range(4, 13):
                _ = [torch.full((2**power,), 7.0, device=stream.device) for _ in range(12)]


STORIES: Final[dict[str, Callable[..., None]]] = {
    "branches on streams of their own": partial(trained, Towers),
    "branches that share units": partial(trained, Shared),
    "branches that are the same units": partial(trained, Same),
    "steps on streams of their own": partial(moved, Towers),
    "steps that share units": partial(moved, Shared),
    "a stream inside units": inside,
    "forwards on a stream of their own": split,
    "forwards on a stream of their own, accumulated": partial(split, accumulates=True),
}
"""By name."""
