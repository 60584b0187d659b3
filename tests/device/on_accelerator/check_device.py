"""The pretend accelerator itself: queues, events, host copies, memory by stream, collectives."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp
from fsdp.comm import open_communicators
from fsdp.config import MeshKind
from tests.support.accelerator.device import (
    NAME,
    Scheduler,
    configure,
    failing_allocation,
    host_waits,
    load,
    mark,
    memory_limit,
    recording,
)
from tests.support.accelerator.timeline import Speeds, Timeline
from tests.support.accelerator.world import run

load()
DEVICE = torch.device(NAME, 0)
module: Any = torch.get_device_module(NAME)
SCHEDULERS = pytest.mark.parametrize("scheduler", Scheduler, ids=lambda scheduler: scheduler.name)


def peek(tensor: Tensor) -> list[float]:
    """The floats that lie in the memory of a device tensor now. Nothing waits."""
    return list((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


def test_values_are_there_when_the_queue_has_come_to_them() -> None:
    configure(Scheduler.LAZY)
    x = torch.full((3,), 2.0, device=DEVICE)
    y = x * x
    assert y.shape == (3,) and y.device == DEVICE
    assert peek(y) != [4.0] * 3
    assert host_waits(0) == 0
    assert y.tolist() == [4.0] * 3
    assert host_waits(0) == 1
    assert peek(y) == [4.0] * 3


@SCHEDULERS
def test_an_event_orders_two_streams(scheduler: Scheduler) -> None:
    for seed in range(6):
        configure(scheduler, seed)
        side = module.Stream(DEVICE)
        x = torch.zeros(4, device=DEVICE)
        side.wait_stream(module.current_stream(DEVICE))
        with module.stream(side):
            x.add_(1)
            event = module.Event()
            event.record(side)
        event.wait()
        x.mul_(3)
        assert x.tolist() == [3.0] * 4


def race(seed: int) -> list[float]:
    """Two streams that change the same memory without an order."""
    configure(Scheduler.RANDOM, seed)
    side = module.Stream(DEVICE)
    x = torch.ones(1, device=DEVICE)
    for _ in range(5):
        with module.stream(side):
            x.add_(1)
        x.mul_(2)
    module.synchronize(DEVICE)
    return peek(x)


def test_a_race_has_many_results_and_each_is_repeated_by_its_seed() -> None:
    found = [race(seed) for seed in range(20)]
    assert len({tuple(one) for one in found}) > 5
    assert [race(seed) for seed in range(20)] == found


def test_asking_an_event_again_and_again_ends() -> None:
    configure(Scheduler.LAZY)
    x = torch.zeros(4, device=DEVICE)
    x.add_(1)
    event = module.Event()
    event.record()
    asked = 0
    while not event.query():
        asked += 1
    assert 0 < asked < 100
    assert peek(x) == [1.0] * 4


def test_host_copies_wait_unless_they_are_non_blocking_to_pinned_memory() -> None:
    configure(Scheduler.LAZY)
    x = torch.full((2,), 5.0, device=DEVICE)
    pinned = torch.zeros(2).pin_memory()
    assert pinned.is_pinned()
    pinned.copy_(x, non_blocking=True)
    assert host_waits(0) == 0 and pinned.tolist() == [0.0, 0.0]
    module.synchronize()
    assert pinned.tolist() == [5.0, 5.0]
    assert torch.empty(2).copy_(x, non_blocking=True).tolist() == [5.0, 5.0]  # pageable memory: CUDA waits as well
    x.add_(1)
    late = x.to("cpu", non_blocking=True)  # torch takes pinned memory for it
    assert late.tolist() != [6.0, 6.0]
    module.synchronize()
    assert late.tolist() == [6.0, 6.0]
    waits = host_waits(0)
    source = torch.ones(2)
    y = source.to(DEVICE, non_blocking=True)  # pageable memory is read before the call returns
    source.fill_(9)
    assert host_waits(0) == waits
    pinned = torch.ones(2).pin_memory()
    z = pinned.to(DEVICE, non_blocking=True)  # pinned memory is read when the queue comes to it
    pinned.fill_(9)
    assert y.tolist() == [1.0, 1.0] and z.tolist() == [9.0, 9.0]


def test_memory_is_handed_out_again_on_its_own_stream_alone() -> None:
    configure(Scheduler.EAGER)
    x = torch.zeros(1000, device=DEVICE)
    place, held = x.data_ptr(), module.memory_allocated(DEVICE)
    del x
    assert module.memory_allocated(DEVICE) == held - 4096
    with module.stream(module.Stream(DEVICE)):
        other = torch.empty(1000, device=DEVICE)
    assert other.data_ptr() != place
    assert torch.empty(1000, device=DEVICE).data_ptr() == place


@pytest.mark.parametrize("recorded", [False, True])
def test_record_stream_keeps_memory_until_the_other_stream_has_read_it(recorded: bool) -> None:
    configure(Scheduler.LAZY)
    side = module.Stream(DEVICE)
    x = torch.ones(64, device=DEVICE)
    side.wait_stream(module.current_stream())
    with module.stream(side):
        y = x + 1
    if recorded:
        x.record_stream(side)
    del x
    z = torch.zeros(64, device=DEVICE)  # may get the memory of x
    module.current_stream().synchronize()
    module.synchronize()
    assert (peek(y) == [2.0] * 64) is recorded
    assert peek(z) == [0.0] * 64


def test_memory_has_a_limit_and_a_peak() -> None:
    configure(Scheduler.EAGER)
    module.reset_peak_memory_stats(DEVICE)
    held = module.memory_allocated(DEVICE)
    with memory_limit(0, held + 8192):
        x = torch.empty(1024, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(1025, device=DEVICE)
        del x
        torch.empty(2048, device=DEVICE)
    assert module.max_memory_allocated(DEVICE) == held + 8192
    with failing_allocation(0, 1) as count:
        torch.empty(8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(8, device=DEVICE)
        assert count() == 2


def test_a_use_of_released_memory_is_an_error() -> None:
    configure(Scheduler.EAGER)
    x = torch.zeros(8, device=DEVICE)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory that was released"):
        x.add_(1)


def test_a_kernel_that_fails_is_reported_where_the_host_waits() -> None:
    configure(Scheduler.LAZY)
    x = torch.zeros(4, device=DEVICE)
    y = x[torch.tensor([9], device=DEVICE)]
    with pytest.raises(RuntimeError, match="failed earlier: index 9 is out of bounds"):
        y.tolist()


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(2, device=DEVICE) + torch.zeros(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(2, device=DEVICE) + torch.zeros(2, device=f"{NAME}:1")


def communicator() -> Any:
    return open_communicators.open_comms(None, None, MeshKind.SHARD).shard_comm


@SCHEDULERS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_make_streams_wait_and_never_the_host(scheduler: Scheduler, size: int) -> None:
    def rank(here: int) -> list[Any]:
        comm, device = communicator(), torch.device(NAME, here)
        gathered = torch.full((size * 2,), -1.0, device=device)
        gathered[here * 2 : here * 2 + 2] = here
        bucket = torch.arange(size * 3, dtype=torch.float32, device=device) * (here + 1)
        into, total = torch.empty(3, device=device), torch.full((2,), float(here), device=device)
        sent = torch.full((2,), float(here), device=device)
        works = [
            comm.all_gather(gathered, "a"),
            comm.reduce_scatter(bucket, into, "b"),
            comm.all_reduce(total, "max", "c"),
            comm.broadcast(sent, 1, "d"),
        ]
        for work in works:
            work.wait()
        doubled = [one * 2 for one in (gathered, into, total, sent)]
        assert host_waits(here) == 0
        return [one.tolist() for one in doubled]

    for here, (gathered, into, total, sent) in enumerate(run(size, rank, scheduler)):
        factor = sum(range(1, size + 1))
        assert gathered == [2.0 * other for other in range(size) for _ in range(2)]
        assert into == [2.0 * factor * (here * 3 + i) for i in range(3)]
        assert total == [2.0 * (size - 1)] * 2 and sent == [2.0] * 2


def test_a_result_that_no_stream_waits_for_is_garbage() -> None:
    def rank(here: int) -> list[float]:
        comm, device = communicator(), torch.device(NAME, here)
        total = torch.ones(1, device=device)
        comm.all_reduce(total, "sum", "a")
        return (total + 0).tolist()

    assert run(2, rank, Scheduler.LAZY) != [[2.0], [2.0]]


@pytest.mark.parametrize("fails", ["raises", "mismatch"])
def test_a_host_that_waits_for_a_failed_peer_gets_an_error(fails: str) -> None:
    def rank(here: int) -> None:
        comm, device = communicator(), torch.device(NAME, here)
        if here == 1 and fails == "raises":
            raise KeyError("a peer that fails")
        total = torch.ones(1 + here, device=device)
        comm.all_reduce(total, "sum", "a").wait()
        try:
            total.tolist()
        except RuntimeError as failure:
            heard.append(str(failure))
            raise

    heard: list[str] = []
    wanted: Any = KeyError if fails == "raises" else fsdp.WorldError
    with pytest.raises(wanted):
        run(2, rank, Scheduler.LAZY)
    if fails == "raises":
        assert "collective that no peer will launch" in heard[0]


def test_streams_compute_at_the_same_time_in_computed_seconds() -> None:
    """A kernel of four numbers reads and writes 32 bytes."""
    configure(Scheduler.RANDOM, 1)
    side = module.Stream()
    with recording() as recorded:
        mark(0, 0)
        x = torch.ones(4, device=DEVICE)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            y = x * 2.0
        z = x * 2.0 * 3.0
        module.current_stream().wait_stream(side)
        y.record_stream(module.current_stream())
        total = y + z  # reads two tensors
        side.synchronize()
        mark(0, 1)
        module.synchronize()
        mark(0, 2)
        timeline = Timeline(recorded(), Speeds(operations=2.0, bytes=1.0, link=1.0))
    assert timeline.between(0, 0, 1).end == 2 * 32
    assert timeline.between(0, 0, 2).seconds == 3 * 32 + 48
    del total


def test_a_product_of_matrices_takes_as_long_as_its_products_and_sums() -> None:
    configure(Scheduler.LAZY)
    left, right, bias = (torch.ones(*shape, device=DEVICE) for shape in ((2, 4), (4, 8), (8,)))
    weight, batch, others = (torch.ones(*shape, device=DEVICE) for shape in ((8, 4), (3, 2, 4), (3, 4, 8)))
    module.synchronize()
    for compute, products in (
        (lambda: left @ right, 2 * 4 * 8),
        (lambda: torch.mm(left, right, out=torch.empty(2, 8, device=DEVICE)), 2 * 4 * 8),
        (lambda: torch.nn.functional.linear(left, weight, bias), 2 * 4 * 8),
        (lambda: torch.addmm(torch.ones(2, 8, device=DEVICE), left, right), 2 * 4 * 8),
        (lambda: batch @ others, 3 * 2 * 4 * 8),
        (lambda: torch.baddbmm(torch.ones(3, 2, 8, device=DEVICE), batch, others), 3 * 2 * 4 * 8),
    ):
        with recording() as recorded:
            mark(0, 0)
            compute()
            module.synchronize()
            mark(0, 1)
            step = Timeline(recorded(), Speeds(operations=1.0, bytes=1e30, link=1.0)).between(0, 0, 1)
        assert step.computing == pytest.approx(2 * products)  # a product and a sum each


def test_collectives_take_as_long_as_the_bytes_that_a_rank_receives() -> None:
    def rank(here: int) -> None:
        comm, device = communicator(), torch.device(NAME, here)
        gathered, chunk, total = (torch.ones(size, device=device) for size in (8, 4, 2))
        module.synchronize(here)
        mark(here, 0)
        works = [comm.all_gather(gathered, "a"), comm.all_reduce(total, "sum", "b")]
        works += [comm.reduce_scatter(gathered, chunk, "c"), comm.broadcast(chunk, 0, "d")]
        for work in works:
            work.wait()
        module.synchronize(here)
        mark(here, 1)

    with recording() as recorded:
        run(2, rank, Scheduler.EAGER)
        timeline = Timeline(recorded(), Speeds(operations=1.0, bytes=1e30, link=2.0))
    for here in range(2):
        # one half of 32 bytes, twice one half of 8, one half of 32, and all of 16
        assert [one.received for one, _ in timeline.collectives(here)] == [16.0, 8.0, 16.0, 16.0]
        step = timeline.between(here, 0, 1)
        assert step.seconds == pytest.approx(28.0)
        assert step.reasons == pytest.approx({"gathers": 8.0, "reductions": 12.0, "broadcasts": 8.0})


def random_numbers(draw: Callable[[], Tensor]) -> list[float]:
    torch.manual_seed(5)
    first = draw().tolist()
    return [*first, *torch.rand(2).tolist()]


@SCHEDULERS
def test_a_program_draws_the_numbers_of_the_host(scheduler: Scheduler) -> None:
    configure(scheduler, 1)
    for draw in (
        lambda device: torch.randn(5, device=device),
        lambda device: torch.nn.functional.dropout(torch.ones(9, device=device), 0.4),
        lambda device: torch.bernoulli(torch.full((9,), 0.3, device=device)),
        lambda device: torch.randperm(7, device=device),
        lambda device: torch.randn(4, device=device, generator=torch.Generator().manual_seed(3)),
    ):
        assert random_numbers(lambda: draw(DEVICE)) == random_numbers(lambda: draw(torch.device("cpu")))  # noqa: B023
