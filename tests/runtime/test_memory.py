"""What a rank holds, to the byte: derived from the layout, and measured from outside at the allocator."""

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
from tests.support.floors import BLOCKS, all_sizes, expected_peak, floor, make, root_and_block, shards_of
from tests.support.models import Block, is_at_rest, loss_of
from tests.support.ranks import on_ranks

X = torch.linspace(-1, 1, 6).view(1, 6)


def step(model: nn.Module) -> None:
    loss_of(model(X)).backward()
    model.zero_grad()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("world_size", "width"), [(1, 8), (2, 16), (4, 64), (8, 64)])
def test_the_peak_is_what_the_layout_says(world_size: int, width: int, prefetch: int) -> None:
    def fn(rank: int) -> int:
        model = fsdp.fully_shard(make(width), auto_wrap_policy={Block}, prefetch=prefetch)
        for _ in range(3):
            step(model)
        return fsdp.memory_bytes(model, peak=True)

    assert fsdp.simulate(world_size, fn) == [expected_peak(world_size, width, prefetch)] * world_size
    assert expected_peak(world_size, width, prefetch) <= 1.05 * floor(world_size, width, prefetch)


class Measured(NamedTuple):
    """Bytes the allocator gave out and has not got back."""

    peak: int
    rest: int


def measure(work: Callable[[], Any]) -> Measured:
    """What this thread allocates during `work`."""
    gc.collect()
    gc.disable()
    try:
        with profile(profile_memory=True, use_cpu=True) as profiler:
            work()
    finally:
        gc.enable()
    events = [(e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(accumulate(count for _, count in sorted(events)))
    return Measured(max(held), held[-1])


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is rank 0 of 8; the others do not exist, so only shapes and sizes mean anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_allocator_says_the_same_as_our_books(prefetch: int) -> None:
    """Beside ours, autograd holds one block's whole gradients, and activations."""

    model = fsdp.fully_shard(make(64), auto_wrap_policy={Block}, prefetch=prefetch)
    measured = measure(lambda: [step(model) for _ in range(3)])
    booked = fsdp.memory_bytes(model, peak=True)
    gradients = root_and_block(8, 64)[1].unsharded
    assert booked == expected_peak(8, 64, prefetch, buffers=2)
    assert booked <= shards_of(model) + measured.peak <= 1.05 * (booked + gradients)
    # some flags stay
    assert 0 <= measured.rest <= 256


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("work", ["evaluate", "forward with grad", "exception"])
def test_memory_comes_back_without_the_garbage_collector(work: str) -> None:
    def run(model: nn.Module) -> None:
        if work == "evaluate":
            with torch.no_grad():
                model(X)
        elif work == "forward with grad":
            model(X)
            with torch.no_grad():
                model(X)
        else:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(X[:, :5])

    model = fsdp.fully_shard(make(64), auto_wrap_policy={Block})
    run(model)
    measured = measure(lambda: run(model))
    assert abs(measured.rest) <= 256
    assert is_at_rest(model)


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": True}], ids=str)
@on_ranks(2)
def test_at_rest_the_shards_are_all_there_is(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(make(8), auto_wrap_policy={Block}, **options)
    shards = shards_of(model)
    assert fsdp.memory_bytes(model) == shards
    for _ in range(2):
        step(model)
        assert fsdp.memory_bytes(model) == shards
        with torch.no_grad():
            model(X)
        assert fsdp.memory_bytes(model) == shards
    with fsdp.summon_full_params(model):
        assert fsdp.memory_bytes(model) == shards + sum(s.unsharded for s in all_sizes(2, 8))
    assert fsdp.memory_bytes(model) == shards


def test_evaluation_holds_the_root_and_the_units_asked_for() -> None:
    def fn(rank: int) -> int:
        model = fsdp.fully_shard(make(64), auto_wrap_policy={Block}, prefetch=1)
        with torch.no_grad():
            for _ in range(3):
                model(X)
        return fsdp.memory_bytes(model, peak=True)

    root, block = root_and_block(4, 64)
    assert fsdp.simulate(4, fn) == [root.shard + BLOCKS * block.shard + root.unsharded + 2 * block.unsharded] * 4


class Tag(torch.autograd.Function):
    """Hangs something on the graph whose end can be watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watched: list[Any]) -> Tensor:
        ctx.held = nn.Identity()
        watched.append(weakref.ref(ctx.held))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Residual(Block):
    """Returns its input as well."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Watched(nn.Module):
    """Two units in a row, and a tag between them."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.first, self.second = block(6), block(6)
        self.watched: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = _sum(self.first(x))
        return _sum(self.second(Tag.apply(x, self.watched)))


def _sum(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else sum(output)


@pytest.mark.parametrize("block", [Block, Residual])
@pytest.mark.parametrize("backward", [False, True])
@on_ranks(1)
def test_the_graph_dies_with_its_last_output(rank: int, backward: bool, block: type[Block]) -> None:
    """No cycle through our hooks may keep activations alive until the garbage collector comes."""
    model = fsdp.fully_shard(Watched(block), auto_wrap_policy={Block})
    gc.collect()
    gc.disable()
    try:
        output = model(X)
        assert model.watched[0]() is not None
        if backward:
            loss_of(output).backward()
        del output
        assert model.watched[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@on_ranks(2)
def test_who_keeps_a_graph_gathers_in_the_order_of_who_does_not(rank: int, prefetch: int) -> None:
    """Rank 0 adds up the losses of an evaluation, and so has their graphs, which must not change what is gathered ahead."""
    model = make(16)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number, block in enumerate(blocks):
        fsdp.fully_shard(block, reshard_after_forward=number > 0)
    fsdp.fully_shard(model, prefetch=prefetch)
    total = torch.zeros(())
    for _ in range(3):
        step(model)
        for _ in range(2):
            loss = loss_of(model(X))
            total = total + loss if rank == 0 else total
            del loss
