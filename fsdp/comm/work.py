"""Collectives in flight, and what is made of several: a work is awaited once, where its result is needed."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fsdp.comm.pairwise_sum import sum_of_two, sum_over_ranks


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result may be used: on CPU when it is there, on CUDA when the current stream will wait for it."""


class _Done:
    """Nothing is in flight."""

    def wait(self) -> None:
        return


DONE: Final = _Done()


class ExchangedSum:
    """An exchange of chunks, summed at `wait`: the same bits on every run."""

    __slots__ = ("_into", "_own", "_received", "_work")

    def __init__(self, work: Work, received: Tensor, into: Tensor, own: Tensor | None = None) -> None:
        self._work = work
        self._received = received
        self._into = into
        self._own = own
        """This rank's, if it is not among what was received."""

    def wait(self) -> None:
        self._work.wait()
        if self._own is None:
            sum_over_ranks(self._received.view(-1, self._into.numel()), self._into)
        else:
            sum_of_two(self._own, self._received, self._into)


class Together:
    """Several works that are one."""

    __slots__ = ("_failure", "_works")

    def __init__(self, launches: Iterable[Callable[[], Any]]) -> None:
        self._works: list[Any] = []
        self._failure: RuntimeError | None = None
        """What kept some of them from being launched: the others are in flight, and are awaited first."""
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
                    raise  # it can be awaited again
                failure = failure or reason
        if failure is not None:
            raise failure

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class InStages:
    """A work that communicates again in `wait`. A rank that gives up waits for what has begun, and begins nothing more."""

    __slots__ = ("begun",)

    def __init__(self, begun: Work) -> None:
        self.begun = begun
        """The stage in flight."""


class FixedOrderTotal(InStages):
    """An exchange of chunks, summed at `wait`, where the sums are gathered again."""

    __slots__ = ("_gather", "_own", "_received", "_sent", "_tensor")

    def __init__(
        self, work: Work, sent: Tensor, received: Tensor, tensor: Tensor, gather: Callable[[Tensor], Work], own: int
    ) -> None:
        super().__init__(work)
        self._sent = sent
        """Kept until it has arrived."""
        self._received = received
        self._tensor = tensor
        self._gather = gather
        self._own = own
        """The rank of this process, whose chunk is summed here."""

    def wait(self) -> None:
        self.begun.wait()
        parts = self._received
        sums = torch.empty_like(parts)
        sum_over_ranks(parts, sums[self._own])
        self.begun = self._gather(sums.view(-1))
        self.begun.wait()
        self._tensor.view(-1).copy_(sums.view(-1)[: self._tensor.numel()])
