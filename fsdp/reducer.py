"""Gradients: whole ones to buckets, buckets to reduced shards, reduced shards to `.grad`.

Rule 1: collectives are launched in the agreed order only; what is ready early waits its turn.
Rule 2: nothing reaches `.grad` before `commit`, and `commit` comes after everything that can fail.
Rule 3: in a backward that synchronises, every unit that autograd has passed through, or of which some
        rank has a gradient, is reduced, with zeros for gradients that did not come.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdp.bucket import Bucket, dense
from fsdp.collectives import DONE, Work
from fsdp.groups import Channels
from fsdp.hooked import CommHook, GradientBucket
from fsdp.storage import Ledger, size_of
from fsdp.streams import Streams
from fsdp.unit import Unit


class _Usage(NamedTuple):
    """Which parameters had a gradient, on its way between the ranks."""

    flags: Tensor
    complete: bool
    work: Work


class _Flight(NamedTuple):
    """A reduction in flight."""

    bucket: Bucket
    into: Tensor
    work: Work
    name: str
    """Of the unit."""


class Reducer:
    """The gradients of all units of one root, through one backward at a time."""

    def __init__(self, units: Sequence[Unit], order: Sequence[int], channels: Channels, streams: Streams, ledger: Ledger) -> None:
        self._units = tuple(units)
        self._channels = channels
        self._streams = streams
        self._ledger = ledger
        shards = channels.reductions
        self._buckets = tuple(
            tuple(Bucket(flat, unit.config.mp_policy.reduce_dtype, shards, ledger) for flat in unit.flats) for unit in units
        )
        counts = [[len(bucket.views) for bucket in of_unit] for of_unit in self._buckets]
        ends = accumulate((count for of_unit in counts for count in of_unit), initial=0)
        self._offsets = [[next(ends) for _ in of_unit] for of_unit in counts]
        device = units[0].device
        self._all_used = torch.ones(next(ends), dtype=torch.uint8, device=device)
        self.order = tuple(order)
        """The agreed order, every unit once."""
        self._learned = False
        self._flight: _Flight | None = None
        """Among the ranks that share the shards."""
        self._second_flights: list[_Flight] = []
        """Among those that hold the same shards. What they fill is kept until the commit in any case."""
        self._usage: _Usage | None = None
        self.hook: CommHook | None = None
        """Reduces instead of us, if there is one."""
        self.begin()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients kept under `no_sync` wait for a backward that synchronises."""
        for bucket in self._stashing():
            bucket.forget_zeroed()
        return bool(self._stashing())

    # one backward -------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward begins.

        Raises:
            ShardingError: gradients kept under `no_sync` were edited. Nothing moved.
        """
        for bucket in self._stashing():
            bucket.forget_zeroed()
        self._turn = 0
        self._ready = [False] * len(self._units)
        self._launched = [False] * len(self._units)
        self._arrivals: list[int] = []
        self._shared = False
        self._settled = False
        self._has: list[bool] = []
        """Which units have gradients here that are not launched, as of the end of the backward."""
        self._used: list[bool] = []
        self._hooked: list[nn.Parameter] = []

    def owe(self) -> None:
        """A backward under `no_sync` begins: every rank will take part in reducing what any of them keeps."""
        for buckets in self._buckets:
            for bucket in buckets:
                bucket.owed = bucket.owed or any(bucket.flat.trainable)

    def reduce(self, index: int) -> None:
        """The gradients of a unit are complete: launch what the agreed order allows."""
        if self._launched[index]:
            return  # a second portion in the same backward waits for `flush`
        self._note(index)
        while self._turn < len(self.order) and self._ready[self.order[self._turn]]:
            self._launch(self.order[self._turn])
            self._turn += 1

    def flush(self, index: int) -> None:
        """At the end, in the agreed order: launch what was not launched, or came after it was, if any rank has it."""
        if not self._shared:
            self._share_usage()
        if not self._launched[index]:
            self._note(index)
            if self._has[index] or self._some_rank_has(index):
                self._launch(index)
        elif self._has[index]:
            self._launch(index)

    def commit(self, index: int) -> None:
        """Set or accumulate the reduced gradients of a unit into `.grad` of its shards."""
        self._settle()
        for bucket, offset in zip(self._buckets[index], self._offsets[index], strict=True):
            if bucket.pending is not None:
                reduced, bucket.pending = bucket.pending, None
                self._ledger.add("reduced", -size_of(reduced))
                self._hooked += bucket.put(reduced, self._used[offset:] if self._used else bucket.all_used)

    def run_hooks(self) -> None:
        """After the last commit: run the post-accumulate hooks of the user, who may step an optimizer in them."""
        hooked, self._hooked = self._hooked, []
        for parameter in hooked:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)

    def stash(self, index: int) -> None:
        """End of a backward under `no_sync`: add the whole gradients of a unit to the stash."""
        for bucket in self._buckets[index]:
            for i, whole in enumerate(bucket.flat.whole_parameters):
                if whole.grad is not None:
                    gradient, whole.grad = whole.grad, None
                    bucket.keep(i, dense(gradient).to(bucket.buffer.dtype))

    def drain(self) -> None:
        """Wait until nothing is in flight. Idempotent; raises what the collective raises."""
        flight, self._flight = self._flight, None
        second, self._second_flights = self._second_flights, []
        usage, self._usage = self._usage, None
        flights = second if flight is None else [*second, flight]
        self._ledger.add("reduced", -sum(size_of(one.into) for one in flights))
        failures = []
        for work in (*(one.work for one in flights), *(() if usage is None else (usage.work,))):
            try:
                with self._streams.landing():
                    work.wait()
            except BaseException as failure:  # the others are in flight all the same
                failures.append(failure)
        self._streams.await_reductions()
        if flight is not None:
            self._give_back(flight.bucket)
        if failures:
            raise failures[0]

    def drop(self, index: int) -> None:
        """Forget the gradients of this backward. Those kept by earlier ones under `no_sync` stay. Idempotent."""
        for bucket in self._buckets[index]:
            bucket.launched = False
            if bucket.pending is not None:
                self._ledger.add("reduced", -size_of(bucket.pending))
                bucket.pending = None
            for whole in bucket.flat.whole_parameters:
                whole.grad = None

    # helpers ------------------------------------------------------------------------------

    def _stashing(self) -> list[Bucket]:
        # lent parameters show nothing: their gradients are set aside
        return [b for unit, buckets in zip(self._units, self._buckets, strict=True) if not unit.lent for b in buckets if b.stash]

    def _note(self, index: int) -> None:
        if not self._ready[index]:
            self._ready[index] = True
            self._arrivals.append(index)

    def _launch(self, index: int) -> None:
        self._launched[index] = True
        for bucket in self._buckets[index]:
            if bucket.owed or any(bucket.flat.trainable):
                self._land()
                self._send(bucket, index)
            else:
                # frozen since: what was missing in an earlier backward is no concern of this one
                bucket.came, bucket.complete = bucket.all_used, True

    def _send(self, bucket: Bucket, index: int) -> None:
        """Fill a bucket on the compute stream and reduce it on the reduction stream.

        Shapes:  bucket (W * C,) on each of W ranks  ->  mean of chunk `rank` (C,)
        Memory:  W * C elements until landed, C until committed
        """
        name = self._units[index].name
        if self._channels.reductions.size == 1 and self.hook is None:
            # the chunk is the bucket
            into = bucket.buffer.new_empty(bucket.flat.layout.chunk)
            bucket.fill(into)
            if bucket.predivide:
                into.div_(self._channels.size)
            with self._streams.reducing():
                self._go_on(_Flight(bucket, into, DONE, name))
            # it was allocated on the compute stream, and may be given back already
            self._streams.await_reductions()
            self._ledger.add("reduced", size_of(into))
            return
        bucket.memory.allocate(self._ledger)
        bucket.fill()
        if bucket.predivide and self.hook is None:
            bucket.buffer.div_(self._channels.size)
        with self._streams.reducing():
            into = bucket.buffer.new_empty(bucket.flat.layout.chunk)
            try:
                if self.hook is None:
                    work = self._channels.reductions.reduce_scatter(_as_real(bucket.buffer), _as_real(into), name)
                else:
                    work = self.hook.launch(self._shown(bucket, index), into, name)
            except BaseException:
                bucket.memory.release(self._ledger)
                raise
        self._ledger.add("reduced", size_of(into))
        self._ledger.add("scratch", 0 if self.hook is not None else bucket.scratch)
        self._flight = _Flight(bucket, into, work, name)

    def _shown(self, bucket: Bucket, index: int) -> GradientBucket:
        """A bucket as the hook sees it."""
        number = sum(map(len, self._buckets[:index])) + self._buckets[index].index(bucket)
        reduced = [one for other in self.order for one in self._buckets[other] if one.owed or any(one.flat.trainable)]
        return GradientBucket(bucket, number, bucket is reduced[-1])

    def _land(self) -> None:
        """Await the reduction in flight, so that at most one bucket is in memory; its sum goes on to the other replicas."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        try:
            with self._streams.landing():
                flight.work.wait()
                self._go_on(flight)
            self._streams.await_reductions()
        except BaseException:
            self._ledger.add("reduced", -size_of(flight.into))
            raise
        finally:
            self._give_back(flight.bucket)

    def _go_on(self, flight: _Flight) -> None:
        """A chunk is reduced among those that share the shards: go on to the sum over the replicas."""
        if self.hook is None:
            work = self._channels.replicas.all_reduce(_as_real(flight.into), "sum", flight.name)
            flight = flight._replace(work=work)
        if self.hook is not None or self._channels.replicas.size == 1:
            self._finish(flight)
        else:
            self._second_flights.append(flight)

    def _finish(self, flight: _Flight) -> None:
        """Await the sum over the replicas, and have the average."""
        bucket, reduced, work, _ = flight
        with self._streams.landing():
            if self.hook is None:
                work.wait()
                if not bucket.predivide and self._channels.size > 1:
                    reduced.div_(self._channels.size)
            if reduced.dtype != bucket.flat.shard.dtype:
                self._ledger.add("reduced", -size_of(reduced))
                reduced = reduced.to(bucket.flat.shard.dtype)
                self._ledger.add("reduced", size_of(reduced))
            if bucket.pending is not None:
                bucket.pending.add_(reduced)
                self._ledger.add("reduced", -size_of(reduced))
            else:
                bucket.pending = reduced

    def _give_back(self, bucket: Bucket) -> None:
        self._ledger.add("scratch", 0 if self.hook is not None else -bucket.scratch)
        bucket.memory.release(self._ledger)

    def _settle(self) -> None:
        """Await everything in flight and learn which gradients no rank had. All that can fail is over after this."""
        if self._settled:
            return
        self._settled = True
        if not self._shared:
            self._share_usage()
        self._land()
        while self._second_flights:
            self._finish(self._second_flights[0])
            del self._second_flights[0]
        self._streams.await_reductions()
        self._await_usage()
        if not self._learned:
            self._learn_order()
        for buckets, offsets in zip(self._buckets, self._offsets, strict=True):
            for bucket, offset in zip(buckets, offsets, strict=True):
                bucket.show_to_hooks(self._used[offset:] if self._used else bucket.all_used)

    def _some_rank_has(self, index: int) -> bool:
        """Whether any rank has a gradient of a unit of which there is none here."""
        self._await_usage(read=True)
        return any(
            any(self._used[offset : offset + len(bucket.views)])
            for bucket, offset in zip(self._buckets[index], self._offsets[index], strict=True)
        )

    def _await_usage(self, read: bool = False) -> None:
        """Learn which gradients no rank had, if this rank needs to know: on CUDA the host waits for it."""
        usage, self._usage = self._usage, None
        if usage is not None:
            usage.work.wait()
            self._streams.await_reductions()
            if read or not usage.complete:
                self._used = [bool(flag) for flag in usage.flags.tolist()]

    def _share_usage(self) -> None:
        """Tell the ranks which parameters had a gradient here: one small collective in a backward."""
        self._shared = True
        self._has = [
            any([bucket.take_stock(launched) for bucket in of_unit])
            for of_unit, launched in zip(self._buckets, self._launched, strict=True)
        ]
        buckets = [bucket for of_unit in self._buckets for bucket in of_unit]
        complete = all(bucket.complete for bucket in buckets)
        with self._streams.reducing():
            if complete:
                flags = self._all_used.clone()
            else:
                came = [flag for b in buckets for flag in b.came]
                flags = torch.tensor(came, dtype=torch.uint8, device=self._all_used.device)
            self._usage = _Usage(flags, complete, self._channels.everyone.all_reduce(flags, "max", "which gradients came"))

    def _learn_order(self) -> None:
        """After the first backward that synchronises, rank 0's order of arrival is everyone's."""
        self._learned = True
        arrivals = torch.tensor(self._arrivals, dtype=torch.int64, device=self._all_used.device)
        self._channels.everyone.broadcast(arrivals, 0, "the order of reductions").wait()
        self.order = tuple(int(index) for index in arrivals.tolist())


def _as_real(tensor: Tensor) -> Tensor:
    """Collectives and sums know no complex numbers: (N,) complex -> (2 N,) real."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
