"""The training stories of tests/device/test_races.py on the pretend accelerator, beside the same ones on the host."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.shards.shard_tensor import ShardTensor
from tests.device import test_races as races
from tests.runtime.uneven import test_races as races_of_paths
from tests.support.accelerator import door_stories, side_streams
from tests.support.accelerator.device import NAME, Scheduler
from tests.support.accelerator.world import run
from tests.support.models import Block, Net, loss_of, promised

Weights = list[dict[str, Tensor]]
"""The full weights of each rank after a story, on the host."""
Story = Callable[..., "dict[str, Tensor] | None"]
"""It may return what it has read."""


def scaled(of_torch: bool = False, **options: Any) -> None:
    """A scaler that skips the second step, because one rank has an infinite gradient. `of_torch`: it is torch's own."""
    model, rank, device = races.net(**options), current_rank(), torch.empty(0).device.type
    assert rank is not None
    optimizer = races.sgd(model)
    scaler = torch.amp.GradScaler(device, init_scale=8.0) if of_torch else fsdp.ShardedGradScaler(model, init_scale=8.0)
    for step in range(3):
        factor = float("inf") if step == 1 and rank.rank == rank.size - 1 else 1.0
        scaler.scale(loss_of(model(races.batch(step))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def failing_on_own_stream(**options: Any) -> None:
    """A backward that fails, in a program that computes on a stream of its own, while autograd cleans up on another one."""
    device = torch.empty(0).device
    if device.type == "cpu":
        races.failing(**options)
        return
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    with module.stream(stream):
        races.failing(**options)
    module.current_stream(device).wait_stream(stream)


def partly_used(**options: Any) -> None:
    """Each rank but the first one leaves out a layer. The first one has all gradients, and does not read which ones came."""

    class LeavesOut(Block):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.norm(x) if rank_here() == 0 else x
            return x + self.down(torch.tanh(self.up(inner)))

    torch.manual_seed(3)
    net = Net(races.BLOCKS)
    net.blocks[0] = LeavesOut(8)
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, **options)
    races.train(model)


def normed(**options: Any) -> None:
    """Weights change by their own norms, and by what is computed from them and gathered. Every rank reads what all ranks have."""
    model = races.net(**options)
    with torch.no_grad():
        for _ in range(2):
            for parameter in model.parameters():
                local = fsdp.to_local(parameter)
                local.add_(parameter.norm().to(local.device), alpha=0.01)
                if isinstance(parameter, ShardTensor):  # under NO_SHARD every rank has all of it
                    local.add_(fsdp.full_tensor(parameter * 0.5).mean().to(local.device), alpha=0.01)


def different_paths(**options: Any) -> None:
    """With `uneven_paths=True` each rank uses other units, and some run out of data."""
    races_of_paths.different_paths(rank_here(), **options)
    races_of_paths.without_data(rank_here(), **options)


def evaluated_alone(**options: Any) -> None:
    """The last rank evaluates, and the others serve their shards. Then weights change, also by what it has found."""
    model, rank = races_of_paths.make(uneven_paths=True, **options), current_rank()
    assert rank is not None
    with torch.no_grad():
        for step in range(3):
            y = torch.zeros(())
            if rank.rank == rank.size - 1:
                y = model(races_of_paths.batch(step, 0, 0), races_of_paths.ALL)
            fsdp.meet(model)
            for parameter in model.parameters():
                fsdp.to_local(parameter).mul_(0.75)
            races.fold(model, y)


def remembering(**options: Any) -> None:
    """A comm hook that remembers what it has seen, also in a backward that fails. Weights change by that in the end."""
    model, seen = races.net(**options), []

    def hook(state: None, bucket: Any) -> "torch.futures.Future[Tensor]":
        seen.append(bucket.buffer().sum())
        return promised(races.reduced_part(bucket, options) * 1.0)

    fsdp.register_comm_hook(model, None, hook)
    races.train(model, fails=True)
    with torch.no_grad():
        for parameter in model.parameters():
            local = fsdp.to_local(parameter)
            local.add_(torch.stack(seen).sum().to(local.device), alpha=0.01)


def hooked_elsewhere(**options: Any) -> None:
    """A comm hook that computes on a stream of its own. Its future knows that."""
    model, device = races.net(**options), torch.empty(0).device
    module = None if device.type == "cpu" else torch.get_device_module(device)
    stream = None if module is None else module.Stream(device)

    def hook(state: None, bucket: Any) -> "torch.futures.Future[Tensor]":
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=None if module is None else [device])
        if stream is not None and module is not None:
            stream.wait_stream(module.current_stream(device))
        with nullcontext() if module is None else module.stream(stream):
            future.set_result(races.reduced_part(bucket, options) * 1.0)
        return future

    fsdp.register_comm_hook(model, None, hook)
    races.train(model)


