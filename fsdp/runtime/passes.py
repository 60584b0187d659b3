"""A training step, stage by stage: the first page of the engine.

A hook of torch calls a stage. The stage sends an event to the engine, the tables of `state_machine` answer with actions, and the
engine executes them. `Passes.__init__` has what executes each action; `wait_for_unshard` and `reshard` have no other method.
Files without a folder are in fsdp/runtime. In the order of a step:

    stage              called by                                      what it leads to
    pre_forward        forward_hooks.py, before a unit's forward      the first one begins the pass; PRE_FORWARD
    drop_stale         DROP_STALE                                     is a copy from before too old? (stale_params.py)
    unshard            UNSHARD                                        requests to the Residency; prefetch (prefetch.py)
    all_gather         ALL_GATHER, an effect of the Residency         launch_gathers.py, fsdp/params/unit.py, fsdp/comm
    wait_for_unshard   WAIT_ALL_GATHER and USE_UNSHARDED, effects     fsdp/params/unit.py: the modules show full parameters
    post_forward       forward_hooks.py, after a unit's forward       POST_FORWARD: RESHARD. Then the hook hooks the outputs
    reshard            RESHARD, where no later stage needs the copy   a request to the Residency, which frees the copy
    pre_backward       backward_hooks.py, as autograd enters a unit   PRE_BACKWARD: UNSHARD
    begin_backward     JOIN_BACKWARD, of the first unit               the kind of the backward; its final callback
    add_gradient       backward_hooks.py, at a unit's first gradient  GRAD_ACCUMULATED
    post_backward      backward_hooks.py, when autograd has left      POST_BACKWARD: RESHARD, REDUCE_GRADS (fsdp/reduction)
    finalize_backward  the final callback (backward_end.py)           FINAL_CALLBACK for all units: FLUSH_GRADS, then COMMIT
    commit             COMMIT                                         waits for all reductions once; `.grad` of the shards
"""

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable, profiler

from fsdp.autograd.dynamo import is_compiled
from fsdp.autograd.frames import gets_gradient, graph_task
from fsdp.autograd.visits import ForwardCall, Pass
from fsdp.comm.exchanges import broadcast_buffers
from fsdp.debug.error_notes import add_note_to_what_ends_the_backward
from fsdp.errors import ShardingError, WorldError
from fsdp.params.module_tree import ModuleTree
from fsdp.params.unit import Unit
from fsdp.runtime.backward_end import kind_of_backward
from fsdp.runtime.engine import Engine
from fsdp.runtime.launch_gathers import Gathers
from fsdp.runtime.path_policy import PathPolicy
from fsdp.runtime.stale_params import StaleParams
from fsdp.shards.shard_parameter import shard_changes
from state_machine import Action, BackwardEvent, CopyEvent, Effect, Event, Request

_COMPILER = "torch._dynamo.convert_frame"
"""The module's name, because importing it takes most of a second."""
_SUCCEEDS = (BackwardEvent.CALLBACK_RUNS, BackwardEvent.CALLBACK_RUNS_INSIDE)
"""The events that end a backward which has not failed."""


