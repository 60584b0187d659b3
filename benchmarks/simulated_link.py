"""A process group with one process in it that takes as long as a network would. Nothing is sent, and results are garbage.

Rule 1: there is one wire. What any group launches occupies it after everything launched before, for
        latency + received bytes / bandwidth; it is done at a time that is known at the launch.
Rule 2: a wait sleeps until that time. Nothing else is delayed, and nothing is computed meanwhile.

It goes by the name "fake", as torch's own group of this kind does: engines that ask for peers' opinions know by that name
that there are none. Received bytes are those of the best algorithm: (W - 1) / W of a gather's or reduction's whole, twice
that for an all-reduce.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from common import group
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future


class Link:
    """The wire, and what went over it."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.bandwidth = bandwidth
        """Bytes a second."""
        self.latency = latency
        """Seconds a collective."""
        self.reset()
        self._promises: queue.SimpleQueue[tuple[float, Future[Any], Any] | None] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def reset(self) -> None:
        """Count from here on."""
        self.free_at = 0.0
        self.busy = 0.0
        self.received: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def occupy(self, kind: str, count: float) -> float:
        """When a collective of `count` received bytes that is launched now will be done."""
        taken = self.latency + count / self.bandwidth
        self.free_at = max(self.free_at, time.perf_counter()) + taken
        self.busy += taken
        self.received[kind] += int(count)
        self.collectives[kind] += 1
        return self.free_at

    def promise(self, due: float, result: Any) -> Future[Any]:
        """A future that is kept at `due`; promises are kept in the order in which they are made."""
        future: Future[Any] = Future()
        self._promises.put((due, future, result))
        return future

    def close(self) -> None:
        self._promises.put(None)
        self._keeper.join()

    def _keep(self) -> None:
        while (promised := self._promises.get()) is not None:
            due, future, result = promised
            sleep_until(due)
            future.set_result(result)


def sleep_until(due: float) -> None:
    """At once, if it is over."""
    while (left := due - time.perf_counter()) > 0:
        time.sleep(left)


class Delayed(dist._Work):
    """A collective on the wire."""

    def __init__(self, link: Link, due: float, result: Any) -> None:
        super().__init__()
        self._link = link
        self._due = due
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        sleep_until(self._due)
        return True

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._due

    def get_future(self) -> Future[Any]:
        return self._link.promise(self._due, self._result)


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0 of W. torch renamed some of these methods in 2.13, so they are here under both names."""

    def __init__(self, link: Link, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._link = link
        self._world = world

    _device_types = (torch.device("cpu"),)

    def size(self) -> int:
        return self._world

    @property
    def group_name(self) -> str:
        """As torch has registered it."""
        name: str = distributed_c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:
        return "fake"

    def _launch(self, kind: str, unsharded: Sequence[Tensor], result: Any, times: int = 1) -> Delayed:
        count = times * sum(map(_bytes, unsharded)) * (self._world - 1) / self._world
        return Delayed(self._link, self._link.occupy(kind, count), result)

    def all_gather_single(self, unsharded: Tensor, own: Tensor, options: Any = None) -> Delayed:
        return self._launch("all_gather", [unsharded], [unsharded])

    def reduce_scatter_single(self, into: Tensor, unsharded: Tensor, options: Any = None) -> Delayed:
        return self._launch("reduce_scatter", [unsharded], [into])

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, out: Any = None, into: Any = None, options: Any = None
    ) -> Delayed:
        return self._launch("all_to_all", [sent], [received])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def all_gather_single_coalesced(self, unsharded_params: list[Tensor], own: list[Tensor], options: Any = None) -> Delayed:
        return self._launch("all_gather", unsharded_params, unsharded_params)

    def reduce_scatter_single_coalesced(self, into: list[Tensor], unsharded_params: list[Tensor], options: Any = None) -> Delayed:
        return self._launch("reduce_scatter", unsharded_params, into)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Delayed:
        for row, tensor in zip(outputs, inputs, strict=True):
            for place in row:
                place.copy_(tensor)  # what ranks compare is alike
        return self._launch("all_gather", [tensor for row in outputs for tensor in row], outputs)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Delayed:
        return self._launch("all_reduce", tensors, tensors, times=2)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Delayed:
        return self._launch("broadcast", tensors, tensors)

    def barrier(self, options: Any = None) -> Delayed:
        return self._launch("barrier", [], [])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def joined(link: Link, world: int) -> Iterator[None]:
    """The default group of this process is one over `link`, which is closed at the end: rank 0 of `world`."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (takes the name when it is first imported, so let it be now)

    before = dist.Backend._plugins["FAKE"]
    dist.Backend.register_backend("fake", lambda store, rank, size, timeout: SimulatedGroup(link, rank, size), devices=["cpu"])
    try:
        with group("fake", dist.HashStore(), 0, world):
            yield
    finally:
        dist.Backend._plugins["FAKE"] = before
        link.close()
