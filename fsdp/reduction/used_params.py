"""The parameters that had a gradient in a backward, on this rank and on any rank: one small collective.

A rank on which all of them had one does not read the result: on CUDA the host would have to wait for it.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.work import Work
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.reduction.bucket import Bucket


class _Exchange(NamedTuple):
    """The exchange of one backward, in flight."""

    flags: Tensor
    """One for each parameter. 1: it had a gradient; 2: it has a gradient that arrived after its bucket was launched."""
    all_local_used: bool
    """True if all parameters had a gradient on this rank, which then needs no result."""
    work: Work


class UsedParams:
    """The used parameters of one root, in one backward at a time."""

    def __init__(
        self, buckets: Sequence[Bucket], static: bool, world_comm: Communicator, streams: Streams, device: torch.device
    ) -> None:
        self._buckets = buckets
        self._world_comm = world_comm
        self._streams = streams
        self._static = static
        self._offsets = list(accumulate((len(bucket.views) for bucket in buckets), initial=0))
        self._all_used = torch.ones(self._offsets[-1], dtype=torch.uint8, device=device)
        self._exchange: _Exchange | None = None
        self._static_used: list[bool] | None = None
        """With a static graph: the parameters that the first backward used on any rank."""
        self._static_remainders: list[bool] = []
        """With a static graph: the parameters that had a remainder on any rank."""
        self._static_local: list[list[bool]] = []
        """With a static graph: for each bucket, the parameters used on this rank."""
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self.has_grad: list[bool] = []
        """For each bucket, whether this rank had gradients at the exchange that were not launched."""
        self.has_remainder: list[bool] = []
        """For each bucket, whether these are a remainder."""
        self._used: list[bool] = []
        """For each parameter, whether any rank had a gradient. Empty: every parameter of this rank had one."""
        self._remainders: list[bool] = []
        """For each parameter, whether any rank has a remainder."""

    def exchange(self, launched: Sequence[bool]) -> None:
        """At the end of a backward: begin to exchange which parameters had a gradient, and which have a remainder.

        `launched` says which buckets were launched.

        Traffic: an all-reduce of one byte a parameter, except with a static graph after its first backward.

        Raises:
            ShardingError: the graph was declared static and has changed.
        """
        not_launched = [bucket.collect_used(one) for bucket, one in zip(self._buckets, launched, strict=True)]
        self.has_grad = [True in one for one in not_launched]
        self.has_remainder = list(map(and_, self.has_grad, launched))
        if self._static_used is not None:
            self._check_static()
            self._used, self._remainders = self._static_used, self._static_remainders
            return
        if self._static:
            self._static_local = [list(bucket.local_used) for bucket in self._buckets]
        all_local_used = all(bucket.all_local_used for bucket in self._buckets)
        with self._streams.reducing():
            if all_local_used and not any(self.has_remainder):
                flags = self._all_used.clone()
            else:
                values = [
                    used + (was_launched and has_grad)
                    for bucket, was_launched, has_grads in zip(self._buckets, launched, not_launched, strict=True)
                    for used, has_grad in zip(bucket.local_used, has_grads, strict=True)
                ]
                flags = torch.tensor(values, dtype=torch.uint8, device=self._all_used.device)
            work = self._world_comm.all_reduce(flags, "max", "which gradients came")
            self._exchange = _Exchange(flags, all_local_used, work)

    def used(self, number: int) -> Sequence[bool]:
        """For each parameter of a bucket, whether it had a gradient on some rank."""
        return self._used[self._offsets[number] : self._offsets[number + 1]] if self._used else self._buckets[number].all_used

    def any_rank_has_grad(self, number: int) -> bool:
        """Whether any rank has a gradient of a bucket. Waits for the exchange if this rank has none."""
        if self.has_grad[number]:
            return True
        self.wait_all(read=True)
        return any(self.used(number))

    def any_rank_has_remainder(self, number: int) -> bool:
        """Whether any rank has a remainder of a bucket. Waits for the exchange if this rank has none."""
        if self.has_remainder[number]:
            return True
        self.wait_all(read=True)
        return any(self._remainders[self._offsets[number] : self._offsets[number + 1]])

    def wait_all(self, read: bool = False) -> None:
        """Wait for the exchange, and read its result if this rank needs it."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.work.wait()
        self._streams.await_reductions()
        if read or not exchange.all_local_used or self._static:
            flags = exchange.flags.tolist()
            self._used = [flag > 0 for flag in flags]
            self._remainders = [flag > 1 for flag in flags]
            if self._static:
                self._static_used, self._static_remainders = self._used, self._remainders

    def take_work(self) -> Work | None:
        """Take the exchange in flight away, for a caller that waits for it and does not read it."""
        exchange, self._exchange = self._exchange, None
        return None if exchange is None else exchange.work

    def _check_static(self) -> None:
        for bucket, first in zip(self._buckets, self._static_local, strict=True):
            for info, now, before in zip(bucket.flat.param_infos, bucket.local_used, first, strict=True):
                if now != before:
                    raise ShardingError(
                        f"parameter {info.names[0]!r} of unit {bucket.name!r} had {'a' if before else 'no'} gradient in the "
                        f"first backward and has {'one' if now else 'none'} in this one; leave out reduction.static_graph."
                    )