class Passes:
    """The stages of the forwards and backwards of one root."""

    def __init__(self, engine: Engine, path: PathPolicy, gathers: Gathers) -> None:
        self.engine = engine
        self._units = units = engine.units
        self._root = engine.root
        self._reducer = reducer = engine.reducer
        self._streams = engine.streams
        self._path = path
        self._gathers = gathers
        self._stale_params = StaleParams(units, engine.root, engine.streams, engine.comms.world_comm)
        self._compiled = 0
        """How many functions torch.compile had compiled in this process when the backward began."""
        self._asks_flags = any(flat.asks_addresses for unit in units for flat in unit.flats)
        """Whether a change of `requires_grad` of a shard is not seen in `shard_changes`."""
        self._flags_seen = -1
        """`shard_changes` when the flags of all units were last looked at."""
        self._prefetch = partial(engine.request, request=Request.PREFETCH)
        engine.attach(
            path,
            {
                Action.DROP_STALE: self.drop_stale,
                Action.UNSHARD: self.unshard,
                # the hook that has sent the event does it when all others are done
                Action.HOOK_OUTPUTS: lambda index: None,
                Action.KEEP_UNSHARDED: partial(engine.request, request=Request.CACHE),
                Action.RESHARD: partial(engine.request, request=Request.RESHARD),
                Action.INTERCEPT_READS: lambda index: units[index].intercept_reads(),
                Action.JOIN_BACKWARD: self.begin_backward,
                # where ranks go different ways, gradients of a unit may come later on another one, or not at all
                Action.REDUCE_GRADS: reducer.reduce if path.same_for_all else lambda index: None,
                Action.FLUSH_GRADS: partial(reducer.flush, exchange=path.exchange_used),
                Action.COMMIT: self.commit,
                Action.ACCUMULATE_UNSHARDED: reducer.accumulate_unsharded,
                Action.WAIT_REDUCTIONS: reducer.drain,
                Action.DROP_GRADS: reducer.drop,
                Action.GATHER_FULL: lambda index: units[index].gather_full(),
                Action.WRITE_BACK: lambda index: units[index].full_params.write_back(),
                Action.FREE_FULL: lambda index: units[index].free_full(),
            },
            [
                {
                    Effect.ALL_GATHER: partial(self.all_gather, index),
                    Effect.WAIT_ALL_GATHER: partial(engine.stats.wait, "gather_wait_s", unit.wait_all_gather),
                    Effect.USE_UNSHARDED: unit.use_unsharded,
                    Effect.USE_SHARDED: unit.use_sharded,
                    Effect.FREE_UNSHARDED: partial(self._free_unsharded, index),
                }
                if unit.flats
                else {}  # nothing is there to gather
                for index, unit in enumerate(units)
            ],
        )

    # forward ------------------------------------------------------------------------------

    def pre_forward(self, call: ForwardCall) -> None:
        """Begin the forward of a unit, outside any backward. Clean up first after a pass that failed unnoticed."""
        engine, index = self.engine, call.unit
        if engine.forward.calls:
            outer = engine.forward.calls[-1].unit
            if index not in engine.descendants[outer] and not self._units[outer].is_running:
                engine.refuse_two_threads()
                engine.abandon_step()
        if not engine.forward.calls:
            self._begin_forward(index)
        engine.on_event(index, Event.PRE_FORWARD)
        engine.forward.calls.append(call)

    def _begin_forward(self, index: int) -> None:
        """A forward of the root begins with this unit: do what all ranks do together before it."""
        engine, outermost, records_graph = self.engine, self._units[0], torch.is_grad_enabled()
        outermost.refuse_put_away()
        engine.pending_backward.await_end()
        if self._root.in_backward:
            engine.refuse_two_threads()  # they must not end each other's backward
        if self._end_backward(BackwardEvent.PASS_BEGINS):
            engine.notify_peers(self._units[engine.failing_unit].name, None)
        engine.forward = Pass()
        try:
            ModuleTree.of(outermost.module).check(self._units)
            self._path.forward_begins(records_graph)
            engine.watcher.before_forward(records_graph)
            self._meet_after_failure()
            if outermost.config.broadcast_buffers and records_graph:
                broadcast_buffers(outermost.modules, engine.comms.world_comm, engine.watcher.source)
            if self._reducer.policy.find_unused_parameters:
                # a rank may not use a unit that is frozen on all ranks
                for unit in self._units:
                    unit.sync_requires_grad()
            for stale in self._stale_params.begin_pass(records_graph):
                engine.request(stale, Request.RESHARD)
        except BaseException as failure:
            # another rank may have abandoned the last step or differ from this one; this rank waited between two passes
            engine.fail(failure, index)
            raise
        self._path.forward.begin()
        self._begin_pass(is_forward=True)

    def _meet_after_failure(self) -> None:
        """Learn whether a step was abandoned since the last pass, here or on another rank."""
        engine = self.engine
        abandoned = engine.pending_backward.was_abandoned()
        if (restart := engine.pending_backward.announce_restart(self._units[0].name)) is not None:
            engine.abandon_step(restart, 0)
        if engine.pending_backward.was_abandoned() or abandoned:  # also just now by this rank: its peers forget in this step
            self._path.forget()
        if engine.comms.across is not None:
            # a rank of another dimension may still be in a step that was abandoned
            engine.comms.across.reconnect()

    def drop_stale(self, index: int) -> None:
        """Free the unsharded copy of a unit from before, if it may not be used."""
        self._units[index].sync_requires_grad()
        if self._stale_params.must_drop(index):
            self.engine.request(index, Request.RESHARD)

    def unshard(self, index: int) -> None:
        """Gather a unit, unless it is gathered, wait, and let its modules show unsharded parameters. Prefetch what comes next."""
        engine, in_backward = self.engine, self._root.in_backward
        schedule = self._path.backward if in_backward else self._path.forward
        if together := schedule.gathered_with(index):
            self._gathers.prefetch(together, self._prefetch)
        if in_backward:
            unit = self._units[index]
            unit.sync_requires_grad()  # a hook or a recompute in this backward may have changed it
            if unit.versions.is_copy_of_others and not engine.is_unsharded(index):
                engine.request(index, Request.RESHARD)  # an evaluation has gathered other weights, put back by the user since
        done = engine.request(index, Request.UNSHARD)
        if done and in_backward:
            self._reducer.gathered(index)
        if in_backward and self._compiled and self._has_compiled(index):
            unit.open_in_backward()
        waited = Effect.WAIT_ALL_GATHER in done
        self._streams.unit_begins(waited)
        if waited:
            self._gathers.prefetch(schedule.needed(index), self._prefetch)

    def all_gather(self, index: int) -> None:
        """Launch the all-gather of a unit, or collect it for one of several small units."""
        self._path.agree_on_gather(index)
        self._stale_params.prepare_gather(index)
        self._gathers.gather(index)

    def pre_recompute(self, call: ForwardCall) -> None:
        """Begin a forward of a unit inside a backward: a checkpoint repeats it, or the user evaluates the model."""
        for index in (call.unit, *self.engine.descendants[call.unit]):
            if self.engine.is_unsharded(index):
                self._units[index].refuse_repointed()
        if not self.engine.is_unsharded(call.unit) and self._units[call.unit].versions.is_copy_of_earlier:
            self.engine.request(call.unit, Request.RESHARD)  # a hook has changed the weights since
        self.engine.on_event(call.unit, Event.PRE_RECOMPUTE)
        self._units[call.unit].begin_recompute()
        self.engine.backward.calls.append(call)

    def leave_recompute(self, call: ForwardCall) -> None:
        """It has returned, failed, or torch has stopped it early. What it has set counts for all units that are entered."""
        self.engine.backward.end(call)
        self._units[call.unit].end_recompute()
        for index in self.engine.unsharded_units():
            self._units[index].sync_requires_grad()
            self._units[index].take_requires_grad()

    def post_forward(self, call: ForwardCall, event: Event) -> None:
        """End the forward of a unit: POST_FORWARD, POST_FORWARD_NO_GRAD or FORWARD_FAILED. The outermost one ends the pass."""
        engine, index, failed = self.engine, call.unit, event is Event.FORWARD_FAILED
        engine.forward.end(call)
        engine.on_event(index, event)
        if not engine.forward.calls:
            try:
                # a pipeline makes forwards of several micro-batches, and says itself where a step begins
                waits = not engine.in_pipeline_step and (engine.synchronises or self._root.backward_gathers)
                engine.pending_backward.expected = event is Event.POST_FORWARD and waits
                for other in engine.gathered_units():
                    engine.request(other, Request.PASS_FAILS if failed else Request.PASS_ENDS)
                if not torch.is_grad_enabled():
                    self._root.evaluation_ends()
                self._stale_params.await_copies()
                if failed:
                    engine.notify_peers(self._units[engine.forward.failed_unit].name, sys.exc_info()[1])
                else:
                    self._path.forward_ends(index, event is Event.POST_FORWARD)
            except BaseException as failure:  # a gather of another rank's path fails where it is awaited
                engine.fail(failure, index)
                raise
        if failed:
            self._path.step_failed()

    def _free_unsharded(self, index: int) -> None:
        self._units[index].free_unsharded()
        self._root.copies[index].on(CopyEvent.RELEASED)

    # backward -----------------------------------------------------------------------------

    def pre_backward(self, index: int) -> None:
        """Autograd is about to enter a unit."""
        self.engine.on_event(index, Event.PRE_BACKWARD)

    def begin_backward(self, index: int) -> None:
        """The first unit joins a backward: find out its kind, queue its final callback, and prefetch what it needs first."""
        engine, calls = self.engine, self.engine.forward.calls
        kind = kind_of_backward(engine.synchronises, engine.splits_backward)
        reduces = kind is BackwardEvent.SYNC_BEGINS
        self._root.begin(kind)
        # autograd drops the gradient of a parameter that is frozen when it comes
        self._look_at_flags(Unit.sync_requires_grad)
        if not calls:
            engine.watcher.before_backward(reduces)
        engine.pending_backward.expected = False
        if calls:
            if not self._units[calls[0].unit].is_running:
                engine.refuse_two_threads()
            for call in calls:  # this backward may gather their units again
                call.path.versions += self._units[call.unit].write_back_inplace(call.taken)
        engine.backward = Pass(graph_task())
        self._compiled = getattr(sys.modules.get(_COMPILER), "FRAME_COUNTER", 0)
        self._reducer.begin(accumulates=kind is BackwardEvent.NO_SYNC_BEGINS)
        if reduces and self._reducer.policy.find_unused_parameters:
            self._reducer.expect_only_used(gets_gradient)
        # no variable holds the callback: the traceback of an error in this function would keep it, and it acts when it is dropped
        self.call_at_end_of_graph_task(
            engine.pending_backward.callback(self._root, self.finalize_backward, self.on_backward_failed)
        )
        self._begin_pass(is_forward=False)
        self._gathers.prefetch(self._path.backward.begin(), self._prefetch)  # while the layers of the root itself compute

    def _look_at_flags(self, method: Callable[[Unit], None]) -> None:
        """Call `method` with each unit if `requires_grad` of a shard may have changed since the last time."""
        if self._asks_flags or self._flags_seen != shard_changes.count:
            for unit in self._units:
                method(unit)
            self._flags_seen = shard_changes.count

    def call_at_end_of_graph_task(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the end of the current graph task: of the backward, or of a reentrant checkpoint in it."""
        Variable._execution_engine.queue_callback(callback)

    def add_gradient(self, index: int) -> None:
        """The first gradient of a unit was accumulated."""
        self.engine.on_event(index, Event.GRAD_ACCUMULATED)
        self._units[index].begin_pending()

    def add_early_gradient(self, bucket: int) -> None:
        """A gradient of an early bucket was accumulated: launch the bucket if that was the last one."""
        # a reentrant checkpoint may accumulate a second gradient in the same parameter
        if self._root.synchronises and graph_task() == self.engine.backward.graph_task and self._reducer.arrived(bucket):
            try:
                self._reducer.advance()
            except BaseException as failure:
                self.engine.fail(failure, self._reducer.buckets[bucket].unit)
                raise

    def post_backward(self, index: int) -> None:
        """Autograd has left a unit, whose gradients are complete."""
        self.engine.on_event(index, self._root.post_backward_event())

    def finalize_backward(self) -> None:
        """End the backward: reduce what is left, wait for all reductions, and put the gradients into `.grad`."""
        try:
            self._look_at_flags(Unit.refuse_changed_flags)
            for index in self.engine.unsharded_units():  # reductions look at the flags of shards
                self._units[index].take_requires_grad()
                self._units[index].listed.set(False)
        except ShardingError as refusal:
            self.engine.fail(refusal, self.engine.last_unit)
            raise
        self._end_backward(BackwardEvent.CALLBACK_RUNS_INSIDE if self.engine.forward.calls else BackwardEvent.CALLBACK_RUNS)

    def commit(self, index: int) -> None:
        """Put the reduced gradients of a unit into `.grad`. Wait for those of all units before the first one."""
        if not self._reducer.settled:
            self._reducer.settle()
            if not self.engine.forward.calls:  # a backward inside a forward is not the end of a step
                self._path.on_step_completed()
            self._reducer.run_grad_hooks()
        self._reducer.commit(index)
        if self._units[index].trains:  # an optimizer may step from now on
            self._root.copies[index].on(CopyEvent.COMMITTED)

    def on_backward_failed(self) -> None:
        """Clean up after a failed backward on its compute stream, and notify other ranks as soon as its exception is known."""
        engine, unit = self.engine, self.engine.last_unit
        failed = self._units[unit].name
        shows = add_note_to_what_ends_the_backward(engine.snapshot, unit, lambda error: engine.notify_peers(failed, error))
        with self._streams.computing(), suppress(ShardingError, WorldError):  # the backward has failed already
            self._end_backward(BackwardEvent.FAILS_INSIDE if engine.forward.calls else BackwardEvent.FAILS)
        if not shows:
            engine.notify_peers(failed, None)

    def _end_backward(self, event: BackwardEvent) -> bool:
        """End the backward for every unit, in the agreed order; return whether a backward was running."""
        engine, succeeds, reduces = self.engine, event in _SUCCEEDS, self._root.synchronises
        if self._root.in_backward:
            self._path.backward_ends(succeeds)
        if (instructions := self._root.end_backward(event, self._reducer.order.units)) is None:
            return False
        engine.forget_backward()
        if not succeeds:
            engine.execute_all(instructions)
            return True
        engine.execute(instructions)
        self._stale_params.await_copies()
        engine.stats.end_backward(reduces)
        # others are not those of all ranks, or may be dropped
        if reduces or (self._path.same_for_all and not engine.in_pipeline_step):
            engine.comms.completed()
        try:
            self._reducer.run_hooks(engine.note)
        finally:  # the gradients are reduced, also if a hook of the user raises
            engine.watcher.after_backward()
        return True

    def _begin_pass(self, is_forward: bool) -> None:
        self._stale_params.show_to_gathers(is_forward)
        if profiler._is_profiler_enabled is not self.engine.phases.named:
            self.engine.phases.set_named(profiler._is_profiler_enabled)
        self.engine.stats.begin_pass(is_forward)

    def _has_compiled(self, index: int) -> bool:
        """Whether torch.compile has compiled a module of a unit. Modules of inner units are left out."""
        others = {module for inner in self.engine.descendants[index] for module in self._units[inner].modules}
        return any([_is_compiled(module, others) for module in self._units[index].modules])


def _is_compiled(module: nn.Module, others: Collection[nn.Module]) -> bool:
    """Whether torch.compile has compiled `module`, an attribute of it, or one below it that is none of `others`."""
    if isinstance(module, torch.jit.ScriptModule):
        return False  # its class has no forward that could be read
    functions = (type(module).forward, *module.__dict__.values())
    is_itself = module._compiled_call_impl is not None or any(map(is_compiled, functions))
    return is_itself or any([child not in others and _is_compiled(child, others) for child in module.children()])
