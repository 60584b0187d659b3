"""The gradients of all units: from unsharded `.grad` to buckets, reduced shards, and sharded `.grad`.

Rule 1: collectives are launched in the agreed order only; a bucket that is ready early waits for its turn.
Rule 2: nothing is put into `.grad` before `commit`, and `commit` follows everything that can fail.
Rule 3: in a backward that synchronises, every unit is reduced that autograd has passed through, or of which some rank has a
        gradient. Zeros stand for gradients that are missing.
Rule 4: the tables of `state_machine.bucket` decide what happens to a bucket; this file carries it out.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from time import perf_counter
from typing import Final

from torch import Tensor, nn, promote_types

from fsdp.comm.context import CommContext
from fsdp.device.storage import MemoryTracker
from fsdp.device.streams import Streams, readable_device
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.shown_params import reading_shards
from fsdp.params.unit import Unit
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.build_buckets import bucket_kinds, early_buckets, make_buckets
from fsdp.reduction.comm_hook import CommHook, GradBucket
from fsdp.reduction.in_flight import ReductionQueue
from fsdp.reduction.order import ReductionOrder
from fsdp.reduction.stats import StepStats
from fsdp.reduction.used_params import UsedParams
from state_machine.bucket import BucketAction, BucketEvent, UnitEvent
from state_machine.bucket_queue import BucketQueue

_ACCUMULATED: Final = attrgetter("accumulated")
Exchange = Callable[[UsedParams, Sequence[bool]], None]
"""Exchanges between the ranks which gradients they have. It is given for each bucket whether it was launched."""


class Reducer:
    """The gradients of all units of one root, through one backward at a time."""

    def __init__(
        self,
        units: Sequence[Unit],
        innermost: Sequence[bool],
        comms: CommContext,
        streams: Streams,
        tracker: MemoryTracker,
        stats: StepStats,
    ) -> None:
        self._units = tuple(units)
        self._comms = comms
        self._streams = streams
        config = units[0].config
        self.policy = config.reduction
        self._uneven_paths = config.uneven_paths
        self.buckets = make_buckets(units, tracker)
        self.of_unit: list[list[int]] = [[] for _ in units]
        """For each unit, the numbers of its buckets."""
        for number, bucket in enumerate(self.buckets):
            self.of_unit[bucket.unit].append(number)
        self.can_have_shard_grads = [placement.gets_grad for bucket in self.buckets for placement in bucket.flat.placements]
        """For each sharded parameter, whether it ever has a `.grad` on this rank: a plain shard without elements has none."""
        self._device = readable_device(units[0].device)
        self.used_params = UsedParams(units, self.buckets, self.policy.static_graph, comms.world_comm, self._device)
        self.reductions = ReductionQueue(self.policy, comms, streams, tracker)
        self.early = early_buckets(self.buckets, self.of_unit, innermost, config)
        """The early buckets: they may be launched when their gradients have arrived, before the post-backward of their unit."""
        self._queue = BucketQueue(
            [bucket.name for bucket in self.buckets],
            [bucket.unit for bucket in self.buckets],
            bucket_kinds(len(self.buckets), self.early, config),
            len(units),
        )
        self._stats = stats
        self.ignores_local_grads = False
        """True if the gradients of this rank are dropped, except those it accumulated earlier (`join`)."""
        self.divisor = 1
        """What the reduced gradients of a backward are divided by: the micro-batches of a step of a pipeline."""
        self._may_be_hooked = False
        """Whether a shard may have a hook of the user. If none has, no code of the user runs in the commits."""
        self.runs_grad_hooks = False
        """Whether hooks of the user on sharded parameters run, before the first commit of a backward."""
        self.order = ReductionOrder(self.buckets, self.of_unit, innermost, config)
        self._make_groups()
        self.begin()

    def set_hook(self, hook: CommHook) -> None:
        """From now on, a comm hook reduces buckets in place of the engine."""
        self.reductions.hook = hook
        self._make_groups()

    def set_divide_factors(self, unit: Unit, factors: tuple[float, float]) -> None:
        """From now on, divide the gradients of a unit by factors of its own, before and after the sum."""
        unit.set(divide_factors=factors)
        self._make_groups()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients accumulated under `no_sync` wait for a backward that synchronises."""
        return bool(self._drop_zeroed())

    @property
    def keeps_nothing(self) -> bool:
        """Whether there is nothing to keep under `no_sync`: on one rank `.grad` can sum gradients without more rounding."""
        dtypes = [(bucket.buffer.dtype, bucket.flat.shard.dtype) for bucket in self.buckets]
        sums = all([promote_types(reduced, shard) is shard for reduced, shard in dtypes])
        return sums and self.reductions.hook is None and self._comms.size == 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients were accumulated under `no_sync`. The user may have zeroed them since, see `keeps_gradients`."""
        return any(map(_ACCUMULATED, self.buckets))

    @property
    def accumulated_params(self) -> dict[int, str]:
        """The names of the parameters with gradients accumulated under `no_sync`, by id.

        Raises:
            ShardingError: the user changed such a gradient.
        """
        flats = [(bucket.flat, i) for bucket in self._drop_zeroed() for i in bucket.accumulated]
        return {id(flat.sharded_params[i]): flat.param_infos[i].names[0] for flat, i in flats}

    @property
    def shard_grads(self) -> list[Tensor | None]:
        """`.grad` of each sharded parameter; None if it only shows what was accumulated under `no_sync`."""
        return [gradient for bucket in self.buckets for gradient in bucket.shard_grads()]

    def drop_shard_grads(self, kept: Sequence[bool]) -> None:
        """Set `.grad` of the other sharded parameters to None. `kept` is in the order of `shard_grads`."""
        params = [parameter for bucket in self.buckets for parameter in bucket.flat.sharded_params]
        for parameter, keeps in zip(params, kept, strict=True):
            if not keeps:
                parameter.grad = None

    def forget_kept(self) -> None:
        """Drop all gradients accumulated under `no_sync`."""
        for bucket in self.buckets:
            bucket.drop_all_accumulated()

    # one backward -------------------------------------------------------------------------

    def begin(self, accumulates: bool = False) -> None:
        """A backward begins. `accumulates`: it runs under `no_sync`, and all ranks will reduce what any of them accumulates.

        Raises:
            ShardingError: the user changed gradients accumulated under `no_sync`. Nothing moved.
        """
        self._drop_zeroed()
        self.reductions.begin()
        self.used_params.begin()
        self._ready_at = [perf_counter()] * len(self.buckets)
        """When each bucket became ready."""
        # a comm hook may wait for each of its collectives at once, so with one no bucket is early
        hooked = self.reductions.hook is not None
        self._expected = {n: 0 if hooked else sum(self.buckets[n].flat.requires_grad_flags) for n in self.early}
        """For each early bucket, how many gradients it waits for. Below 1: none."""
        self.settled = False
        """Whether all reductions of this backward were waited for."""
        self._hooked: list[tuple[int, nn.Parameter]] = []
        # a rank that left a unit out may not know what was accumulated: ranks that go different ways ask about every bucket
        self._trained = [bucket.begin() or self._uneven_paths for bucket in self.buckets]
        """For each bucket, whether it is reduced. One that is frozen now may be thawed before its unit is done."""
        self.order.arrivals.clear()
        if self.order.trained != tuple(self._trained):
            self.order.train(tuple(self._trained))
            self._make_groups()
        self._queue.begin()
        if accumulates:
            for bucket in self.buckets:
                bucket.expect_accumulated()

    def gathered(self, index: int) -> None:
        """A unit was gathered in this backward, on every rank."""
        self._queue.on_unit(index, UnitEvent.GATHERED)

    def used_outside(self, index: int) -> None:
        """A parameter of a unit is read outside it. Every rank reads it, but its gradient may arrive on some ranks only."""
        self._queue.on_unit(index, UnitEvent.USED_OUTSIDE)

    def expect_only_used(self, gets_gradient: Callable[[nn.Parameter], bool]) -> None:
        """A backward that synchronises begins: do not wait for gradients of parameters that it does not use."""
        for number, bucket in enumerate(self.buckets):
            flat = bucket.flat
            params = zip(flat.unsharded_params, flat.requires_grad_flags, strict=True)
            count = sum(trainable and gets_gradient(param) for param, trainable in params)
            if self._expected.get(number, 0) > 0:
                self._expected[number] = count
            if not count:
                self._on(number, BucketEvent.UNUSED)

    def arrived(self, number: int) -> bool:
        """A gradient of an early bucket has arrived; return whether the bucket may be launched now."""
        self._expected[number] -= 1
        return not self._expected[number] and BucketAction.OFFER in self._on(number, BucketEvent.GRADS_COMPLETE)

    def reduce(self, index: int) -> None:
        """The post-backward of a unit: launch the buckets that the agreed order allows."""
        if self._queue.on_unit(index, UnitEvent.POST_BACKWARD):
            for number in self.of_unit[index]:
                self._on(number, BucketEvent.POST_BACKWARD)
            self.advance()

    def advance(self) -> None:
        """Launch ready groups in the agreed order. Earlier ones are waited for first, so each lane holds one group in memory."""
        if (group := self._queue.next_group()) is None:
            return
        with self._streams.computing():
            while group is not None:
                self._launch_group(group)
                group = self._queue.next_group()

    def _launch_group(self, group: Sequence[int]) -> None:
        """It is the turn of these buckets: launch those of which any rank has gradients, together."""
        launched = []
        for number in group:
            actions = self._on(number, BucketEvent.TURN if self._trained[number] else BucketEvent.TURN_FROZEN)
            if BucketAction.ASK in actions:
                has = self.used_params.any_rank_has(number)
                actions = self._on(number, BucketEvent.SOME_RANK_HAS if has else BucketEvent.NO_RANK_HAS)
            if BucketAction.LAUNCH_REDUCTION in actions:
                launched.append(number)
            elif BucketAction.PASS_BY in actions:
                self.buckets[number].skip()
        if launched:
            self._launch(launched)

    def flush(self, index: int, exchange: Exchange) -> None:
        """At the end, in the agreed order: launch gradients that were not launched, if any rank has them."""
        if index == self.order.units[0]:
            self._exchange_used(exchange)
        for number in self.of_unit[index]:
            self._on(number, BucketEvent.FLUSH_GRADS)
        self.advance()
        if index == self.order.units[-1]:
            with self._streams.computing():
                self._launch_remainders()

    def commit(self, index: int) -> None:
        """Put the reduced gradients of a unit into `.grad` of its sharded parameters, or add them."""
        self._units[index].pending.set(False)
        for number in self.of_unit[index]:
            if BucketAction.PUT in self._queue.on(number, BucketEvent.COMMIT):
                hooked = self.buckets[number].put(self.used_params.used(number), self._may_be_hooked)
                self._hooked += zip(repeat(index), hooked)

    def run_grad_hooks(self) -> None:
        """Before the first commit: run the user's hooks on sharded parameters.

        Raises:
            ShardingError: a hook changed `requires_grad` of a parameter.
        """
        self._may_be_hooked = any([bucket.flat.may_be_hooked() for bucket in self.buckets])
        if not self._may_be_hooked:
            return
        self.runs_grad_hooks = True
        try:
            for unit in self._units:
                unit.begin_pending()
            with reading_shards():
                for number, bucket in enumerate(self.buckets):
                    bucket.run_grad_hooks(self.used_params.used(number))
        finally:
            self.runs_grad_hooks = False
        for unit in self._units:
            unit.refuse_changed_flags(shown=True)

    def has_come(self, flat: FlatBuffer, i: int) -> bool:
        """Whether a parameter has a gradient of this backward, which is not in `.grad` yet."""
        bucket = next(one for one in self.buckets if one.flat is flat)
        if self.runs_grad_hooks:  # also where only other ranks have one
            return bucket.reduced is not None and bucket.hooked != i and self.used_params.used(bucket.number)[i]
        return bucket.has_come(i)

    def run_hooks(self, on_failure: Callable[[BaseException, int], None]) -> None:
        """After the last commit: run the user's post-accumulate hooks. `on_failure` gets what one raises, and its unit."""
        hooked, self._hooked = self._hooked, []
        for index, parameter in hooked:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                try:
                    with reading_shards():
                        hook(parameter)
                except BaseException as failure:
                    on_failure(failure, index)
                    raise

    def accumulate_unsharded(self, index: int) -> None:
        """At the end of a backward under `no_sync`: add the unsharded gradients of a unit to its accumulated ones."""
        self._units[index].pending.set(False)
        for number in self.of_unit[index]:
            bucket = self.buckets[number]
            self._drop_ignored([bucket])
            if BucketAction.ACCUMULATE_UNSHARDED in self._queue.on(number, BucketEvent.ACCUMULATE):
                with self._streams.computing():
                    bucket.accumulate_all()
                    bucket.flat.home.copied(self._streams)

    def drain(self, index: int) -> None:
        """Wait until no collective of any unit is in flight. Idempotent; raises what the first collective raises."""
        try:
            with self._streams.computing():
                self.reductions.drain(self.used_params.take_work())
        finally:
            for number in self.of_unit[index]:
                self._queue.on(number, BucketEvent.DRAINED)

    def drop(self, index: int) -> None:
        """Drop the gradients of a unit of this backward. Accumulated ones of earlier backwards stay. Idempotent."""
        self.used_params.drop()
        self._units[index].pending.set(False)
        self._units[index].listed.set(False)
        for number in self.of_unit[index]:
            if BucketAction.FORGET in self._queue.on(number, BucketEvent.DROP_GRADS):
                self.buckets[number].drop()

    # helpers ------------------------------------------------------------------------------

    def _make_groups(self) -> None:
        self._queue.agree_on(self.order.make_groups(self.reductions.hook is not None))

    def _drop_zeroed(self) -> list[Bucket]:
        """Drop the accumulated gradients that the user has zeroed since; return the buckets that have others."""
        # while full parameters are shown, `.grad` of the sharded ones is set aside and says nothing
        found = [bucket for bucket in self.buckets if bucket.accumulated and not self._units[bucket.unit].has_full_params]
        for bucket in found:
            bucket.drop_zeroed()
        return [*filter(_ACCUMULATED, found)]

    def _on(self, number: int, event: BucketEvent) -> Sequence[BucketAction]:
        """Move a bucket along its table, and record when it became ready; return what must be done."""
        actions = self._queue.on(number, event)
        if BucketAction.MARK in actions:
            self._ready_at[number] = perf_counter()
            self.order.arrivals.append(number)
        if BucketAction.OFFER in actions and not self._trained[number]:
            self._trained[number] = self.buckets[number].is_trained
        return actions

    def _launch(self, group: Sequence[int], remainder: bool = False) -> None:
        buckets = [*map(self.buckets.__getitem__, group)]
        for bucket in buckets:
            self._units[bucket.unit].listed.set(False)
        self._drop_ignored(buckets)
        while self.reductions.is_full and self._may_wait_for(oldest := self.reductions.oldest):
            self._wait_for(oldest)
        if self.reductions.hook is not None:
            last = next(one for one in reversed(self.order.buckets) if self.buckets[one].is_trained)
            self.reductions.launch_hooked(buckets[0], GradBucket(buckets[0], buckets[0].number == last), remainder)
        elif self.reductions.launch(buckets, remainder):
            self._on_landed(buckets)
        self._stats.add_launch(buckets, max(map(self._ready_at.__getitem__, group)))

    def _drop_ignored(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets if self.ignores_local_grads else ():
            bucket.clear_unsharded_grads()

    def _may_wait_for(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the reduction of these buckets may be waited for (see the note in `state_machine.bucket`)."""
        return all([BucketAction.WAIT in self._queue.on(bucket.number, BucketEvent.MAKE_ROOM) for bucket in buckets])

    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        # the oldest ones in flight
        self._stats.wait("reduce_wait_s", self.reductions.wait_next)
        self._on_landed(buckets)

    def _on_landed(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._queue.on(bucket.number, BucketEvent.LANDED)

    def _exchange_used(self, exchange: Exchange) -> None:
        """Before the rest is launched: exchange which gradients the ranks have."""
        numbers = range(len(self.buckets))
        self._drop_ignored(self.buckets)
        if self.policy.find_unused_parameters:
            for number in numbers:
                self._on(number, BucketEvent.LAUNCH_ANYWAY)
            self.advance()
        launched = [BucketAction.COUNT_REMAINDER in self._queue.on(n, BucketEvent.TAKE_STOCK) for n in numbers]
        exchange(self.used_params, launched)
        if self.policy.find_unused_parameters:
            for bucket, trained, has in zip(self.buckets, self._trained, self.used_params.has_remainder, strict=True):
                if has and not trained:
                    raise ShardingError(
                        f"parameters of unit {bucket.name!r} were frozen when this backward began, so find_unused_parameters "
                        "counted them as unused, and they were thawed in a recompute. Thaw them before the backward."
                    )

    def _launch_remainders(self) -> None:
        """Reduce gradients that arrived after their bucket was launched, in the agreed order.

        Every rank must launch the same remainders. The table says whether this rank knows by itself, or reads the exchange.
        """
        used_params = self.used_params
        for number in self.order.buckets:
            actions = self._queue.on_remainder_turn(number)
            if BucketAction.LOOK_HERE in actions:
                has = used_params.has_remainder[number]
            else:
                has = BucketAction.LOOK_EVERYWHERE in actions and used_params.any_rank_has(number, remainder=True)
            if has:
                while BucketAction.WAIT in self._queue.on(number, BucketEvent.SOME_RANK_HAS):
                    self._wait_for(self.reductions.oldest)
                self._launch((number,), remainder=True)

    def settle(self) -> None:
        """Before the first commit: wait for all reductions and the exchange of used parameters.

        After this only hooks of the user can fail.
        """
        self.settled = True
        with self._streams.computing():
            while oldest := self.reductions.oldest:
                self._wait_for(oldest)
            self._stats.wait("reduce_wait_s", self.reductions.finish)
            for bucket in self.buckets:
                if self.divisor != 1 and bucket.reduced is not None:
                    bucket.reduced.div_(self.divisor)
        self.used_params.wait_all()
        self.used_params.end()
        self._queue.check(BucketEvent.COMMIT)  # all buckets or none
        if not self.order.is_learned:
            self.order.learn(self._comms.world_comm, self._device)
            self._make_groups()
