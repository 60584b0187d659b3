"""Collectives in flight, works that consist of several, and the sum over ranks. A work is awaited once, where it is needed."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

BLOCK: Final = 2**15
"""Elements of each rank that are summed together on the host. A block stays in the cache until it is summed."""


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result may be used: on CPU when it is there, on CUDA when the current stream will wait for it."""


class Works:
    """Collectives in flight that are awaited together."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


DONE: Final = Works(())
"""The work of a collective that had nothing to do."""


class WorkThen:
    """A collective in flight, and something that `wait` does after it: sums what was exchanged, or copies it back."""

    __slots__ = ("_then", "_work", "scratch")

    def __init__(self, work: Work, then: Callable[[], object], scratch: int = 0) -> None:
        self._work = work
        self._then = then
        self.scratch = scratch
        """Bytes that were allocated for it until `wait` returns."""

    def wait(self) -> None:
        self._work.wait()
        self._then()


class WorkBatch:
    """Several works of a process group that are awaited as one."""

    __slots__ = ("_failure", "_works")

    def __init__(self, launches: Iterable[Callable[[], Any]]) -> None:
        self._works: list[Any] = []
        self._failure: RuntimeError | None = None
        """The error of the first launch that failed. The works launched before it are in flight, and `wait` awaits them first."""
        try:
            for launch in launches:
                self._works.append(launch())
        except RuntimeError as failure:
            self._failure = failure

    def wait(self, timeout: timedelta) -> None:
        failure = self._failure
        for work in self._works:
            try:
                work.wait(timeout)
            except RuntimeError as reason:
                if not work.is_completed():
                    raise  # it timed out and can be awaited again
                failure = failure or reason
        if failure is not None:
            raise failure

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class TwoPhaseWork:
    """A work that launches a second collective in `wait`. A rank that abandons the step awaits `begun` and launches nothing."""

    __slots__ = ("begun",)

    def __init__(self, begun: Work) -> None:
        self.begun = begun
        """The collective in flight."""


Exchange = Callable[[Tensor, Tensor], Work]
"""Launches an exchange (received, sent): chunk r of `sent` goes to rank r, and chunk r of `received` comes from rank r."""


def reduce_scatter_by_exchange(exchange: Exchange, bucket: Tensor, into: Tensor) -> Work:
    """Launch a reduce-scatter (W, C) -> (C,) as an exchange of chunks, which `wait` sums in a fixed order."""
    received = torch.empty_like(bucket)
    return WorkThen(exchange(received, bucket), partial(pairwise_sum, received, into), received.nbytes)


class DeterministicAllReduce(TwoPhaseWork):
    """An all-reduce by a reduce-scatter in a fixed order, whose sums `wait` gathers with `gather`.

    The tensor is padded to a multiple of the number of ranks.
    """

    __slots__ = ("_gather", "_padded", "_tensor", "scratch")

    def __init__(self, exchange: Exchange, gather: Callable[[Tensor], Work], tensor: Tensor, rank: int, size: int) -> None:
        self._padded = tensor.new_zeros(size, -(-tensor.numel() // size))
        """The input while it is sent, and the sums after that."""
        self._padded.view(-1)[: tensor.numel()].copy_(tensor.view(-1))
        self._tensor = tensor
        self._gather = gather
        self.scratch = 2 * self._padded.nbytes
        super().__init__(reduce_scatter_by_exchange(exchange, self._padded, self._padded[rank]))

    def wait(self) -> None:
        self.begun.wait()
        self.begun = self._gather(self._padded.view(-1))
        self.begun.wait()
        self._tensor.view(-1).copy_(self._padded.view(-1)[: self._tensor.numel()])


def pairwise_sum(parts: Tensor, into: Tensor) -> None:
    """Sum `parts` (W, C) over the ranks into `into` (C,). Overwrites `parts`. The same input gives the same bits.

    Neighbours are added in pairs until one is left, in log2(W) operations. Every element is summed in the same order wherever
    it lies, while the order of `torch.sum` depends on the position. Sums of blocks of 2, 4, 8 ... neighbours, summed again,
    have the same bits as one sum over all of them. Half precision is summed in fp32 and rounded once.
    """
    count, chunk = parts.shape
    if count > 2 and chunk > BLOCK and parts.device.type == "cpu":
        for begin in range(0, chunk, BLOCK):
            pairwise_sum(parts[:, begin : begin + BLOCK], into[begin : begin + BLOCK])
        return
    if parts.is_floating_point() and parts.dtype.itemsize < 4:
        parts = parts.float()
    while count > 2 and count % 2 == 0:
        count //= 2
        parts, others = parts.view(count, 2, chunk).unbind(1)
        parts.add_(others)
    while count > 2:
        paired = count // 2 * 2
        parts[0:paired:2].add_(parts[1:paired:2])
        parts = parts[::2]
        count = (count + 1) // 2
    if count == 2:
        one, other = parts.unbind()
        sum_of_two(one, other, into)
    else:
        into.copy_(parts[0])


def sum_of_two(one: Tensor, other: Tensor, into: Tensor) -> None:
    """Sum the chunks of two ranks, (C,) each, in either order. Has the bits of `pairwise_sum`."""
    if one.is_floating_point() and one.dtype.itemsize < 4:
        one, other = one.float(), other.float()
    if one.dtype == into.dtype:
        torch.add(one, other, out=into)
    else:
        into.copy_(one + other)