def joined(**options: Any) -> None:
    """Ranks with different numbers of batches. Under NO_SHARD those that have finished take over what the last one has."""
    model = races.net(**options)
    optimizer = races.sgd(model)
    alone = options.get("sharding_strategy") == "NO_SHARD"
    with fsdp.join(model, None if alone else optimizer.step) as joined:
        for step in range(1 + rank_here()):
            loss_of(model(races.batch(step))).backward()
            optimizer.step() if alone else joined.step()
            optimizer.zero_grad()


def rank_here() -> int:
    """The number of the rank that this thread runs."""
    rank = current_rank()
    return rank.rank


STORIES: Final[dict[str, Story]] = {
    **races.STORIES,
    **door_stories.STORIES,
    **side_streams.STORIES,
    "a scaler that skips a step": scaled,
    "torch's scaler": partial(scaled, of_torch=True),
    "a failing backward on a stream of one's own": failing_on_own_stream,
    "a layer left out": partly_used,
    "norms of weights": normed,
    "different paths": different_paths,
    "an evaluation on one rank": evaluated_alone,
    "uneven inputs": joined,
    "a hook that remembers": remembering,
    "a hook on a stream of its own": hooked_elsewhere,
}
"""By name."""


def on_host(story: Story, size: int, seed: int = 0, **options: Any) -> Weights:
    """The weights after a story on simulated ranks on the host."""
    return fsdp.simulate(size, lambda rank: _weights_after(story, options), seed)


def on_accelerator(story: Story, size: int, scheduler: Scheduler, seed: int = 0, **options: Any) -> Weights:
    """The weights after a story on simulated ranks on the pretend accelerator."""

    def on_device(rank: int) -> dict[str, Tensor]:
        with torch.device(NAME, rank):
            return _weights_after(story, options)

    return run(size, on_device, scheduler, seed)


def first_difference(found: Weights, wanted: Weights) -> str | None:
    """The first weight whose bits differ; None if there is none. NaN is no number of a story."""
    for rank, (here, there) in enumerate(zip(found, wanted, strict=True)):
        assert here.keys() == there.keys() and here, "a story made no model, or another one"
        for name, value in here.items():
            if not torch.equal(value, there[name]):
                return f"{name} of rank {rank}"
    return None


def _weights_after(story: Story, options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of all models that a story makes, and what it has read."""
    rank = current_rank()
    made = _made[rank.rank] = []
    try:
        read = story(**options) or {}
    finally:
        del _made[rank.rank]
    found = {name: value.cpu().clone() for name, value in read.items()}
    return found | {
        f"{number}.{name}": value.cpu().clone()
        for number, model in enumerate(made)
        for name, value in fsdp.full_state_dict(model, rank0_only=False).items()
    }


_made: dict[int, list[nn.Module]] = {}
"""For each rank, the models of the story that runs."""
_fully_shard = fsdp.fully_shard


@wraps(_fully_shard)
def _recorded(*args: Any, **kwargs: Any) -> Any:
    model = _fully_shard(*args, **kwargs)
    rank = current_rank()
    if rank is not None and rank.rank in _made:
        _made[rank.rank].append(model)
    return model


fsdp.fully_shard = _recorded  # for the whole process, which runs nothing else
