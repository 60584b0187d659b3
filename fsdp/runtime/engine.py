"""The engine of one root: turns events into instructions and executes them on the units.

Rule 1: the tables decide, the engine executes. It reads no state to choose an action.
Rule 2: the root changes its state first, so an illegal event changes nothing.
Rule 3: if an action fails half-way, the step is abandoned before the error is raised.

[Note: how a backward ends]
The first unit that joins queues one callback. It runs when the outermost graph task is done, also around reentrant checkpoints.
When the backward fails instead, torch drops the callback uncalled, and `FinalCallback.__del__` notices that.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.autograd import Variable, profiler

from fsdp.autograd.frames import gets_gradient, graph_task
from fsdp.comm.broadcast_buffers import broadcast_buffers
from fsdp.comm.context import CommContext
from fsdp.debug.error_notes import add_note, add_note_to_what_ends_the_backward, is_noted
from fsdp.debug.phases import Phases
from fsdp.debug.snapshot import EngineSnapshot, take_snapshot
from fsdp.debug.threads import refuse_two_threads
from fsdp.device.storage import MemoryTracker
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError, WorldError
from fsdp.params.module_tree import ModuleTree, refuse_transforms
from fsdp.params.unit import Unit
from fsdp.reduction.reducer import Reducer
from fsdp.reduction.stats import StepStats
from fsdp.runtime.final_callback import PendingBackward, kind_of_backward
from fsdp.runtime.hook_actions import HookActions, PassWatcher
from fsdp.runtime.launch_gathers import Gathers, gather_sizes
from fsdp.runtime.prefetch import PassSchedules
from fsdp.runtime.stale_params import StaleParams
from fsdp.shards.shard_parameter import shard_changes
from state_machine import (
    Action,
    BackwardEvent,
    Effect,
    Event,
    IllegalTransition,
    Instruction,
    Lifecycle,
    Request,
    Residency,
    ResidencyState,
    Root,
)


class Engine:
    """Moves the units of one root through their lifecycles, and executes what the tables return."""

    def __init__(
        self,
        units: Sequence[Unit],
        descendants: Sequence[frozenset[int]],
        comms: CommContext,
        streams: Streams,
        tracker: MemoryTracker,
    ) -> None:
        self.units = tuple(units)
        self._has_plain_shards = any(flat.asks_addresses for unit in units for flat in unit.flats)
        self._flags_seen = -1
        """`shard_changes` when the flags of all units were last looked at."""
        self.comms = comms
        self.tracker = tracker
        self.synchronises = True
        """Whether a backward that begins now reduces its gradients. False under `no_sync`."""
        self.splits_backward = False
        """Whether a pipeline stage computes gradients of inputs and of weights apart. Unsharded parameters have the latter."""
        self._in_pipeline_step: bool | None = None
        """Whether a step of a pipeline is going on that can be done again, if it fails, or cannot; None: there is none."""
        self.descendants = tuple(descendants)
        self.streams = streams
        policies = [units[0].config.root_reshard_policy, *(unit.config.reshard_policy for unit in units[1:])]
        self.pending_backward = PendingBackward(comms, streams.on_host)
        self.root = Root([Lifecycle(unit.name, policy) for unit, policy in zip(units, policies, strict=True)])
        self._stale_params = StaleParams(units, self.root, streams, comms.world_comm)
        self._residencies = tuple(Residency(unit.name) for unit in units)
        self.stats = StepStats([unit.gather_sizes for unit in units], tracker)
        self.reducer = Reducer(units, [not inside for inside in descendants], comms, streams, tracker, self.stats)
        cap = units[0].config.coalesce_bytes if comms.reduce_comm.size > 1 else 0
        self.schedules = PassSchedules([unit.name for unit in units], units[0].config.prefetch, gather_sizes(units), cap)
        self._schedule = self.schedules.forward
        self._forward_stack: list[int] = []
        """The units whose forward runs, outermost first."""
        self._last_unit = 0
        """The unit of the last event."""
        self._failed = 0
        """The unit whose forward failed last."""
        self._task = -1
        """The graph task in which the first unit joined the backward."""
        self.watcher: PassWatcher | None = None
        """Set inside `fsdp.join`."""
        self._hooks: HookActions
        self._action_handlers: dict[Action, Callable[[int], object]] = {  # no lambdas; `match` takes seven times as long
            Action.DROP_STALE: self._drop_stale,
            Action.UNSHARD: self._unshard,
            Action.KEEP_UNSHARDED: partial(self.request, request=Request.CACHE),
            Action.RESHARD: partial(self.request, request=Request.RESHARD),
            Action.INTERCEPT_READS: partial(self._of_unit, Unit.intercept_reads),
            Action.JOIN_BACKWARD: self._join_backward,
            Action.REDUCE_GRADS: self.reducer.reduce,
            Action.FLUSH_GRADS: self.reducer.flush,
            Action.COMMIT: self._commit,
            Action.ACCUMULATE_UNSHARDED: self.reducer.accumulate_unsharded,
            Action.WAIT_REDUCTIONS: self.reducer.drain,
            Action.DROP_GRADS: self.reducer.drop,
            Action.GATHER_FULL: partial(self._of_unit, Unit.gather_full),
            Action.WRITE_BACK: partial(self._of_unit, Unit.write_back),
            Action.FREE_FULL: partial(self._of_unit, Unit.free_full),
        }
        self._effect_handlers: tuple[dict[Effect, Callable[[], None]], ...] = tuple(
            {
                Effect.ALL_GATHER: partial(self._all_gather, index),
                Effect.WAIT_ALL_GATHER: partial(self.stats.wait_all_gather, unit.wait_all_gather),
                Effect.USE_UNSHARDED: unit.use_unsharded,
                Effect.USE_SHARDED: unit.use_sharded,
                Effect.FREE_UNSHARDED: partial(self._free_unsharded, index),
            }
            for index, unit in enumerate(units)
        )
        self._prefetch = partial(self.request, request=Request.PREFETCH)
        self._gathers = Gathers(units, streams, cap, self.stats.add_gathers)

    def attach(self, hooks: HookActions) -> None:
        """Set the hooks that execute actions on autograd graphs. Called once."""
        self._hooks = hooks
        self._action_handlers[Action.HOOK_OUTPUTS] = hooks.hook_outputs
        self.phases = Phases([unit.name for unit in self.units], self._action_handlers, self._effect_handlers)

    def set_comms(self, comms: CommContext) -> None:
        """From now on, failures are passed on to these: communicators were added."""
        self.comms = comms

    def set_synchronises(self, synchronises: bool) -> None:
        """From now on, backwards that begin reduce their gradients, or do not."""
        self.synchronises = synchronises

    def set_splits_backward(self, splits: bool) -> None:
        """From now on, backwards that begin may compute gradients of inputs alone, or may not."""
        self.splits_backward = splits

    def begin_pipeline_step(self, can_repeat: bool) -> None:
        """Micro-batches follow whose gradients are kept. Drop those of a step that has not ended, and what it has gathered.

        `can_repeat`: a step that fails will be dropped so, on all ranks.
        """
        if self._in_pipeline_step:
            self._reset_step()
            self.reducer.forget_kept()
        self._in_pipeline_step = can_repeat

    def end_pipeline_step(self) -> None:
        """The gradients of all micro-batches are reduced."""
        self._in_pipeline_step = None

    def set_watcher(self, watcher: PassWatcher | None) -> None:
        """From now on, call `watcher` before each forward of the root, and before and after each backward. None: call nothing."""
        self.watcher = watcher

    # events -------------------------------------------------------------------------------

    def on_event(self, index: int, event: Event) -> None:
        """Apply an event to a unit and execute the actions of the table, in order.

        Raises:
            IllegalTransition: the table has no row for the event. No state has changed.
        """
        self._last_unit = index
        try:
            instructions = self.root.on_event(index, event)
        except IllegalTransition as refusal:
            self.refuse_two_threads()
            add_note(refusal, self.snapshot, index)
            raise
        if instructions:
            self._execute(instructions)

    def note(self, error: BaseException, index: int | None = None) -> None:
        """Note on `error` the unit that it came from: unit `index`, or the innermost one whose forward runs."""
        index = index if index is not None else self._forward_stack[-1] if self._forward_stack else self._last_unit
        if not is_noted(error):
            self._failed = index
            add_note(error, self.snapshot, index)

    def on_backward_failed(self) -> None:
        """Clean up after a failed backward on its compute stream, and notify other ranks as soon as its exception is known."""
        failed = self.units[self._last_unit].name
        shows = add_note_to_what_ends_the_backward(self.snapshot, self._last_unit, lambda error: self.notify_peers(failed, error))
        with self.streams.computing(), suppress(WorldError):  # the backward may have failed because of one
            self.close_backward(BackwardEvent.FAILS_INSIDE if self._forward_stack else BackwardEvent.FAILS)
        if not shows:
            self.notify_peers(failed, None)

    def pre_forward(self, index: int) -> None:
        """Begin a forward outside any backward. Clean up first after a pass that failed unnoticed."""
        outer = self._forward_stack[-1] if self._forward_stack else None
        if outer is not None and index not in self.descendants[outer] and not self.units[outer].is_running:
            self.refuse_two_threads()
            self.abandon_step()
        if not self._forward_stack:
            self.units[0].refuse_forked()
            self.units[0].refuse_put_away()
            self.pending_backward.await_end()
            if self.root.in_backward:
                self.refuse_two_threads()  # they must not end each other's backward
            if self.close_backward(BackwardEvent.PASS_BEGINS):
                self.notify_peers(self.units[self._last_unit].name, None)
            try:
                self._prepare_pass()
            except BaseException as failure:
                # another rank may have abandoned the last step or differ from this one; this rank waited between two passes
                add_note(failure, self.snapshot, index, ours=True)
                self.abandon_step(failure, index)
                raise
            self.schedules.forward.begin()
            self._begin_pass(is_forward=True)
        self._schedule = self.schedules.forward
        self.on_event(index, Event.PRE_FORWARD)
        self._forward_stack.append(index)

    @property
    def has_unreduced_grads(self) -> bool:
        """Whether gradients of a backward are not in `.grad` yet, or gradients are kept under `no_sync`."""
        return self.is_before_commits or self.reducer.accumulates

    @property
    def is_before_commits(self) -> bool:
        """Whether a backward runs whose gradients are not in `.grad` yet."""
        return self.root.in_backward or self.reducer.runs_grad_hooks

    @property
    def param_ids(self) -> set[int]:
        """The ids of the sharded parameters."""
        return {id(info.parameter) for unit in self.units for info in unit.param_infos}

    def unreduced_params(self) -> dict[int, str]:
        """The names of the parameters whose gradients are not reduced, by id.

        Raises:
            ShardingError: the user changed a gradient that is kept under `no_sync`.
        """
        if self.is_before_commits:
            return {id(info.parameter): info.names[0] for unit in self.units for info in unit.param_infos}
        return self.reducer.accumulated_params

    def refuse_in_grad_hook(self, what: str) -> None:
        """Raise ShardingError if a tensor hook of the user runs, before the gradients of a backward are there."""
        if self.reducer.runs_grad_hooks:
            raise ShardingError(
                f"{what} inside a tensor hook, where no gradient of this backward is in `.grad` yet; do this after the backward, "
                "or in p.register_post_accumulate_grad_hook."
            )

    def clean_up_dead_forward(self, index: int | None = None) -> None:
        """Clean up after a forward that failed unnoticed: that of unit `index`, or one that Ctrl-C ended."""
        if index in self._forward_stack:
            self.abandon_step()
        elif index is None and self._forward_stack and not self.units[self._forward_stack[0]].is_running:
            self.refuse_two_threads()
            self.abandon_step()

    def refuse_two_threads(self) -> None:
        """Raise ShardingError if another thread is inside this root. Called only where something is wrong already."""
        refuse_two_threads({id(one): unit.name for unit in self.units for one in unit.modules}, self.root.in_backward)

    def post_forward(self, index: int, event: Event) -> None:
        """End a forward outside any backward, with POST_FORWARD, POST_FORWARD_NO_GRAD or FORWARD_FAILED."""
        if index in self._forward_stack:
            del self._forward_stack[self._forward_stack.index(index) :]
        self.on_event(index, event)
        if not self._forward_stack:
            self.pending_backward.expect(event is Event.POST_FORWARD and (self.synchronises or self.root.backward_gathers))
            for other in range(len(self.units)):
                self.request(other, Request.PASS_FAILS if event is Event.FORWARD_FAILED else Request.PASS_ENDS)
            if not torch.is_grad_enabled():
                self.root.evaluation_ends()
            self._stale_params.await_copies()
            if event is Event.FORWARD_FAILED:
                self.notify_peers(self.units[self._failed].name, sys.exc_info()[1])

    def on_early_grad(self, bucket: int) -> None:
        """A gradient of an early bucket was accumulated."""
        # a reentrant checkpoint may accumulate a second gradient in the same parameter
        if self.root.synchronises and graph_task() == self._task and self.reducer.arrived(bucket):
            try:
                self.reducer.advance()
            except BaseException as failure:
                unit = self.reducer.buckets[bucket].unit
                add_note(failure, self.snapshot, unit, ours=True)
                self.abandon_step(failure, unit)
                raise

    def call_at_end_of_graph_task(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the end of the current graph task: of the backward, or of a reentrant checkpoint in it."""
        Variable._execution_engine.queue_callback(callback)

    def on_backward_ended(self) -> None:
        """End the backward. The final callback calls this."""
        self.close_backward(BackwardEvent.CALLBACK_RUNS_INSIDE if self._forward_stack else BackwardEvent.CALLBACK_RUNS)

    def close_backward(self, event: BackwardEvent) -> bool:
        """End the backward for every unit, in the agreed order; return whether a backward was running."""
        reduces = self.root.synchronises
        if (instructions := self.root.end_backward(event, self.reducer.order)) is None:
            return False
        self._hooks.reset_backward_progress()
        if event not in (BackwardEvent.CALLBACK_RUNS, BackwardEvent.CALLBACK_RUNS_INSIDE):
            self._execute_all(instructions)
        else:
            self._execute(instructions)
            self._stale_params.await_copies()
            self.stats.end_backward(reduces)
            if reduces or not (self._in_pipeline_step or self.units[0].config.uneven_paths):  # others are not those of all ranks
                self.comms.completed()
            try:
                self.reducer.run_hooks(self.note)
            finally:  # the gradients are reduced, also if a hook of the user raises
                if self.watcher is not None:
                    self.watcher.after_backward()
        return True

    def abandon_step(self, failure: BaseException | None = None, index: int | None = None) -> None:
        """Abandon a step that failed, and notify the other ranks."""
        index = index if index is not None else self._forward_stack[-1] if self._forward_stack else self._last_unit
        with suppress(Exception):  # no other error may hide the failure
            self._reset_step()
        self.notify_peers(self.units[index].name, failure)

    def notify_peers(self, unit: str, failure: BaseException | None) -> None:
        """Notify the other ranks, which may wait for this one, that a step has ended early."""
        self.pending_backward.expect(False)
        self.schedules.forget()
        self.stats.abandon_step()
        self.comms.abandon(unit, failure)

    def _reset_step(self) -> None:
        """Abandon the forward or backward that runs. Then every unit is IDLE and sharded, and nothing is in flight."""
        self._forward_stack.clear()
        self.splits_backward = False
        self._hooks.reset_backward_progress()
        self._hooks.abandon_calls()
        self._execute_all(self.root.end_backward(BackwardEvent.STEP_ABANDONED, self.reducer.order) or ())

    def is_unsharded(self, index: int) -> bool:
        """Whether the modules of the unit use its unsharded parameters."""
        return self._residencies[index].state is ResidencyState.UNSHARDED

    def _prepare_pass(self) -> None:
        """Do what all ranks do together before a forward begins."""
        records_graph = torch.is_grad_enabled()
        refuse_transforms(self.units[0].name)
        ModuleTree.of(self.units[0].module).check(self.units)
        if self.watcher is not None:
            self.watcher.before_forward(records_graph)
        if self.pending_backward.was_abandoned():
            self.schedules.forget()
        if (restart := self.pending_backward.announce_restart(self.units[0].name)) is not None:
            self.abandon_step(restart, 0)
        if self.comms.across is not None:
            # a rank of another dimension may still be in a step that was abandoned
            self.comms.across.reconnect()
        if self.units[0].config.broadcast_buffers and records_graph:
            broadcast_buffers(self.units[0].modules, self.comms.world_comm, self.watcher.source if self.watcher else 0)
        if self.reducer.policy.find_unused_parameters:
            # a rank may not use a unit that is frozen on all ranks
            for unit in self.units:
                unit.sync_requires_grad()
        for index in self._stale_params.begin_pass(records_graph):
            self.request(index, Request.RESHARD)

    # actions ------------------------------------------------------------------------------

    def _of_unit(self, method: Callable[[Unit], None], index: int) -> None:
        method(self.units[index])

    def _drop_stale(self, index: int) -> None:
        self.units[index].sync_requires_grad()
        if self._stale_params.must_drop(index):
            self.request(index, Request.RESHARD)

    def _unshard(self, index: int) -> None:
        self._gathers.prefetch(self._schedule.gathered_with(index), self._prefetch)
        if self.root.in_backward:
            self.units[index].sync_requires_grad()  # a hook or a recompute in this backward may have changed it
            if not self.is_unsharded(index) and self.units[index].versions.is_copy_of_others:
                self.request(index, Request.RESHARD)  # an evaluation has gathered other weights, put back by the user since
        if done := self.request(index, Request.UNSHARD):
            self.reducer.gathered(index)  # without effect outside a backward: the next one begins anew
        self.streams.unit_begins(Effect.WAIT_ALL_GATHER in done)
        if Effect.WAIT_ALL_GATHER in done:
            self._gathers.prefetch(self._schedule.needed(index), self._prefetch)

    def request(self, index: int, request: Request) -> tuple[Effect, ...]:
        """Apply a request to the residency of a unit and execute its effects, which are returned."""
        handlers, effects = self._effect_handlers[index], self._residencies[index].on(request)
        for effect in effects:
            handlers[effect]()
        return effects

    def _free_unsharded(self, index: int) -> None:
        self.units[index].free_unsharded()
        self._stale_params.on_freed(index)

    def _all_gather(self, index: int) -> None:
        self._stale_params.prepare_gather(index)
        self._gathers.gather(index)

    def _commit(self, index: int) -> None:
        if self.reducer.settle():
            self.schedules.on_step_completed(in_forward=bool(self._forward_stack))
        self.reducer.commit(index)
        self._stale_params.on_commit(index)

    def _join_backward(self, index: int) -> None:
        kind = kind_of_backward(self.synchronises, self.splits_backward)
        self.root.begin(kind)
        self._sync_requires_grad()
        if self.watcher is not None and not self._forward_stack:
            self.watcher.before_backward(kind is BackwardEvent.SYNC_BEGINS)
        self.pending_backward.expect(False)
        if self._forward_stack:
            if not self.units[self._forward_stack[0]].is_running:
                self.refuse_two_threads()
            self._hooks.write_back_inplace_of_forward()
        self._task = graph_task()
        self._schedule = self.schedules.backward
        self.reducer.begin(accumulates=kind is BackwardEvent.NO_SYNC_BEGINS)
        if kind is BackwardEvent.SYNC_BEGINS and self.reducer.policy.find_unused_parameters:
            self.reducer.expect_only_used(gets_gradient)
        self.call_at_end_of_graph_task(self.pending_backward.callback(self.root, self.on_backward_ended, self.on_backward_failed))
        self._begin_pass(is_forward=False)
        self._gathers.prefetch(self._schedule.begin(), self._prefetch)  # while the layers of the root itself compute

    def _sync_requires_grad(self) -> None:
        """Apply changes of `requires_grad` before a backward: autograd drops the gradient of a parameter that is frozen then."""
        if self._has_plain_shards or self._flags_seen != shard_changes.count:
            for unit in self.units:
                unit.sync_requires_grad()
            self._flags_seen = shard_changes.count

    def _begin_pass(self, is_forward: bool) -> None:
        self._stale_params.show_to_gathers(is_forward)
        if profiler._is_profiler_enabled is not self.phases.named:
            self.phases.set_named(profiler._is_profiler_enabled)
        self.stats.begin_pass(is_forward)

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions in order; if one fails, abandon the step before the error is raised."""
        unit, action = self._last_unit, Action.UNSHARD
        try:
            for unit, action in instructions:
                self._action_handlers[action](unit)
        except BaseException as failure:
            add_note(failure, self.snapshot, 0 if action is Action.COMMIT else unit, ours=True)  # commits wait for all reductions
            self.abandon_step(failure, unit)
            raise

    def _execute_all(self, instructions: Iterable[Instruction]) -> None:
        """Execute every instruction even if some fail; then raise the first failure."""
        failures: list[BaseException] = []
        for unit, action in instructions:
            try:
                self._action_handlers[action](unit)
            except Exception as failure:
                add_note(failure, self.snapshot, unit, ours=True)
                failures.append(failure)
        if failures:
            raise failures[0]

    def snapshot(self) -> EngineSnapshot:
        """Where every unit is now, as data for error notes, the dump and the story."""
        return take_snapshot(self.units, self.root, [one.state for one in self._residencies], self.comms, self.tracker)
