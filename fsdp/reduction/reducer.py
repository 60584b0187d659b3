"""Gradients: whole ones to buckets, buckets to reduced shards, reduced shards to `.grad`.

Rule 1: collectives are launched in the agreed order only; what is ready early waits its turn.
Rule 2: nothing reaches `.grad` before `commit`, and `commit` comes after everything that can fail.
Rule 3: in a backward that synchronises, every unit that autograd has passed through, or of which some
        rank has a gradient, is reduced, with zeros for gradients that did not come.
Rule 4: the tables of `state_machine.bucket` decide what happens to a bucket, and this file carries it out.
"""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import torch
from torch import nn

from fsdp.comm.context import CommContext
from fsdp.config import MeshKind, ReductionPolicy
from fsdp.device.storage import MemoryTracker
from fsdp.device.streams import Streams
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.comm_hook import CommHook, GradBucket
from fsdp.reduction.in_flight import ReductionQueue
from fsdp.reduction.order import ReductionOrder
from fsdp.reduction.stats import ReducerStats
from fsdp.reduction.used_params import UsedParams
from state_machine.bucket import BucketAction, BucketEvent, BucketKind, UnitEvent
from state_machine.bucket_queue import BucketQueue


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
        self._replicated = units[0].config.mesh_kind is MeshKind.REPLICATE
        flats = [(index, unit, flat) for index, unit in enumerate(units) for flat in unit.flats]
        self.buckets = tuple(
            Bucket(number, flat, index, unit.name, _reduce_dtype(unit, flat, self.policy), unit.config.keeps_buckets, tracker)
            for number, (index, unit, flat) in enumerate(flats)
        )
        numbers = range(len(self.buckets))
        self.of_unit: list[list[int]] = [[] for _ in units]
        for number, bucket in enumerate(self.buckets):
            self.of_unit[bucket.unit].append(number)
        self._device = units[0].device
        self._used_params = UsedParams(self.buckets, self.policy.static_graph, comms.world_comm, streams, self._device)
        self._reductions = ReductionQueue(self.policy, comms, streams, tracker)
        self.early = frozenset(number for number in numbers if self._may_count(number, innermost))
        """The buckets that may be launched when their gradients have come, before their unit is ready."""
        self._queue = BucketQueue(
            [bucket.name for bucket in self.buckets],
            [bucket.unit for bucket in self.buckets],
            [*map(self._kind, numbers)],
            len(units),
        )
        self.stats = ReducerStats()
        self.ignores_local_grads = False
        """The gradients of this rank count for nothing, but for those it keeps since before (`join`)."""
        self._order = ReductionOrder(self.buckets, self.of_unit, innermost, units[0].config)
        self._plan()
        self.begin()

    @property
    def order(self) -> Sequence[int]:
        """The numbers of all units in the agreed order."""
        return self._order.units

    def set_averaging_ranks(self, ranks: int) -> None:
        """From now on, that many ranks have gradients that count."""
        self._reductions.ranks = ranks

    @property
    def hook(self) -> CommHook | None:
        """Reduces instead of us, if there is one."""
        return self._reductions.hook

    @hook.setter
    def hook(self, hook: CommHook) -> None:
        self._reductions.hook = hook
        self._plan()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients kept under `no_sync` wait for a backward that synchronises."""
        for bucket in self._accumulating():
            bucket.drop_zeroed()
        return bool(self._accumulating())

    def relearn(self) -> None:
        """Learn the order anew in the next backward that synchronises."""
        self._order.relearn()

    # one backward -------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward begins.

        Raises:
            ShardingError: gradients kept under `no_sync` were edited. Nothing moved.
        """
        for bucket in self._accumulating():
            bucket.drop_zeroed()
        self.stats.begin()
        self._reductions.begin()
        self._used_params.begin()
        self._ready_at = [perf_counter()] * len(self.buckets)
        """When each bucket was ready, for those that were."""
        # a hook may wait for its collectives where they end, one at a time: nothing comes early
        self._expected = {n: 0 if self.hook is not None else sum(self.buckets[n].flat.requires_grad_flags) for n in self.early}
        """How many gradients each bucket waits for that may be launched early. Below 1: for none."""
        self._flushed = 0
        """Units."""
        self._settled = False
        self._hooked: list[tuple[int, nn.Parameter]] = []
        self._trainable = tuple(bucket.is_trained for bucket in self.buckets)
        if self._order.begin(self._trainable):
            self._plan()
        self._queue.begin()

    def expect_accumulated(self) -> None:
        """A backward under `no_sync` begins: every rank will take part in reducing what any of them keeps."""
        for bucket in self.buckets:
            bucket.expect_accumulated()

    def gathered(self, index: int) -> None:
        """A unit is gathered in this backward, on every rank."""
        self._queue.on_unit(index, UnitEvent.GATHERED)

    def expect_only_used(self, comes: Callable[[nn.Parameter], bool]) -> None:
        """A backward that synchronises begins, which may pass parameters by: do not wait for these."""
        for number, bucket in enumerate(self.buckets):
            flat = bucket.flat
            count = sum(trains and comes(p) for p, trains in zip(flat.unsharded_params, flat.requires_grad_flags, strict=True))
            if self._expected.get(number, 0) > 0:
                self._expected[number] = count
            if not count:
                self._on(number, BucketEvent.UNUSED)

    def arrived(self, number: int) -> bool:
        """One more gradient of a counted bucket came; return whether that makes launching possible."""
        self._expected[number] -= 1
        return not self._expected[number] and BucketAction.OFFER in self._on(number, BucketEvent.GRADS_COMPLETE)

    def reduce(self, index: int) -> None:
        """The gradients of a unit are complete: launch what the agreed order allows."""
        if self._queue.on_unit(index, UnitEvent.POST_BACKWARD):
            for number in self.of_unit[index]:
                self._on(number, BucketEvent.POST_BACKWARD)
            self.advance()

    def advance(self) -> None:
        """Launch what is ready, in the agreed order, and await those before: one bucket a lane is in memory."""
        while (group := self._queue.next_group()) is not None:
            launched = []
            for number in group:
                actions = self._on(number, BucketEvent.TURN if self._trainable[number] else BucketEvent.TURN_FROZEN)
                if BucketAction.ASK in actions:
                    has = self._used_params.any_rank_has_grad(number)
                    actions = self._on(number, BucketEvent.SOME_RANK_HAS if has else BucketEvent.NO_RANK_HAS)
                if BucketAction.LAUNCH in actions:
                    launched.append(number)
                elif BucketAction.PASS_BY in actions:
                    self.buckets[number].pass_by()
            if launched:
                self._launch(launched)

    def flush(self, index: int) -> None:
        """At the end, in the agreed order: launch what was not launched, or came after it was, if any rank has it."""
        if not self._flushed:
            self._take_stock()
        self._flushed += 1
        for number in self.of_unit[index]:
            self._on(number, BucketEvent.FLUSH)
        self.advance()
        if self._flushed == len(self._units):
            self._launch_remainders()

    def commit(self, index: int) -> None:
        """Set or accumulate the reduced gradients of a unit into `.grad` of its shards."""
        if not self._settled:
            self._settle()
        for number in self.of_unit[index]:
            if BucketAction.PUT in self._queue.on(number, BucketEvent.COMMIT):
                self._hooked += [(index, parameter) for parameter in self.buckets[number].put(self._used_params.used(number))]

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
            if self.ignores_local_grads:
                bucket.mute()
            if BucketAction.KEEP in self._queue.on(number, BucketEvent.ACCUMULATE):
                bucket.stash_all()

    def drain(self, index: int) -> None:
        """Wait until nothing is in flight, of any unit. Idempotent; raises what the collective raises."""
        question = self._used_params.take()
        try:
            self._reductions.drain(() if question is None else (question.work,))
        finally:
            for number in self.of_unit[index]:
                self._queue.on(number, BucketEvent.DRAINED)

    def drop(self, index: int) -> None:
        """Forget the gradients of this backward. Those kept by earlier ones under `no_sync` stay. Idempotent."""
        for number in self.of_unit[index]:
            if BucketAction.FORGET in self._queue.on(number, BucketEvent.DROP):
                self.buckets[number].drop()

    def forget_kept(self) -> None:
        """Let go of what is kept under `no_sync`."""
        for bucket in self.buckets:
            bucket.forget_all()

    # helpers ------------------------------------------------------------------------------

    def _plan(self) -> None:
        self._queue.agree_on(self._order.make_groups(self.hook is not None))

    def _may_count(self, number: int, innermost: Sequence[bool]) -> bool:
        """Whether it is of use, and safe, to launch a bucket early (see the note in `state_machine.bucket`)."""
        unit = self.buckets[number].unit
        cut = sum(self.buckets[one].is_trained for one in self.of_unit[unit]) > 1
        return (cut and innermost[unit]) or (self._replicated and not innermost[unit])

    def _accumulating(self) -> list[Bucket]:
        # lent parameters show nothing: their gradients are set aside
        return [bucket for bucket in self.buckets if bucket.accumulated and not self._units[bucket.unit].full_params]

    def _kind(self, number: int) -> BucketKind:
        if self.policy.at_end:
            return BucketKind.AT_END
        if self.policy.find_unused_parameters:
            return BucketKind.FIND_UNUSED
        if number in self.early:
            return BucketKind.EARLY
        return BucketKind.BEHIND_EARLY if self.early else BucketKind.ORDINARY

    def _on(self, number: int, event: BucketEvent) -> Sequence[BucketAction]:
        """Move a bucket, and note when it was ready if that is asked for; return what must be done."""
        actions = self._queue.on(number, event)
        if BucketAction.MARK in actions:
            self._ready_at[number] = perf_counter()
            self._order.add_arrival(number)
        return actions

    def _launch(self, group: Sequence[int], remainder: bool = False) -> None:
        buckets = [self.buckets[number] for number in group]
        if self.ignores_local_grads:
            for bucket in buckets:
                bucket.mute()
        while self._reductions.is_full and self._may_wait_for(self._reductions.oldest):
            self._wait_next()
        if self.hook is None:
            landed = self._reductions.launch(buckets, remainder)
        else:
            landed = self._reductions.launch_hooked(buckets[0], self._shown(buckets[0], group[0]), remainder)
        if landed:
            self._landed(buckets)
        self.stats.note(buckets, max([self._ready_at[number] for number in group]))

    def _may_wait_for(self, buckets: Sequence[Bucket]) -> bool:
        """Whether what is in flight may be awaited (see the note in `state_machine.bucket`)."""
        return all([BucketAction.AWAIT in self._queue.on(bucket.number, BucketEvent.MAKE_ROOM) for bucket in buckets])

    def _wait_next(self) -> None:
        buckets = self._reductions.oldest
        self._reductions.land_next()
        self._landed(buckets)

    def _landed(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._queue.on(bucket.number, BucketEvent.LANDED)

    def _shown(self, bucket: Bucket, number: int) -> GradBucket:
        """A bucket as the hook sees it."""
        last = next(one for one in reversed(self._order.buckets) if self.buckets[one].is_trained)
        return GradBucket(bucket, number, number == last)

    def _take_stock(self) -> None:
        """Tell the ranks which gradients are here, before what is left is launched."""
        numbers = range(len(self.buckets))
        if self.ignores_local_grads:
            for bucket in self.buckets:
                bucket.mute()
        if self.policy.find_unused_parameters:
            for number in numbers:
                self._on(number, BucketEvent.LAUNCH_ANYWAY)
            self.advance()
        self._used_params.exchange([BucketAction.COUNT_REMAINDER in self._queue.on(n, BucketEvent.TAKE_STOCK) for n in numbers])

    def _launch_remainders(self) -> None:
        """What came after its bucket was launched, on any rank, in the agreed order."""
        used_params = self._used_params
        for number in self._order.buckets:
            actions = self._queue.on_remainder_turn(number)
            if BucketAction.LOOK_HERE in actions:
                has = used_params.has_remainder[number]
            else:
                has = BucketAction.LOOK_EVERYWHERE in actions and used_params.some_rank_has_remainder(number)
            if has:
                while BucketAction.AWAIT in self._queue.on(number, BucketEvent.SOME_RANK_HAS):
                    self._wait_next()
                self._launch((number,), remainder=True)

    def _settle(self) -> None:
        """Await everything in flight and learn which gradients no rank had. All that can fail is over after this."""
        self._settled = True
        while self._reductions.oldest:
            self._wait_next()
        self._reductions.finish()
        self._used_params.wait_all()
        if self._order.learn(self._comms.world_comm, self._device):
            self._plan()
        for number, bucket in enumerate(self.buckets):
            bucket.show_to_hooks(self._used_params.used(number))
        self.stats.end()


def _reduce_dtype(unit: Unit, flat: FlatBuffer, reduction: ReductionPolicy) -> torch.dtype:
    """In which gradients of a flat buffer are reduced."""
    policy, dtype = unit.config.mp_policy.reduce_dtype, flat.unsharded.dtype
    wanted = dtype if policy is None or not dtype.is_floating_point else policy
    halved = wanted.is_floating_point and wanted.itemsize < 4
    return torch.float32 if halved and reduction.deterministic else wanted
