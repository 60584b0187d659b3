"""Which parameters had a gradient in a backward, here and on any rank: one small collective.

A rank that had all of them does not wait for the answer: on CUDA that would be the host's waiting.
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


class _Question(NamedTuple):
    """On its way between the ranks."""

    flags: Tensor
    """One a parameter. 1: there was a gradient; 2: there is one that came after its bucket was launched."""
    all_used_here: bool
    """Whether this rank had all of them, and needs no answer."""
    work: Work


class UsedParams:
    """Who had which gradient, in one backward at a time."""

    def __init__(
        self, buckets: Sequence[Bucket], static: bool, world_comm: Communicator, streams: Streams, device: torch.device
    ) -> None:
        self._buckets = buckets
        self._everyone = world_comm
        self._streams = streams
        self._static = static
        self._offsets = list(accumulate((len(bucket.views) for bucket in buckets), initial=0))
        self._all_used = torch.ones(self._offsets[-1], dtype=torch.uint8, device=device)
        self._question: _Question | None = None
        self._usual: list[bool] | None = None
        """Of a static graph: what its first backward used on any rank, and what here."""
        self._usual_more: list[bool] = []
        self._usual_here: list[list[bool]] = []
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self.has_grad: list[bool] = []
        """Which buckets had gradients here that were not launched when the ranks were told."""
        self.has_remainder: list[bool] = []
        """Of which buckets they came after others were launched."""
        self._used: list[bool] = []
        self._more: list[bool] = []

    def exchange(self, launched: Sequence[bool]) -> None:
        """At the end of a backward: tell the ranks which parameters had a gradient here.

        Of buckets that were launched, also which have one that came after that.

        Raises:
            ShardingError: a graph that was said to be static is not.
        """
        fresh = [bucket.collect_used(one) for bucket, one in zip(self._buckets, launched, strict=True)]
        self.has_grad = [True in one for one in fresh]
        self.has_remainder = list(map(and_, self.has_grad, launched))
        if self._usual is not None:
            self._check_usual()
            self._used, self._more = self._usual, self._usual_more
            return
        if self._static:
            self._usual_here = [list(bucket.used_here) for bucket in self._buckets]
        all_used_here = all(bucket.all_used_here for bucket in self._buckets)
        with self._streams.reducing():
            if all_used_here and not any(self.has_remainder):
                flags = self._all_used.clone()
            else:
                found = [
                    used_here + (was_launched and more)
                    for bucket, was_launched, of_bucket in zip(self._buckets, launched, fresh, strict=True)
                    for used_here, more in zip(bucket.used_here, of_bucket, strict=True)
                ]
                flags = torch.tensor(found, dtype=torch.uint8, device=self._all_used.device)
            self._question = _Question(flags, all_used_here, self._everyone.all_reduce(flags, "max", "which gradients came"))

    def used(self, number: int) -> Sequence[bool]:
        """Which parameters of a bucket had a gradient on some rank."""
        return self._used[self._offsets[number] : self._offsets[number + 1]] if self._used else self._buckets[number].all_used

    def any_rank_has_grad(self, number: int) -> bool:
        """Whether any rank has a gradient of a bucket; waits for the others if this one has none."""
        if self.has_grad[number]:
            return True
        self.wait_all(read=True)
        return any(self.used(number))

    def some_rank_has_remainder(self, number: int) -> bool:
        """The same for gradients that came after others of the bucket were launched."""
        if self.has_remainder[number]:
            return True
        self.wait_all(read=True)
        return any(self._more[self._offsets[number] : self._offsets[number + 1]])

    def wait_all(self, read: bool = False) -> None:
        """Learn what the others had, if this rank needs to know."""
        question = self.take()
        if question is None:
            return
        question.work.wait()
        self._streams.await_reductions()
        if read or not question.all_used_here or self._static:
            flags = question.flags.tolist()
            self._used = [flag > 0 for flag in flags]
            self._more = [flag > 1 for flag in flags]
            if self._static:
                self._usual, self._usual_more = self._used, self._more

    def take(self) -> _Question | None:
        """What is in flight, to be awaited elsewhere."""
        question, self._question = self._question, None
        return question

    def _check_usual(self) -> None:
        for bucket, usual in zip(self._buckets, self._usual_here, strict=True):
            for place, now, before in zip(bucket.flat.param_infos, bucket.used_here, usual, strict=True):
                if now != before:
                    raise ShardingError(
                        f"parameter {place.names[0]!r} of unit {bucket.name!r} had {'a' if before else 'no'} gradient in the "
                        f"first backward and has {'one' if now else 'none'} in this one; leave out reduction.static_graph."
                    )
