"""Reductions in flight: each takes a bucket group to its reduced shards.

Rule 1: a bucket group is summed over the ranks that share the shards, and its sum over the ranks that hold the same shards.
Rule 2: what is in flight is held here until it was waited for, whatever fails.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fsdp.comm.context import CommContext
from fsdp.comm.work import DONE, TwoPhaseWork, Work
from fsdp.config import ReductionPolicy
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.comm_hook import CommHook, GradBucket
from fsdp.reduction.sparse import SparseTotal
from fsdp.reduction.sparse_bucket import SparseBucket

_SHARD_NUMEL: Final = attrgetter("flat.layout.shard_numel")
_LARGE: Final = 2**16
"""Elements of a chunk from which on dividing it reads from memory, and not from a cache."""


class Reduction(NamedTuple):
    """A reduction in flight."""

    buckets: Sequence[Bucket]
    output: Tensor
    """The reduced chunks of the buckets, one after the other."""
    work: Work
    joined: Tensor | None
    """The gradients of several buckets in one input, if they were joined."""
    divisor: float = 1
    """What the sum is divided by."""
    lane: int = 0
    """The number of its lane."""
    scratch: int = 0
    """Bytes that were allocated for its work, if that says so, until it was waited for."""


class ReductionQueue:
    """The reductions that one root has in flight, in the order of their launches."""

    def __init__(self, policy: ReductionPolicy, comms: CommContext, streams: Streams, tracker: MemoryTracker) -> None:
        self._policy = policy
        self._comms = comms
        self._streams = streams
        self._tracker = tracker
        self._exact = policy.deterministic
        self._averaging_ranks = comms.size
        """How many ranks have gradients that count in the average."""
        self._present = comms.size
        """How many ranks have gradients."""
        self.hook: CommHook | None = None
        """The comm hook that reduces buckets in place of the engine."""
        self._reduce_scatters: list[Reduction] = []
        """Reductions over the ranks that share the shards."""
        self._all_reduces: list[Reduction] = []
        """Reductions over the ranks that hold the same shards. Their outputs are kept until the commit in any case."""
        self._copied_output: Tensor | None = None
        """Memory of the compute stream that a copy to the host still reads. The next launch lets that stream wait for the copy,
        which runs meanwhile."""
        self._launched = 0
        """The number of launches in this backward."""
        self._scalar: Callable[[float], Tensor] = cache(partial(torch.tensor, dtype=torch.float64, device="cpu"))
        """The scalar tensor () that torch makes of a Python number in each operation, which costs as much as a small kernel."""

    def begin(self) -> None:
        """A backward begins: the lanes take turns from the first one on, on every rank."""
        self._launched = 0

    def set_averaging_ranks(self, present: int, divides_by_all: bool = False) -> None:
        """From now on, so many ranks have gradients. Averages are over them, or with `divides_by_all` over all ranks."""
        self._present = present
        self._averaging_ranks = self._comms.size if divides_by_all else present

    def factor_of_part(self, unit: Unit) -> float:
        """By what the gradient of a term that each rank computes of its part of a parameter is multiplied before the sum.

        The divisor of the sum, over the number of ranks that hold the same part: after both, the term counts once.

        Raises:
            ShardingError: inside `fsdp.join`, a rank has finished, and computes no such term of its part.
        """
        if self._present < self._comms.size:
            raise ShardingError(
                "to_local inside fsdp.join: a rank has finished, and nobody computes the term of the part that it holds. Give "
                "every rank as many batches, or leave such terms out."
            )
        factors = unit.settings.divide_factors
        total = prod(factors) if factors else self._averaging_ranks if self._policy.average else 1
        return total * self._comms.reduce_comm.size / self._comms.size

    @property
    def oldest(self) -> Sequence[Bucket]:
        """The buckets of the reduction that is waited for next. Empty: all gradients have left the memory of their buckets."""
        return self._reduce_scatters[0].buckets if self._reduce_scatters else ()

    @property
    def is_full(self) -> bool:
        """Whether no lane is free."""
        return len(self._reduce_scatters) >= len(self._comms.lanes)

    def launch(self, buckets: Sequence[Bucket], remainder: bool) -> bool:
        """Fill the buckets of a group on the compute stream and reduce them on the reduction stream.

        Returns whether their gradients have left the memory of the buckets already.

        Shapes:  buckets (W * C,) on each of W ranks  ->  mean of chunk `rank` (C,)
        Memory:  W * C elements until it was waited for, C until the commit; where several share a collective, small ones twice
                 while they are joined
        """
        lane, self._launched = self._launched % len(self._comms.lanes), self._launched + 1
        if isinstance(buckets[0], SparseBucket):
            self._launch_sparse(buckets[0], lane, remainder)
            return True
        if buckets[0].flat.num_shards == 1:
            self._launch_replicated(buckets, lane, remainder)
            return True
        self._launch_sharded(buckets, lane, remainder)
        return False

    def _launch_sharded(self, buckets: Sequence[Bucket], lane: int, remainder: bool) -> None:
        name, size = buckets[0].name, sum(map(_SHARD_NUMEL, buckets))
        predivisor, divisor = self._divisors(buckets[0], size)
        comm = buckets[0].flat.comms.lane(lane).shard
        joined = None
        try:
            for bucket in buckets:
                bucket.memory.allocate(self._tracker)
                bucket.fill(remainder, divisor=predivisor)
            coalesced = len(buckets) > 1 and comm.supports_coalescing(buckets[0].flat.device, self._exact)
            joined = self._join(buckets) if len(buckets) > 1 and not coalesced else None
            inputs = [bucket.buffer for bucket in buckets] if joined is None else [joined]
            with self._streams.reducing(lane):
                output = inputs[0].new_empty(size)
                if coalesced:
                    chunks = [_as_real(chunk) for chunk in _split(output, buckets)]
                    work = comm.reduce_scatter_coalesced([_as_real(one) for one in inputs], chunks, name)
                else:
                    work = comm.reduce_scatter(_as_real(inputs[0]), _as_real(output), name, self._exact)
        except BaseException:
            self._release(buckets, joined)
            raise
        scratch = getattr(work, "scratch", 0)
        self._tracker.add("reduced", output.nbytes)
        self._tracker.add("scratch", scratch)
        self._reduce_scatters.append(Reduction(buckets, output, work, joined, divisor, lane, scratch))

    def _launch_replicated(self, buckets: Sequence[Bucket], lane: int, remainder: bool) -> None:
        """Launch where the chunk is the whole bucket: the buffer that is filled is the output, and becomes `.grad`."""
        size = sum(map(_SHARD_NUMEL, buckets))
        predivisor, divisor = self._divisors(buckets[0], size)
        if self._copied_output is not None:
            self._streams.await_reductions()
            self._release_copied_output()
        # memory is reused on the host alone: the allocator of a device does so itself
        like, reuses = buckets[0].buffer, len(buckets) == 1 and self._streams.on_host
        output = buckets[0].spare.take(size, like) if reuses else like.new_empty(size)
        for bucket, chunk in zip(buckets, _split(output, buckets), strict=True):
            bucket.fill(remainder, chunk, predivisor)
        with self._streams.reducing(lane):
            self._start_all_reduce(Reduction(buckets, output, DONE, None, divisor, lane))
        self._tracker.add("reduced", size_of(output))
        # the output was allocated on the compute stream, and may be released already
        if buckets[0].flat.home.copies and buckets[0].flat.comms.lane(lane).replicate.size == 1:
            self._copied_output = output
            self._tracker.add("reduced", size_of(output))
        else:
            self._streams.await_reductions()

    def _release_copied_output(self) -> None:
        """The compute stream waits for the copy of its memory to the host: release that memory. Idempotent."""
        if self._copied_output is not None:
            self._tracker.add("reduced", -size_of(self._copied_output))
            self._copied_output = None

    def _launch_sparse(self, bucket: SparseBucket, lane: int, remainder: bool) -> None:
        predivisor, divisor = self._divisors(bucket, 0)
        rows = bucket.take_rows(remainder)
        if predivisor != 1:
            rows = rows / predivisor  # not in place: it may be an accumulated gradient
        with self._streams.reducing(lane):
            work = SparseTotal(rows, bucket.flat.comms.lane(lane).replicate, bucket.name)
        self._tracker.add("reduced", size_of(rows))
        self._all_reduces.append(Reduction((bucket,), rows, work, None, divisor, lane))

    def launch_hooked(self, bucket: Bucket, shown: GradBucket, remainder: bool) -> None:
        """Fill one bucket and let the comm hook reduce it. Its gradients stay in its memory until it was waited for."""
        assert self.hook is not None
        try:
            bucket.memory.allocate(self._tracker)
            bucket.fill(remainder)
            with self._streams.reducing():
                output = bucket.buffer.new_empty(bucket.flat.layout.shard_numel)
                work = self.hook.launch(shown, output, bucket.name)
        except BaseException:
            bucket.memory.release(self._tracker)
            raise
        self._tracker.add("reduced", size_of(output))
        self._reduce_scatters.append(Reduction((bucket,), output, work, None))

    def wait_next(self) -> None:
        """Wait for the oldest reduction over the ranks that share the shards, and start that of its sums over the replicas."""
        reduction = self._reduce_scatters.pop(0)
        try:
            with self._streams.landing(reduction.lane):
                reduction.work.wait()
                self._start_all_reduce(reduction)
            self._streams.await_reductions()
        except BaseException:
            self._tracker.add("reduced", -size_of(reduction.output))
            raise
        finally:
            self._tracker.add("scratch", -reduction.scratch)
            self._release(reduction.buckets, reduction.joined)

    def finish(self) -> None:
        """All gradients have left their buckets: wait for the sums over the replicas."""
        held = []
        while self._all_reduces:
            reduction = self._all_reduces[0]
            with self._streams.landing(reduction.lane):
                reduction.work.wait()
                self._finish(reduction)
            if isinstance(reduction.work, SparseTotal):
                held.append(reduction.output)  # the reduction stream still reads memory of the compute stream
            del self._all_reduces[0]
            self._tracker.add("scratch", -reduction.scratch)
        self._streams.await_reductions()
        self._release_copied_output()
        self._streams.await_copies()

    def drain(self, others: Sequence[Work]) -> None:
        """Wait until no reduction is in flight, nor any of `others`. Idempotent; raises what the first collective raises."""
        reduce_scatters, self._reduce_scatters = self._reduce_scatters, []
        all_reduces, self._all_reduces = self._all_reduces, []
        reductions = [*all_reduces, *reduce_scatters]
        self._tracker.add("reduced", -sum(size_of(one.output) for one in reductions))
        failures = []
        for work, lane in (*((one.work, one.lane) for one in reductions), *((one, 0) for one in others)):
            try:
                with self._streams.landing(lane):  # whose memory it uses; the next step may compute on another stream than this
                    # peers are notified of the failed step, so they end the later stages that they have begun
                    (work.begun if isinstance(work, TwoPhaseWork) else work).wait()
            except BaseException as failure:  # the others are in flight all the same
                failures.append(failure)
        self._streams.await_reductions()
        self._release_copied_output()
        self._tracker.add("scratch", -sum(one.scratch for one in reductions))
        for reduction in reduce_scatters:
            self._release(reduction.buckets, reduction.joined)
        if failures:
            raise failures[0]

    # helpers ------------------------------------------------------------------------------

    def _divisors(self, bucket: Bucket, shard_numel: int) -> tuple[float, float]:
        """The divisors before and after the sum, where this rank gets `shard_numel` elements of the sum."""
        if (factors := bucket.owner.settings.divide_factors) is not None:
            return factors
        total = self._averaging_ranks if self._policy.average else 1
        predivisor = self._policy.predivide_factor
        if predivisor is None:
            # the sum would overflow in half precision, so it is divided first. Otherwise the sum is divided, of which a rank may
            # have a shard alone. But on the host a power of two divides without rounding, and for free while much is copied
            free = shard_numel >= _LARGE and total & (total - 1) == 0 and bucket.buffer.device.type == "cpu"
            first = not self._exact and (free or bucket.flat.num_shards == 1)
            predivisor = total if first or bucket.buffer.dtype is torch.float16 else 1
        return predivisor, total / predivisor

    def _join(self, buckets: Sequence[Bucket]) -> Tensor:
        """One tensor with the chunks of each rank together: (W * C1,), (W * C2,) -> (W * (C1 + C2),)."""
        ranks = buckets[0].flat.num_shards
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

    def _start_all_reduce(self, reduction: Reduction) -> None:
        """Start the sum of reduced chunks over the replicas, if there are any."""
        replicas = reduction.buckets[0].flat.comms.lane(reduction.lane).replicate
        if self.hook is not None or replicas.size == 1:
            self._finish(reduction)
        else:
            work = replicas.all_reduce(_as_real(reduction.output), "sum", reduction.buckets[0].name, self._exact)
            scratch = getattr(work, "scratch", 0)
            self._tracker.add("scratch", scratch)
            self._all_reduces.append(reduction._replace(work=work, joined=None, scratch=scratch))

    def _finish(self, reduction: Reduction) -> None:
        """Divide a sum that is complete, and hand each bucket its chunk. Called on the stream of its lane."""
        reduced, buckets = reduction.output, reduction.buckets
        if isinstance(reduction.work, SparseTotal):
            reduced = self._replace(reduced, reduction.work.result)
        if reduction.divisor != 1:
            reduced.div_(self._scalar(reduction.divisor))
        for place, bucket in enumerate(buckets):
            if (hook := bucket.owner.settings.after_reduction) is not None:
                hook(_split(reduced, buckets)[place])
        dtype = buckets[0].flat.shard.dtype
        if reduced.dtype != dtype:
            reduced = self._replace(reduced, reduced.to(dtype))
        is_added = any([bucket.reduced is not None for bucket in buckets])
        if is_added:
            self._streams.await_reductions()  # a remainder is added to the first chunk, which is another lane's
        reduced = buckets[0].flat.home.receive(reduced, is_added, self._streams, self._tracker)
        for bucket, chunk in zip(buckets, _split(reduced, buckets), strict=True):
            bucket.add_reduced(chunk)

    def _replace(self, old: Tensor, new: Tensor) -> Tensor:
        """Count the new tensor in place of the old one."""
        self._tracker.add("reduced", size_of(new) - size_of(old))
        return new


def _split(chunks: Tensor, buckets: Sequence[Bucket]) -> Sequence[Tensor]:
    if len(buckets) == 1:
        return (chunks,)
    return chunks.split_with_sizes([bucket.flat.layout.shard_numel for bucket in buckets])


def _as_real(tensor: Tensor) -> Tensor:
    """Collectives and sums do not support complex numbers: (N,) complex -> (2 N,) real."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
