"""Reductions in flight: a parcel of buckets on its way to reduced shards.

Rule 1: a parcel is summed among the ranks that share the shards, and its sum among those that hold the same shards.
Rule 2: what is in flight is held here until it is awaited, whatever fails.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fsdp.comm.context import CommContext
from fsdp.comm.work import DONE, TwoPhaseWork, Work
from fsdp.config import ReductionPolicy
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.device.streams import Streams
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.comm_hook import CommHook, GradBucket
from fsdp.reduction.sparse import SparseTotal, as_rows

_MUCH: Final = 2**16
"""Elements of a chunk that are read from memory, and not from a cache, when they are divided."""


class Reduction(NamedTuple):
    """A reduction in flight."""

    buckets: Sequence[Bucket]
    into: Tensor
    """Their chunks, one after the other."""
    work: Work
    joined: Tensor | None
    """Their gradients, where several share the flight."""
    scratch: int
    """Bytes that the channel holds meanwhile."""
    name: str
    """Of the first unit."""
    divisor: float = 1
    """By which the sum is divided."""
    lane: int = 0
    """Which of the channels and streams for reductions it has taken."""


class ReductionQueue:
    """What one root has in flight, in the order of the launches."""

    def __init__(self, policy: ReductionPolicy, comms: CommContext, streams: Streams, tracker: MemoryTracker) -> None:
        self._policy = policy
        self._comms = comms
        self._streams = streams
        self._tracker = tracker
        self._exact = policy.deterministic
        self.ranks = comms.size
        """How many have gradients that count."""
        self.hook: CommHook | None = None
        """Reduces instead of us, if there is one."""
        self._first: list[Reduction] = []
        """Among the ranks that share the shards."""
        self._second: list[Reduction] = []
        """Among those that hold the same shards. What they fill is kept until the commit in any case."""
        self._launched = 0

    def begin(self) -> None:
        """A backward begins: the lanes take turns from the first one, on every rank."""
        self._launched = 0

    @property
    def oldest(self) -> Sequence[Bucket]:
        """The buckets that are awaited next. None: their gradients have left the memory of all buckets."""
        return self._first[0].buckets if self._first else ()

    @property
    def is_full(self) -> bool:
        """Whether no lane is free."""
        return len(self._first) >= len(self._comms.lanes)

    def launch(self, buckets: Sequence[Bucket], remainder: bool) -> bool:
        """Fill the buckets of a parcel on the compute stream and reduce them on the reduction stream.

        Returns whether their gradients have left the memory of the buckets with that.

        Shapes:  buckets (W * C,) on each of W ranks  ->  mean of chunk `rank` (C,)
        Memory:  W * C elements until landed, C until committed; where several share a collective, small ones twice while it is
                 put together
        """
        lane, self._launched = self._launched % len(self._comms.lanes), self._launched + 1
        if buckets[0].flat.is_sparse:
            self._launch_rows(buckets[0], lane, remainder)
            return True
        name, size = buckets[0].name, sum(bucket.flat.layout.shard_numel for bucket in buckets)
        before, after = self._divisors(buckets[0].buffer, size)
        shards = self._comms.lanes[lane].shard
        if shards.size == 1:
            # the chunk is the bucket, and becomes `.grad`; an allocator of a device keeps its memory itself
            like, keeps = buckets[0].buffer, len(buckets) == 1 and self._streams.on_host
            into = buckets[0].spare.take(size, like) if keeps else like.new_empty(size)
            for bucket, chunk in zip(buckets, _split(into, buckets), strict=True):
                bucket.fill(remainder, chunk, before)
            with self._streams.reducing(lane):
                self._start_all_reduce(Reduction(buckets, into, DONE, None, 0, name, after, lane))
            self._tracker.add("reduced", size_of(into))
            # it was allocated on the compute stream, and may be given back already
            self._streams.await_reductions()
            return True
        joined = None
        try:
            for bucket in buckets:
                bucket.memory.allocate(self._tracker)
                bucket.fill(remainder, divisor=before)
            each = len(buckets) > 1 and shards.supports_coalescing(buckets[0].flat.device, self._exact)
            joined = self._join(buckets) if len(buckets) > 1 and not each else None
            given = [bucket.buffer for bucket in buckets] if joined is None else [joined]
            with self._streams.reducing(lane):
                into = given[0].new_empty(size)
                if each:
                    chunks = [_as_real(chunk) for chunk in _split(into, buckets)]
                    work = shards.reduce_scatter_coalesced([_as_real(one) for one in given], chunks, name)
                else:
                    work = shards.reduce_scatter(_as_real(given[0]), _as_real(into), name, self._exact)
        except BaseException:
            self._release(buckets, joined)
            raise
        scratch = 0 if each else shards.scratch_bytes(given[0], self._exact)
        self._tracker.add("reduced", size_of(into))
        self._tracker.add("scratch", scratch)
        self._first.append(Reduction(buckets, into, work, joined, scratch, name, after, lane))
        return False

    def _launch_rows(self, bucket: Bucket, lane: int, remainder: bool) -> None:
        """The same for a sparse bucket, which shares no collective and has no second sum."""
        before, after = self._divisors(bucket.buffer, 0)
        rows = bucket.take_rows(remainder)
        if before != 1:
            rows = rows / before  # it may be what is kept under `no_sync`
        with self._streams.reducing(lane):
            work = SparseTotal(rows, self._comms.lanes[lane].replicate, bucket.name)
        self._tracker.add("reduced", size_of(rows))
        self._second.append(Reduction((bucket,), rows, work, None, 0, bucket.name, after, lane))

    def launch_hooked(self, bucket: Bucket, shown: GradBucket, remainder: bool) -> bool:
        """Fill one bucket and let the hook reduce it."""
        assert self.hook is not None
        try:
            bucket.memory.allocate(self._tracker)
            bucket.fill(remainder)
            with self._streams.reducing():
                into = bucket.buffer.new_empty(bucket.flat.layout.shard_numel)
                work = self.hook.launch(shown, into, bucket.name)
        except BaseException:
            bucket.memory.release(self._tracker)
            raise
        self._tracker.add("reduced", size_of(into))
        self._first.append(Reduction((bucket,), into, work, None, 0, bucket.name))
        return False

    def land_next(self) -> None:
        """Await the next in flight among the ranks that share the shards; its sums go on to the other replicas."""
        flight = self._first.pop(0)
        try:
            with self._streams.landing(flight.lane):
                flight.work.wait()
                self._start_all_reduce(flight)
            self._streams.await_reductions()
        except BaseException:
            self._tracker.add("reduced", -size_of(flight.into))
            raise
        finally:
            self._tracker.add("scratch", -flight.scratch)
            self._release(flight.buckets, flight.joined)

    def finish(self) -> None:
        """All have left their buckets: await the sums over the replicas."""
        given = []
        while self._second:
            flight = self._second[0]
            self._finish(flight)
            if isinstance(flight.work, SparseTotal):
                given.append(flight.into)  # memory of the compute stream, which is read on the other
            del self._second[0]
            self._tracker.add("scratch", -flight.scratch)
        self._streams.await_reductions()

    def drain(self, others: Sequence[Work]) -> None:
        """Wait until nothing is in flight, nor `others` are. Idempotent; raises what the first collective raises."""
        first, self._first = self._first, []
        second, self._second = self._second, []
        flights = [*second, *first]
        self._tracker.add("reduced", -sum(size_of(one.into) for one in flights))
        failures = []
        for work, lane in (*((one.work, one.lane) for one in flights), *((one, 0) for one in others)):
            try:
                with self._streams.landing(lane):
                    # what the peers have begun beyond that is over when they are told
                    (work.begun if isinstance(work, TwoPhaseWork) else work).wait()
            except BaseException as failure:  # the others are in flight all the same
                failures.append(failure)
        self._streams.await_reductions()
        self._tracker.add("scratch", -sum(one.scratch for one in flights))
        for flight in first:
            self._release(flight.buckets, flight.joined)
        if failures:
            raise failures[0]

    # helpers ------------------------------------------------------------------------------

    def _divisors(self, gradients: Tensor, chunk: int) -> tuple[float, float]:
        """What gradients are divided by before they are summed, and after, where this rank has the sum of `chunk` elements."""
        total = self.ranks if self._policy.average else 1
        before = self._policy.predivide_factor
        if before is None:
            # half precision would overflow in the sum. Everything else is divided after it, on the shard alone, if it is one; but
            # on the host a power of two divides without rounding, and costs nothing while much is copied
            free = chunk >= _MUCH and total & (total - 1) == 0 and gradients.device.type == "cpu"
            first = not self._exact and (free or self._comms.reduce_comm.size == 1)
            before = total if first or gradients.dtype is torch.float16 else 1
        return before, total / before

    def _join(self, buckets: Sequence[Bucket]) -> Tensor:
        """One tensor with the chunks of each rank together: (W * C1,), (W * C2,) -> (W * (C1 + C2),)."""
        ranks = self._comms.reduce_comm.size
        joined = torch.cat([bucket.buffer.view(ranks, -1) for bucket in buckets], 1).view(-1)
        self._tracker.add("bucket", size_of(joined))
        for bucket in buckets:
            bucket.memory.release(self._tracker)
        return joined

    def _release(self, buckets: Sequence[Bucket], joined: Tensor | None) -> None:
        if joined is not None:
            self._tracker.add("bucket", -size_of(joined))
        for bucket in buckets:
            bucket.memory.release(self._tracker)

    def _start_all_reduce(self, flight: Reduction) -> None:
        """The chunks are reduced among those that share the shards: go on to the sum over the replicas."""
        replicas = self._comms.lanes[flight.lane].replicate
        if self.hook is not None or replicas.size == 1:
            self._finish(flight._replace(work=DONE))
        else:
            work = replicas.all_reduce(_as_real(flight.into), "sum", flight.name, self._exact)
            scratch = replicas.all_reduce_scratch_bytes(flight.into, self._exact)
            self._tracker.add("scratch", scratch)
            self._second.append(flight._replace(work=work, joined=None, scratch=scratch))

    def _finish(self, flight: Reduction) -> None:
        """Await the sum over the replicas, and have the average."""
        reduced = flight.into
        with self._streams.landing(flight.lane):
            flight.work.wait()
            if isinstance(flight.work, SparseTotal):
                reduced = self._replace(reduced, flight.work.result)
            if flight.divisor != 1:
                reduced.div_(flight.divisor)
            dtype = flight.buckets[0].flat.shard.dtype
            if reduced.dtype != dtype:
                reduced = self._replace(reduced, reduced.to(dtype))
            for bucket, chunk in zip(flight.buckets, _split(reduced, flight.buckets), strict=True):
                if bucket.flat.is_sparse and not chunk.is_sparse:
                    # a hook has seen it in full
                    unsharded = bucket.flat.unsharded_params[0]
                    chunk = self._replace(chunk, as_rows(chunk[: unsharded.numel()].view(unsharded.shape)))
                bucket.add_reduced(chunk)

    def _replace(self, old: Tensor, new: Tensor) -> Tensor:
        """In the books."""
        self._tracker.add("reduced", size_of(new) - size_of(old))
        return new


def _split(chunks: Tensor, buckets: Sequence[Bucket]) -> Sequence[Tensor]:
    """The chunk of each bucket."""
    if len(buckets) == 1:
        return (chunks,)
    return chunks.split_with_sizes([bucket.flat.layout.shard_numel for bucket in buckets])


def _as_real(tensor: Tensor) -> Tensor:
    """Collectives and sums know no complex numbers: (N,) complex -> (2 N,) real."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
