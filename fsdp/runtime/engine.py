"""Events -> root -> instructions -> units, across the units of one root.

Rule 1: the tables decide, the engine carries out. It asks no state to choose what to do.
Rule 2: the root moves first, so an illegal event changes nothing at all.
Rule 3: if carrying out fails half-way, the whole step is abandoned before the error goes on.

[Note: how a backward ends]
The first unit that joins queues one callback. It runs when the outermost graph task is done, also around reentrant checkpoints.
When the backward fails instead, torch drops the callback uncalled while the exception is on its way to the user;
`FinalCallback.__del__` notices that.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.autograd import Variable

from fsdp.autograd.frames import gets_gradient, graph_task, in_autograd_grad, is_running
from fsdp.comm.context import CommContext
from fsdp.debug.error_notes import add_note, add_note_to_what_ends_the_backward, is_noted
from fsdp.debug.snapshot import EngineSnapshot, take_snapshot
from fsdp.device.storage import MemoryTracker
from fsdp.device.streams import Streams
from fsdp.errors import WorldError
from fsdp.params.unit import Unit
from fsdp.reduction.reducer import Reducer
from fsdp.runtime.buffers import broadcast_buffers
from fsdp.runtime.final_callback import FinalCallback
from fsdp.runtime.pending_backward import PendingBackward
from fsdp.runtime.prefetch import PrefetchSchedule
from fsdp.runtime.stale_params import StaleParams
from state_machine import (
    Action,
    BackwardState,
    Effect,
    Event,
    IllegalTransition,
    Instruction,
    Lifecycle,
    Request,
    ReshardPolicy,
    Residency,
    ResidencyState,
    Root,
)


class Engine:
    """Drives the units of one root through their lifecycles."""

    def __init__(
        self,
        units: Sequence[Unit],
        descendants: Sequence[frozenset[int]],
        comms: CommContext,
        streams: Streams,
        tracker: MemoryTracker,
    ) -> None:
        self.units = tuple(units)
        self.comms = comms
        self.tracker = tracker
        self.synchronises = True
        """Whether a backward that begins now reduces its gradients (`no_sync`)."""
        self.descendants = tuple(descendants)
        self._streams = streams
        strategies = [unit.config.strategy for unit in units]
        strategies[0] = units[0].config.root_strategy
        self._never_resharded = tuple(index for index, strategy in enumerate(strategies) if strategy is ReshardPolicy.NEVER)
        """The units whose copies outlive a pass."""
        self._backward_unshards = ReshardPolicy.AFTER_FORWARD in strategies
        """Whether a backward that reduces nothing needs the other ranks all the same."""
        self.pending_backward = PendingBackward(comms)
        self._copies = StaleParams(self.units, comms.world_comm)
        self.root = Root([Lifecycle(unit.name, strategy) for unit, strategy in zip(units, strategies, strict=True)])
        self._residencies = tuple(Residency(unit.name) for unit in units)
        self.reducer = Reducer(units, [not inside for inside in descendants], comms, streams, tracker)
        self._forward_schedule = PrefetchSchedule(units[0].config.prefetch)
        self._backward_schedule = PrefetchSchedule(units[0].config.prefetch)
        self._schedule = self._forward_schedule
        self._forward_stack: list[int] = []
        """The units whose forward is running, outermost first."""
        self._pass_number = 0
        self._may_have_stepped = False
        """A backward inside the forward that runs is over, so shards may be written at any time before it ends."""
        self._last_unit = 0
        """The unit of the last event."""
        self._failed = 0
        """The unit in which a forward failed last."""
        self.backward_synchronises = True
        """Whether the backward that runs reduces its gradients."""
        self._synchronises_gradients = True
        """Whether it does if there are any."""
        self.backward_number = 0
        self._task = -1
        """The graph task in which the backward came to the first unit."""
        self.before_pass: Callable[[bool, bool], None] | None = None
        """Inside `join`: told of each pass, whether it is a backward, and whether it records a graph or reduces gradients."""
        self.hook_outputs: Callable[[int], None] = _nobody
        """Set by the hooks: puts pre-backward hooks on what the unit's forward has just returned."""
        self.end_backward_progress: Callable[[], None] = _nobody
        """Set by the hooks: a backward is over, and what arrived in it is no concern of the next."""
        self.abandon_calls: Callable[[], None] = _nobody
        """Set by the hooks: what runs has been given up."""
        self.write_back_inplace_of_forward: Callable[[], None] = _nobody
        """Set by the hooks: a backward begins inside a forward, which may have changed parameters in place."""
        self._action_handlers: dict[Action, Callable[[int], None]] = {
            Action.DROP_STALE: self._refresh,
            Action.UNSHARD: self._need,
            Action.KEEP_UNSHARDED: lambda index: self._request(index, Request.CACHE),
            Action.RESHARD: lambda index: self._request(index, Request.RESHARD),
            Action.HOOK_OUTPUTS: lambda index: self.hook_outputs(index),
            Action.INTERCEPT_READS: lambda index: self.units[index].intercept_reads(),
            Action.JOIN_BACKWARD: self._join_backward,
            Action.REDUCE_GRADS: self.reducer.reduce,
            Action.FLUSH_GRADS: self.reducer.flush,
            Action.COMMIT: self.reducer.commit,
            Action.ACCUMULATE_UNSHARDED: self.reducer.accumulate_unsharded,
            Action.WAIT_REDUCTIONS: lambda index: self.reducer.drain(),
            Action.DROP_GRADS: self.reducer.drop,
            Action.GATHER_FULL: lambda index: self.units[index].gather_full(),
            Action.WRITE_BACK: lambda index: self.units[index].write_back(),
            Action.FREE_FULL: lambda index: self.units[index].free_full(),
        }
        self._effects: tuple[dict[Effect, Callable[[], None]], ...] = tuple(
            {
                Effect.ALL_GATHER: partial(self._launch, index),
                Effect.WAIT_ALL_GATHER: unit.wait_unshard,
                Effect.USE_UNSHARDED: unit.show,
                Effect.USE_SHARDED: unit.hide,
                Effect.FREE_UNSHARDED: unit.release,
            }
            for index, unit in enumerate(units)
        )

    # events -------------------------------------------------------------------------------

    def on_event(self, index: int, event: Event) -> None:
        """Take one event of one unit and do what the table answers, in order.

        Raises:
            IllegalTransition: nothing moved.
        """
        self._last_unit = index
        try:
            instructions = self.root.on_event(index, event)
        except IllegalTransition as refusal:
            add_note(refusal, self.snapshot, index)
            raise
        self._execute(instructions)

    def note(self, error: BaseException, index: int | None = None) -> None:
        """Say on `error` which unit it came from: of `index`, or the innermost one whose forward runs."""
        index = index if index is not None else self._forward_stack[-1] if self._forward_stack else self._last_unit
        if not is_noted(error):
            self._failed = index
            add_note(error, self.snapshot, index)

    def backward_fails(self) -> None:
        """The backward that runs is dying: clean up, and let the other ranks know as soon as its exception shows."""
        failed = self.units[self._last_unit].name
        shows = add_note_to_what_ends_the_backward(self.snapshot, self._last_unit, lambda error: self.notify_peers(failed, error))
        with suppress(WorldError):  # it may die because of one
            self.close_backward(Event.BACKWARD_FAILED)
        if not shows:
            self.notify_peers(failed, None)

    def forward_begins(self, index: int) -> None:
        """A forward outside any backward begins: keep the path, and clean up after a pass that died unnoticed."""
        outer = self._forward_stack[-1] if self._forward_stack else None
        if outer is not None and index not in self.descendants[outer] and not is_running(self.units[outer].module):
            self.abandon_step()
        if not self._forward_stack:
            if self.root.backward is BackwardState.RUNNING:
                self.close_backward(Event.BACKWARD_FAILED)
                self.notify_peers(self.units[self._last_unit].name, None)
            try:
                self._prepare_pass()
            except BaseException as failure:
                # a peer may have abandoned the step before, or disagree; this rank waited for it between two passes
                add_note(failure, self.snapshot, index, ours=True)
                self.abandon_step(failure, index)
                raise
            self._forward_schedule.begin()
            self._streams.pass_begins()
        self._schedule = self._forward_schedule
        self.on_event(index, Event.PRE_FORWARD)
        self._forward_stack.append(index)

    def clean_up_dead_forward(self) -> None:
        """Clean up after a forward that Ctrl-C ended: no hook hears that."""
        if self._forward_stack and not is_running(self.units[self._forward_stack[0]].module):
            self.abandon_step()

    def clean_up_dead_forward_of(self, index: int) -> None:
        """A forward of this unit has died unheard: clean up after it, unless that was done."""
        if index in self._forward_stack:
            self.abandon_step()

    def forward_ends(self, index: int, event: Event) -> None:
        """A forward outside any backward ended, in one of its three ways."""
        if index in self._forward_stack:
            del self._forward_stack[self._forward_stack.index(index) :]
        self.on_event(index, event)
        if not self._forward_stack:
            needs_peers = self.synchronises or self._backward_unshards
            self.pending_backward.expected = event is Event.POST_FORWARD and needs_peers
            # a pass that left the record may have asked for units it never called; one that failed has no backward
            leftovers = {ResidencyState.UNSHARDING}
            if event is Event.FORWARD_FAILED:
                leftovers.add(ResidencyState.CACHED)
            for other, residency in enumerate(self._residencies):
                if residency.state in leftovers:
                    self._request(other, Request.RESHARD)
            if event is Event.FORWARD_FAILED:
                self.notify_peers(self.units[self._failed].name, sys.exc_info()[1])

    def gradient_counts(self, bucket: int) -> None:
        """A gradient of a counted bucket has come."""
        # a reentrant checkpoint may bring a second one to the same parameter
        if self.backward_synchronises and graph_task() == self._task and self.reducer.arrived(bucket):
            try:
                self.reducer.advance()
            except BaseException as failure:
                unit = self.reducer.buckets[bucket].unit
                add_note(failure, self.snapshot, unit, ours=True)
                self.abandon_step(failure, unit)
                raise

    def gradients_come(self) -> None:
        """They do, by a backward inside what looked like autograd.grad alone."""
        self.backward_synchronises = self._synchronises_gradients

    def at_the_end_of_this_task(self, callback: Callable[[], None]) -> None:
        """Call back when the graph task that runs is done: the backward, or that of a reentrant checkpoint in it."""
        Variable._execution_engine.queue_callback(callback)

    def close_backward(self, event: Event) -> None:
        """Tell every unit how the backward ended, in the agreed order."""
        instructions = self.root.end_backward(event, self.reducer.order)
        self.end_backward_progress()
        if event is Event.FINAL_CALLBACK:
            self._copies.backward_synchronised()
        if event is Event.BACKWARD_FAILED:
            self._execute_all(instructions)
        else:
            self._may_have_stepped = bool(self._forward_stack)
            self._execute(instructions)
            self.comms.completed()
            self.reducer.run_hooks(self.note)

    def abandon_step(self, failure: BaseException | None = None, index: int | None = None) -> None:
        """A step has failed: abandon it, and let the other ranks know."""
        index = index if index is not None else self._forward_stack[-1] if self._forward_stack else self._last_unit
        with suppress(Exception):  # none may hide the failure
            self._reset_step()
        self.notify_peers(self.units[index].name, failure)

    def notify_peers(self, unit: str, failure: BaseException | None) -> None:
        """A step is over before its end: let the other ranks know, who may wait for this one."""
        self.pending_backward.expected = False
        self._forward_schedule.forget()
        self._backward_schedule.forget()
        self.comms.abandon(unit, failure)

    def _reset_step(self) -> None:
        """Give up whatever is going on; afterwards every unit is IDLE and sharded, nothing is in flight."""
        self._forward_stack.clear()
        self.end_backward_progress()
        self.abandon_calls()
        self._execute_all(self.root.abandon_step(self.reducer.order))

    @property
    def residency(self) -> list[ResidencyState]:
        """Where the whole parameters of each unit are."""
        return [residency.state for residency in self._residencies]

    def is_unsharded(self, index: int) -> bool:
        """Whether the unit computes with its whole face."""
        return self._residencies[index].state is ResidencyState.UNSHARDED

    def _prepare_pass(self) -> None:
        """What all ranks do together before a forward begins."""
        trains = torch.is_grad_enabled()
        if self.before_pass is not None:
            self.before_pass(False, trains)
        if self.pending_backward.was_abandoned():
            self._forward_schedule.forget()
            self._backward_schedule.forget()
        given_up = self.pending_backward.given_up(self.units[0].name)
        if given_up is not None:
            self.abandon_step(given_up, 0)
        if self.units[0].config.broadcast_buffers and trains:
            broadcast_buffers(self.units[0].module, self.comms.world_comm)
        if self.reducer.policy.find_unused_parameters:
            # a rank may not come to a unit that all of them have frozen
            for unit in self.units:
                unit.sync_requires_grad()
        self._pass_number += 1
        self._may_have_stepped = False
        if self._never_resharded:
            kept = [
                i for i in self._never_resharded if self._residencies[i].state is ResidencyState.CACHED and self.units[i].flats
            ]
            for index in self._copies.pass_begins(kept):
                self._request(index, Request.RESHARD)

    # actions ------------------------------------------------------------------------------

    def _refresh(self, index: int) -> None:
        unit = self.units[index]
        unit.sync_requires_grad()
        keeps = index in self._never_resharded
        outlived = unit.gathered_in_pass != self._pass_number and not keeps
        # an optimizer passes by empty shards, so after its step the counters of ranks differ
        if outlived or (keeps and self._may_have_stepped) or unit.gathered_versions != unit.versions_in_forward:
            self._request(index, Request.RESHARD)

    def _need(self, index: int) -> None:
        where = self._residencies[index].state
        if where is not ResidencyState.UNSHARDED and self.root.backward is BackwardState.RUNNING:
            self.reducer.reached_again(index)
        missing = where in (ResidencyState.SHARDED, ResidencyState.UNSHARDING)
        self._request(index, Request.UNSHARD)
        if missing:
            for ahead in self._schedule.needed(index):
                self._request(ahead, Request.PREFETCH)

    def _request(self, index: int, ask: Request) -> None:
        effects = self._effects[index]
        for effect in self._residencies[index].on(ask):
            effects[effect]()

    def _launch(self, index: int) -> None:
        unit = self.units[index]
        unit.gathered_in_pass = self._pass_number
        if self.root.backward is BackwardState.RESTING:
            if unit.check_shards() or self._may_have_stepped:
                self._streams.pass_begins()
            unit.gathered_versions = unit.versions
        if index in self._never_resharded:
            unit.remember_sums()
        unit.launch()

    def _join_backward(self, index: int) -> None:
        # autograd.grad brings no gradient to a parameter, so there is nothing to reduce, on any rank
        self._synchronises_gradients = self.synchronises
        self.backward_synchronises = self.synchronises and not in_autograd_grad()
        if self.before_pass is not None and not self._forward_stack:
            self.before_pass(True, self.backward_synchronises)
        self.pending_backward.expected = False
        if self._forward_stack:
            self.write_back_inplace_of_forward()
        self.backward_number += 1
        self._task = graph_task()
        self._schedule = self._backward_schedule
        self.reducer.begin()
        if not self.synchronises:
            self.reducer.expect_accumulated()
        if self.backward_synchronises and self.reducer.policy.find_unused_parameters:
            self.reducer.expect_only_used(gets_gradient)
        self.at_the_end_of_this_task(FinalCallback(self))
        self._streams.pass_begins()
        # what this backward needs first may be gathered while the root's own layers compute
        for ahead in self._backward_schedule.begin():
            self._request(ahead, Request.PREFETCH)

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions in order; if one fails, give up the step before the error goes on."""
        unit, action = self._last_unit, Action.UNSHARD
        try:
            for unit, action in instructions:
                self._action_handlers[action](unit)
        except BaseException as failure:
            # the first commit settles the whole backward
            add_note(failure, self.snapshot, 0 if action is Action.COMMIT else unit, ours=True)
            self.abandon_step(failure, unit)
            raise

    def _execute_all(self, instructions: Iterable[Instruction]) -> None:
        """Carry out every instruction even if some fail; then raise the first failure."""
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
        return take_snapshot(self.units, self.root, self.residency, self.comms, self.tracker)


def _nobody(*_: int) -> None:
    raise RuntimeError("an engine without hooks; this is a bug in fsdp, please report it.")
