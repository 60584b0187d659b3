"""Gradients: whole ones to buckets, buckets to reduced shards, reduced shards to `.grad`.

Rule 1: collectives are launched in the agreed order only; what is ready early waits its turn.
Rule 2: nothing reaches `.grad` before `commit`, and `commit` comes after everything that can fail.
Rule 3: every unit with something to train is reduced exactly once in a backward that synchronises,
        with zeros for gradients that did not come: a peer may have them.
"""

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import is_
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fsdp.collectives import Collectives, Work
from fsdp.stash import Kept
from fsdp.storage import Ledger, Memory, size_of
from fsdp.streams import Streams
from fsdp.unit import FlatBuffer, Unit


class _Bucket:
    """How one flat buffer is reduced: its bucket, views into it, and what has been reduced."""

    __slots__ = (
        "_ledger",
        "all_used",
        "buffer",
        "came",
        "complete",
        "flat",
        "memory",
        "pending",
        "predivide",
        "scratch",
        "stash",
        "views",
    )

    def __init__(self, flat: FlatBuffer, reduce_dtype: torch.dtype | None, collectives: Collectives, ledger: Ledger) -> None:
        self.flat = flat
        self._ledger = ledger
        dtype = reduce_dtype if reduce_dtype is not None and flat.whole.is_floating_point() else flat.whole.dtype
        self.predivide = dtype is torch.float16
        """Half precision would overflow in the sum; every other dtype is divided after it, on the shard alone."""
        self.buffer = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
        self.views = [self.buffer[slot.start : slot.end].view(slot.shape) for slot in flat.layout.slots]
        self.scratch = collectives.scratch_bytes(self.buffer)
        self.memory = Memory(self.buffer, "bucket")
        self.pending: Tensor | None = None
        self.stash: dict[int, Kept] = {}
        self.all_used = [True] * len(self.views)
        self.complete = True
        """Every trainable parameter had a gradient on this rank in this backward."""
        self.came = self.all_used
        """Which had one."""

    def forget_zeroed(self) -> None:
        """Drop gradients kept under `no_sync` that the user has zeroed since."""
        flat = self.flat
        dead = [i for i, kept in self.stash.items() if not kept.alive(flat.shard_parameters[i], flat.places[i].names[0])]
        for i in dead:
            self.forget(i)

    def keep(self, i: int, gradient: Tensor) -> None:
        """Add a whole gradient to what is kept under `no_sync`."""
        kept = self.stash.get(i)
        if kept is not None:
            kept.whole.add_(gradient)
            return
        shard, part = self.flat.shard_parameters[i], self.flat.parts[i]
        own = gradient.reshape(-1)[part.first : part.first + part.numel].view(part.shape)
        self.stash[i] = Kept(gradient, shard, own.to(shard.dtype, copy=True))
        self._ledger.add("kept", size_of(gradient))

    def forget(self, i: int) -> Kept | None:
        """Let go of what is kept of one parameter, if anything is."""
        kept = self.stash.pop(i, None)
        if kept is not None:
            self._ledger.add("kept", -size_of(kept.whole))
        return kept

    def fill(self) -> None:
        """Copy the whole gradients, and those kept under `no_sync`, into the bucket, and drop the former."""
        flat = self.flat
        gradients = [whole.grad for whole in flat.whole_parameters]
        for whole in flat.whole_parameters:
            whole.grad = None
        second = self.pending is not None
        if not self.stash and not any(map(is_, gradients, repeat(None))):
            self.came, self.complete = self.all_used, True
            torch._foreach_copy_(self.views, cast(list[Tensor], gradients))
            return
        came_before = self.came if second else [False] * len(self.views)
        self.came = []
        for i, (view, gradient) in enumerate(zip(self.views, gradients, strict=True)):
            # what was kept went with the first portion
            kept = None if second else self.stash.get(i)
            parts = [part for part in (gradient, None if kept is None else kept.whole) if part is not None]
            self.came.append(came_before[i] or bool(parts))
            if parts:
                view.copy_(parts[0])
            else:
                view.zero_()
            for part in parts[1:]:
                view.add_(part)
        self.complete = all(came or not trainable for came, trainable in zip(self.came, flat.trainable, strict=True))

    def put(self, reduced: Tensor, used: Sequence[bool]) -> None:
        """Set or accumulate one reduced shard (C,) into `.grad` of the shard parameters.

        A parameter of which this rank holds nothing keeps `.grad` None: optimizers pass it by.
        """
        flat = self.flat
        parts = torch.split_with_sizes(reduced, flat.segments)
        targets, sums = [], []
        for i, segment, shape in flat.held:
            parameter = flat.shard_parameters[i]
            if not used[i] or not parameter.requires_grad:
                continue
            gradient = parts[segment].view(shape)
            before = parameter.grad
            kept = self.forget(i)
            if before is None or (kept is not None and kept.shown_is_ours):
                parameter.grad = gradient
            else:
                targets.append(before)
                sums.append(gradient)
        if targets:
            torch._foreach_add_(targets, sums)
        for i in list(self.stash):
            # what is left was shown for parameters this rank holds nothing of, or that were frozen since
            kept = self.forget(i)
            if kept is not None and kept.shown_is_ours:
                flat.shard_parameters[i].grad = None


