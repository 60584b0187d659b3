"""Gradients: whole ones to buckets, buckets to reduced shards, reduced shards to `.grad`.

Rule 1: collectives are launched in the agreed order only; what is ready early waits its turn.
Rule 2: nothing reaches `.grad` before `commit`, and `commit` comes after everything that can fail.
Rule 3: in a backward that synchronises, every unit that autograd has passed through, or of which some
        rank has a gradient, is reduced, with zeros for gradients that did not come.

[Note: counted buckets]
A unit is ready at a moment every rank comes to (backward_progress.py). A bucket whose gradients have all come may be
launched before that moment, which peers with other gradients do not share, as long as nobody waits for it
until then: so it is launched only when its turn has come, and awaited only when its unit is ready. What is
awaited to make room for it is of units that are ready here, which all ranks come to whatever this one does.
With gathers between the ranks that holds for units without units inside; without gathers, for all.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import nn

from fsdp.comm.context import CommContext
from fsdp.config import MeshKind, ReductionPolicy
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.device.streams import Streams
from fsdp.params.unit import Unit
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.bucketing import BucketGroup, Item, make_bucket_groups
from fsdp.reduction.comm_hook import CommHook, GradBucket
from fsdp.reduction.in_flight import ReductionQueue
from fsdp.reduction.stats import ReducerStats
from fsdp.reduction.used_params import UsedParams


class Reducer:
    """The gradients of all units of one root, through one backward at a time."""

    def __init__(
        self,
        units: Sequence[Unit],
        innermost: Sequence[bool],
        comms: CommContext,
        streams: Streams,
        tracker: MemoryTracker,
    ) -> None:
        self._units = tuple(units)
        self._comms = comms
        self._streams = streams
        self._tracker = tracker
        self.policy = units[0].config.reduction
        self._cap = units[0].config.bucket_bytes
        self._replicated = units[0].config.mesh_kind is MeshKind.REPLICATE
        self.buckets = tuple(
            Bucket(
                flat, index, unit.name, _reduce_dtype(unit, flat.unsharded.dtype, self.policy), unit.config.keeps_buckets, tracker
            )
            for index, unit in enumerate(units)
            for flat in unit.flats
        )
        numbers = range(len(self.buckets))
        self.of_unit: list[list[int]] = [[] for _ in units]
        for number, bucket in enumerate(self.buckets):
            self.of_unit[bucket.unit].append(number)
        self._device = units[0].device
        self._used_params = UsedParams(self.buckets, self.policy.static_graph, comms.world_comm, streams, self._device)
        self._queue = ReductionQueue(self.policy, comms, streams, tracker)
        self.early = frozenset(number for number in numbers if self._may_count(number, innermost))
        """The buckets that may be launched when their gradients have come, before their unit is ready."""
        self.stats = ReducerStats()
        self.ignores_local_grads = False
        """The gradients of this rank count for nothing, but for those it keeps since before (`join`)."""
        # a unit with units inside is complete late: it comes after all that have none
        backwards = range(len(units) - 1, -1, -1)
        order = [i for i in backwards if innermost[i]] + [i for i in backwards if not innermost[i]]
        self._default_order = order
        self._learned: dict[tuple[bool, ...], tuple[Sequence[int], Sequence[int]]] = {}
        """The orders of units and of buckets, by what is trainable."""
        self._agree_on(order, self._in_units(order))
        self.begin()

    def set_averaging_ranks(self, ranks: int) -> None:
        """From now on, that many ranks have gradients that count."""
        self._queue.ranks = ranks

    @property
    def hook(self) -> CommHook | None:
        """Reduces instead of us, if there is one."""
        return self._queue.hook

    @hook.setter
    def hook(self, hook: CommHook) -> None:
        self._queue.hook = hook
        self._plan()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients kept under `no_sync` wait for a backward that synchronises."""
        for bucket in self._accumulating():
            bucket.drop_zeroed()
        return bool(self._accumulating())

    def relearn(self) -> None:
        """Learn the order anew in the next backward that synchronises."""
        self._learned.clear()

    # one backward -------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward begins.

        Raises:
            ShardingError: gradients kept under `no_sync` were edited. Nothing moved.
        """
        for bucket in self._accumulating():
            bucket.drop_zeroed()
        count = len(self.buckets)
        self.stats.begin()
        self._queue.begin()
        self._turn = 0
        self._ready: list[float] = [0.0] * count
        """When each bucket was ready, or 0."""
        self._launched = [False] * count
        self._over = [False] * len(self._units)
        """Which units were ready once."""
        self._again = [False] * len(self._units)
        """Which were gathered, or ready, once more after that, on every rank."""
        self._closing = [False] * len(self._units)
        self._expected = {number: sum(self.buckets[number].flat.requires_grad_flags) for number in self.early}
        self._arrivals: list[int] = []
        self._used_params.begin()
        self._settled = False
        self._hooked: list[tuple[int, nn.Parameter]] = []
        self._trainable = tuple(bucket.is_trained for bucket in self.buckets)
        known = self._learned.get(self._trainable)
        if known is not None and known[1] is not self._sequence:
            self._agree_on(*known)

    def expect_accumulated(self) -> None:
        """A backward under `no_sync` begins: every rank will take part in reducing what any of them keeps."""
        for bucket in self.buckets:
            bucket.any_rank_accumulated = bucket.any_rank_accumulated or any(bucket.flat.requires_grad_flags)

    def reached_again(self, index: int) -> None:
        """A unit that was done is gathered again in the same backward: every rank expects a second portion."""
        self._again[index] = self._again[index] or self._over[index]

    def expect_only_used(self, comes: Callable[[nn.Parameter], bool]) -> None:
        """A backward that synchronises begins, which may pass parameters by: do not wait for these."""
        for number, bucket in enumerate(self.buckets):
            flat = bucket.flat
            count = sum(trains and comes(p) for p, trains in zip(flat.unsharded_params, flat.requires_grad_flags, strict=True))
            if number in self.early:
                self._expected[number] = count
            if not count:
                # no arrival: another backward may use it, in the order that is learned now
                self._ready[number] = perf_counter()

    def arrived(self, number: int) -> bool:
        """One more gradient of a counted bucket came; return whether that makes launching possible."""
        self._expected[number] -= 1
        # a hook may wait for its collectives where they end: one at a time
        if self._expected[number] or self.policy.at_end or self.hook is not None:
            return False
        self._note(number)
        return True

    def reduce(self, index: int) -> None:
        """The gradients of a unit are complete: launch what the agreed order allows."""
        self._again[index], self._over[index] = self._over[index], True
        for number in self.of_unit[index]:
            self._note(number)
        if not self.policy.at_end:
            self.advance()

    def advance(self) -> None:
        """Launch what is ready, in the agreed order, and await those before: one bucket a lane is in memory (see the note)."""
        while self._turn < len(self._groups):
            group = self._groups[self._turn]
            if not all([self._ready[number] for number in group]):
                return
            self._turn += 1
            self._launch(group)

    def flush(self, index: int) -> None:
        """At the end, in the agreed order: launch what was not launched, or came after it was, if any rank has it."""
        used_params = self._used_params
        if not used_params.shared:
            for bucket in self.buckets:
                self._ignore_local_grads(bucket)
            if self.policy.find_unused_parameters:
                self._launch_all()
            used_params.exchange(self._launched)
        self._closing[index] = True
        while self._turn < len(self._groups):
            group = self._groups[self._turn]
            if not all([self._ready[number] or self._closing[self.buckets[number].unit] for number in group]):
                break
            self._turn += 1
            wanted = tuple(n for n in group if self._ready[n] or used_params.has_grad[n] or used_params.any_rank_has_grad(n))
            for number in group:
                self._note(number)
            if wanted:
                self._launch(wanted)
        if all(self._closing):
            self._launch_remainders()

    def commit(self, index: int) -> None:
        """Set or accumulate the reduced gradients of a unit into `.grad` of its shards."""
        self._settle()
        for number in self.of_unit[index]:
            bucket = self.buckets[number]
            if bucket.reduced_shard is not None:
                reduced, bucket.reduced_shard = bucket.reduced_shard, None
                self._tracker.add("reduced", -size_of(reduced))
                self._hooked += [(index, parameter) for parameter in bucket.put(reduced, self._used_params.used(number))]

    def run_hooks(self, note: Callable[[BaseException, int], None]) -> None:
        """After the last commit: run the post-accumulate hooks of the user; `note` is told what one raises, and in which unit."""
        hooked, self._hooked = self._hooked, []
        for index, parameter in hooked:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                try:
                    hook(parameter)
                except BaseException as failure:
                    note(failure, index)
                    raise

    def accumulate_unsharded(self, index: int) -> None:
        """End of a backward under `no_sync`: add the whole gradients of a unit to the stash."""
        for number in self.of_unit[index]:
            bucket = self.buckets[number]
            self._ignore_local_grads(bucket)
            for i, unsharded in enumerate(bucket.flat.unsharded_params):
                if unsharded.grad is not None:
                    gradient, unsharded.grad = unsharded.grad, None
                    bucket.keep(i, gradient)

    def drain(self) -> None:
        """Wait until nothing is in flight. Idempotent; raises what the collective raises."""
        question = self._used_params.take()
        self._queue.drain(() if question is None else (question.work,))

    def drop(self, index: int) -> None:
        """Forget the gradients of this backward. Those kept by earlier ones under `no_sync` stay. Idempotent."""
        for number in self.of_unit[index]:
            bucket = self.buckets[number]
            bucket.launched, bucket.filled = False, None
            if bucket.reduced_shard is not None:
                self._tracker.add("reduced", -size_of(bucket.reduced_shard))
                bucket.reduced_shard = None
            for unsharded in bucket.flat.unsharded_params:
                unsharded.grad = None

    # the order ----------------------------------------------------------------------------

    def _agree_on(self, order: Sequence[int], sequence: Sequence[int]) -> None:
        self.order = tuple(order)
        """Of the units, every one once."""
        self._sequence = sequence
        """Of the buckets."""
        self._plan()

    def _plan(self) -> None:
        # a hook is shown the buckets one by one, the same in every step
        cap = None if self.hook is not None else self._cap
        items = [
            Item(
                size_of(bucket.buffer),
                # a sparse one has a collective of its own
                (bucket.dtype, bucket.flat.shard.dtype, bucket.flat.device, number if bucket.flat.is_sparse else None),
                any(place.names[0] in self.policy.triggers for place in bucket.flat.param_infos[:1]),
            )
            for number, bucket in enumerate(self.buckets)
        ]
        first, tapers = int(self.policy.first_bucket_mb * 2**20), self._units[0].config.tapers
        self._groups: Sequence[BucketGroup] = make_bucket_groups(self._sequence, items, cap, first, tapers)

    def _in_units(self, order: Sequence[int]) -> Sequence[int]:
        """The buckets of units in their order; those of one unit from the last to the first, as a backward goes."""
        return tuple(number for index in order for number in reversed(self.of_unit[index]))

    def forget_kept(self) -> None:
        """Let go of what is kept under `no_sync`."""
        for bucket in self.buckets:
            bucket.forget_all()

    def _learn_order(self) -> None:
        """After the first backward that synchronises, rank 0's order of arrival is everyone's."""
        # what is not among the arrivals was not waited for
        every = dict.fromkeys((*self._arrivals, *self._in_units(self._default_order)))
        arrivals = torch.tensor(list(every), dtype=torch.int64, device=self._device)
        self._comms.world_comm.broadcast(arrivals, 0, "the order of reductions").wait()
        sequence = [int(number) for number in arrivals.tolist()]
        units = dict.fromkeys(self.buckets[number].unit for number in sequence)
        order = (*units, *(index for index in self._default_order if index not in units))
        # with gathers between the ranks, the buckets of a unit come at the moment of the unit (see the note)
        self._learned[self._trainable] = order, tuple(sequence) if self._replicated else self._in_units(order)
        self._agree_on(*self._learned[self._trainable])

    # helpers ------------------------------------------------------------------------------

    def _may_count(self, number: int, innermost: Sequence[bool]) -> bool:
        """Whether it is of use, and safe, to launch a bucket before its unit is ready (see the note)."""
        unit = self.buckets[number].unit
        cut = sum(self.buckets[one].is_trained for one in self.of_unit[unit]) > 1
        return (cut and innermost[unit]) or (self._replicated and not innermost[unit])

    def _accumulating(self) -> list[Bucket]:
        # lent parameters show nothing: their gradients are set aside
        return [bucket for bucket in self.buckets if bucket.accumulated and not self._units[bucket.unit].has_full_params]

    def _note(self, number: int) -> None:
        if not self._ready[number]:
            self._ready[number] = perf_counter()
            self._arrivals.append(number)

    def _launch(self, group: BucketGroup) -> None:
        buckets = []
        for number in group:
            self._launched[number] = True
            bucket = self.buckets[number]
            self._ignore_local_grads(bucket)
            if bucket.is_trained:
                buckets.append(bucket)
            else:
                # frozen since: what was missing in an earlier backward is no concern of this one
                bucket.used_here, bucket.all_used_here = bucket.all_used, True
        if not buckets:
            return
        self._queue.wait_for_slot(buckets, self._is_everywhere)
        if self.hook is None:
            self._queue.launch(buckets)
        else:
            self._queue.launch_hooked(buckets[0], self._shown(buckets[0], group[0]))
        self.stats.note(buckets, max([self._ready[number] for number in group]))

    def _is_everywhere(self, bucket: Bucket) -> bool:
        """Whether every rank launches a bucket that is in flight here, whatever this one waits for before it goes on."""
        return self._over[bucket.unit] or self._closing[bucket.unit] or self._replicated

    def _ignore_local_grads(self, bucket: Bucket) -> None:
        if self.ignores_local_grads:
            for unsharded in bucket.flat.unsharded_params:
                unsharded.grad = None

    def _shown(self, bucket: Bucket, number: int) -> GradBucket:
        """A bucket as the hook sees it."""
        last = next(one for one in reversed(self._sequence) if self.buckets[one].is_trained)
        return GradBucket(bucket, number, number == last)

    def _launch_all(self) -> None:
        """Where ranks come through different units, every one reduces all of them before they say who has what."""
        for number in range(len(self.buckets)):
            self._note(number)
        self.advance()

    def _launch_remainders(self) -> None:
        """What came after its bucket was launched, on any rank, in the agreed order.

        Where every rank launched at the moment of the unit, a second portion is one of a unit that all of them come to again. A
        counted bucket, whatever has its turn after one, and a bucket of a rank that came through other units, may have one on
        some ranks only: all of them look, also those that had launched nothing of it before they were asked.
        """
        if self.policy.at_end:
            return  # nobody launched anything before
        used_params, everywhere = self._used_params, self.policy.find_unused_parameters or bool(self.early)
        for number in self._sequence:
            looks = everywhere or self._again[self.buckets[number].unit]
            mine = used_params.launched[number] and used_params.has_grad[number]
            if mine or (looks and used_params.any_rank_has_remainder(number)):
                self._launch((number,))

    def _settle(self) -> None:
        """Await everything in flight and learn which gradients no rank had. All that can fail is over after this."""
        if self._settled:
            return
        self._settled = True
        if not self._used_params.shared:
            self._used_params.exchange(self._launched)
        self._queue.wait_all()
        self._used_params.wait_all()
        for number, bucket in enumerate(self.buckets):
            if self._used_params.has_grad[number] and not self._launched[number]:
                raise RuntimeError(
                    f"gradients of unit {bucket.name!r} were not reduced (missing here: "
                    f"{', '.join(bucket.missing_params(bucket.used_here)) or 'none'}); this is a bug in fsdp, please report it."
                )
        if self._trainable not in self._learned:
            self._learn_order()
        for number, bucket in enumerate(self.buckets):
            bucket.show_to_hooks(self._used_params.used(number))
        self.stats.end()


def _reduce_dtype(unit: Unit, dtype: torch.dtype, reduction: ReductionPolicy) -> torch.dtype:
    """In which gradients of parameters that compute in `dtype` are reduced."""
    policy = unit.config.mp_policy.reduce_dtype
    wanted = dtype if policy is None or not dtype.is_floating_point else policy
    halved = wanted.is_floating_point and wanted.itemsize < 4
    return torch.float32 if halved and reduction.deterministic else wanted