class _Usage(NamedTuple):
    """Which parameters had a gradient, on its way between the ranks."""

    flags: Tensor
    complete: bool
    work: Work


class _Flight(NamedTuple):
    """A reduction in flight."""

    bucket: _Bucket
    into: Tensor
    work: Work


class Reducer:
    """The gradients of all units of one root, through one backward at a time."""

    def __init__(
        self, units: Sequence[Unit], order: Sequence[int], collectives: Collectives, streams: Streams, ledger: Ledger
    ) -> None:
        self._units = tuple(units)
        self._collectives = collectives
        self._streams = streams
        self._ledger = ledger
        self._buckets = tuple(
            tuple(_Bucket(flat, unit.config.mp_policy.reduce_dtype, collectives, ledger) for flat in unit.flats) for unit in units
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
        self._usage: _Usage | None = None
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
        self._settled = False
        self._used: list[bool] = []

    def reduce(self, index: int) -> None:
        """The gradients of a unit are complete: launch what the agreed order allows."""
        if self._launched[index]:
            return  # a second portion in the same backward waits for `flush`
        self._note(index)
        while self._turn < len(self.order) and self._ready[self.order[self._turn]]:
            self._launch(self.order[self._turn])
            self._turn += 1

    def flush(self, index: int) -> None:
        """At the end, in the agreed order: launch what was not launched, or came after it was."""
        if not self._launched[index]:
            self._note(index)
            self._launch(index)
        elif any(whole.grad is not None for whole in self._units[index].whole_parameters):
            self._launch(index)

    def commit(self, index: int) -> None:
        """Set or accumulate the reduced gradients of a unit into `.grad` of its shards."""
        self._settle()
        for bucket, offset in zip(self._buckets[index], self._offsets[index], strict=True):
            if bucket.pending is not None:
                reduced, bucket.pending = bucket.pending, None
                self._ledger.add("reduced", -size_of(reduced))
                bucket.put(reduced, self._used[offset:] if self._used else bucket.all_used)

    def stash(self, index: int) -> None:
        """End of a backward under `no_sync`: add the whole gradients of a unit to the stash."""
        for bucket in self._buckets[index]:
            for i, whole in enumerate(bucket.flat.whole_parameters):
                if whole.grad is not None:
                    gradient, whole.grad = whole.grad, None
                    bucket.keep(i, gradient.to(bucket.buffer.dtype))

    def drain(self) -> None:
        """Wait until nothing is in flight. Idempotent; raises what the collective raises."""
        flight, self._flight = self._flight, None
        usage, self._usage = self._usage, None
        try:
            if flight is not None:
                self._ledger.add("reduced", -size_of(flight.into))
                flight.work.wait()
            if usage is not None:
                usage.work.wait()
        finally:
            self._streams.await_reductions()
            if flight is not None:
                self._give_back(flight.bucket)

    def drop(self, index: int) -> None:
        """Forget the gradients of this backward. Those kept by earlier ones under `no_sync` stay. Idempotent."""
        for bucket in self._buckets[index]:
            if bucket.pending is not None:
                self._ledger.add("reduced", -size_of(bucket.pending))
                bucket.pending = None
            for whole in bucket.flat.whole_parameters:
                whole.grad = None

    # helpers ------------------------------------------------------------------------------

    def _stashing(self) -> list[_Bucket]:
        # lent parameters show nothing: their gradients are set aside
        return [b for unit, buckets in zip(self._units, self._buckets, strict=True) if not unit.lent for b in buckets if b.stash]

    def _note(self, index: int) -> None:
        if not self._ready[index]:
            self._ready[index] = True
            self._arrivals.append(index)

    def _launch(self, index: int) -> None:
        self._launched[index] = True
        for bucket in self._buckets[index]:
            if any(bucket.flat.trainable):
                self._land()
                self._send(bucket, self._units[index].name)
            else:
                # frozen since: what was missing in an earlier backward is no concern of this one
                bucket.came, bucket.complete = bucket.all_used, True

    def _send(self, bucket: _Bucket, name: str) -> None:
        """Fill a bucket on the compute stream and reduce it on the reduction stream.

        Shapes:  bucket (W * C,) on each of W ranks  ->  mean of chunk `rank` (C,)
        Memory:  W * C elements until landed, C until committed
        """
        bucket.memory.allocate(self._ledger)
        bucket.fill()
        if bucket.predivide:
            bucket.buffer.div_(self._collectives.size)
        with self._streams.reducing():
            into = bucket.buffer.new_empty(bucket.flat.layout.chunk)
            self._ledger.add("reduced", size_of(into))
            self._ledger.add("scratch", bucket.scratch)
            work = self._collectives.reduce_scatter(_as_real(bucket.buffer), _as_real(into), name)
        self._flight = _Flight(bucket, into, work)

    def _land(self) -> None:
        """Await the reduction in flight, so that at most one bucket is in memory."""
        if self._flight is None:
            return
        bucket, reduced, work = self._flight
        self._flight = None
        with self._streams.landing():
            work.wait()
            if not bucket.predivide and self._collectives.size > 1:
                reduced.div_(self._collectives.size)
            if reduced.dtype != bucket.flat.shard.dtype:
                self._ledger.add("reduced", -size_of(reduced))
                reduced = reduced.to(bucket.flat.shard.dtype)
                self._ledger.add("reduced", size_of(reduced))
            if bucket.pending is not None:
                bucket.pending.add_(reduced)
                self._ledger.add("reduced", -size_of(reduced))
            else:
                bucket.pending = reduced
        self._streams.await_reductions()
        self._give_back(bucket)

    def _give_back(self, bucket: _Bucket) -> None:
        self._ledger.add("scratch", -bucket.scratch)
        bucket.memory.release(self._ledger)

    def _settle(self) -> None:
        """Await everything in flight and learn which gradients no rank had. All that can fail is over after this."""
        if self._settled:
            return
        self._settled = True
        self._share_usage()
        self._land()
        assert self._usage is not None
        usage, self._usage = self._usage, None
        usage.work.wait()
        self._streams.await_reductions()
        if not usage.complete:
            self._used = [bool(flag) for flag in usage.flags.tolist()]
        if not self._learned:
            self._learn_order()

    def _share_usage(self) -> None:
        """Tell the ranks which parameters had a gradient here: one small collective in a backward."""
        buckets = [bucket for of_unit in self._buckets for bucket in of_unit]
        complete = all(bucket.complete for bucket in buckets)
        with self._streams.reducing():
            if complete:
                flags = self._all_used.clone()
            else:
                came = [flag for b in buckets for flag in b.came]
                flags = torch.tensor(came, dtype=torch.uint8, device=self._all_used.device)
            self._usage = _Usage(flags, complete, self._collectives.all_reduce(flags, "max", "which gradients came"))

    def _learn_order(self) -> None:
        """After the first backward that synchronises, rank 0's order of arrival is everyone's."""
        self._learned = True
        arrivals = torch.tensor(self._arrivals, dtype=torch.int64, device=self._all_used.device)
        self._collectives.broadcast(arrivals, 0, "the order of reductions").wait()
        self.order = tuple(int(index) for index in arrivals.tolist())


def _as_real(tensor: Tensor) -> Tensor:
    """Collectives and sums know no complex numbers: (N,) complex -> (2 N,) real."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
