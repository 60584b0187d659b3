"""The engine of one root: asks the tables about each event of passes.py, and executes their actions on the units, in order.

Rule 1: the tables decide, the engine executes. It reads no state to choose an action.
Rule 2: the root changes its state first, so an illegal event changes nothing.
Rule 3: if an action fails half-way, the step is abandoned before the error is raised.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fsdp.autograd.visits import Pass, Visit
from fsdp.comm.context import CommContext
from fsdp.comm.open_communicators import place_in_job
from fsdp.debug.error_notes import EngineSnapshot, UnitSnapshot, add_note, is_noted
from fsdp.debug.phases import Phases
from fsdp.debug.threads import refuse_two_threads
from fsdp.device.storage import MemoryTracker
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit
from fsdp.reduction.reducer import Reducer
from fsdp.reduction.stats import StepStats
from fsdp.runtime.backward_end import PendingBackward
from fsdp.runtime.path_policy import PassWatcher, PathPolicy
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

ActionHandlers = dict[Action, Callable[[int], object]]
EffectHandlers = dict[Effect, Callable[[], None]]


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
        self.descendants = tuple(descendants)
        self.place_in_job = place_in_job()
        """See `fsdp.comm.open_communicators.place_in_job`."""
        self.comms = comms
        """Failures are passed on to these. A pipeline adds some."""
        self.streams = streams
        self.tracker = tracker
        policies = [units[0].config.root_reshard_policy, *(unit.config.reshard_policy for unit in units[1:])]
        self.root = Root(
            [Lifecycle(unit.name, unit.settings.reshard_policy or policy) for unit, policy in zip(units, policies, strict=True)]
        )
        self._residencies = tuple(Residency(unit.name) for unit in units)
        self.stats = StepStats([unit.gather_sizes for unit in units], tracker)
        self.reducer = Reducer(units, [not inside for inside in descendants], comms, streams, tracker, self.stats)
        self.visited: set[Visit] = set()
        """What the backward that runs has recorded of the units that it has reached."""
        self.visits = [Visit(self.visited) for _ in units]
        """What a backward does in each unit."""
        self.pending_backward = PendingBackward(comms, streams.on_host, self.visits)
        self.synchronises: bool | None = True
        """Whether a backward that begins now reduces its gradients. False under `no_sync`; None: its units differ."""
        self.splits_backward = False
        """Whether a pipeline stage computes gradients of inputs and of weights apart. Unsharded parameters have the latter."""
        self.in_pipeline_step = False
        """Whether a step of a pipeline is going on: if it fails, what is kept of it will be dropped."""
        self._pipeline_epoch = 0
        """The epoch of the communicators when that step began."""
        self.watcher = PassWatcher()
        """Another one inside `fsdp.join`."""
        self.forward = Pass()
        """The forward of the root that runs; at rest one without calls."""
        self.backward = Pass()
        """The backward that runs; at rest one without calls."""
        self.last_unit = 0
        """The unit of the last event."""
        self.path: PathPolicy
        self.phases: Phases

    def attach(self, path: PathPolicy, actions: ActionHandlers, effects: Sequence[EffectHandlers]) -> None:
        """Set how ranks agree on the order of gathers, and what executes each action and each effect. Called once."""
        self.path = path
        self._action_handlers, self._effect_handlers = actions, tuple(effects)
        self.phases = Phases([unit.name for unit in self.units], self._action_handlers, self._effect_handlers)

    @contextmanager
    def synchronising(self, synchronises: bool) -> Iterator[None]:
        """Backwards that begin inside reduce their gradients, or do not."""
        before, self.synchronises = self.synchronises, synchronises
        try:
            yield
        finally:
            self.synchronises = before

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of the parameters."""
        return self.comms.reduce_comm.size == 1 and self.comms.across is None and not self.comms.inner

    def begin_pipeline_step(self) -> None:
        """Micro-batches follow whose gradients are kept. Drop those of a step that has not ended, and what it has gathered."""
        if self.in_pipeline_step:
            self.reset_step()
            self.reducer.forget_kept()
            if self.comms.epoch() == self._pipeline_epoch:  # it failed where no hook sees it, such as in the loss
                self.notify_peers(self.units[self.failing_unit].name, None)
        self.in_pipeline_step, self._pipeline_epoch = True, self.comms.epoch()

    # events and actions -------------------------------------------------------------------

    def on_event(self, index: int, event: Event) -> None:
        """Apply an event to a unit and execute the actions of the table, in order.

        Raises:
            IllegalTransition: the table has no row for the event. No state has changed.
        """
        self.last_unit = index
        try:
            instructions = self.root.on_event(index, event)
        except IllegalTransition as refusal:
            self.refuse_two_threads()
            add_note(refusal, self.snapshot, index)
            raise
        if instructions:
            self.execute(instructions)

    def execute(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions in order; if one fails, abandon the step before the error is raised."""
        unit, action = self.last_unit, Action.UNSHARD
        try:
            for unit, action in instructions:
                self._action_handlers[action](unit)
        except BaseException as failure:
            # commits wait for all reductions
            self.fail(failure, 0 if action is Action.COMMIT else unit)
            raise

    def execute_all(self, instructions: Iterable[Instruction]) -> None:
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

    def request(self, index: int, request: Request) -> tuple[Effect, ...]:
        """Apply a request to the residency of a unit and execute its effects, which are returned."""
        handlers, effects = self._effect_handlers[index], self._residencies[index].on(request)
        if handlers:
            for effect in effects:
                handlers[effect]()
        return effects

    def is_unsharded(self, index: int) -> bool:
        """Whether the modules of the unit use its unsharded parameters."""
        return self._residencies[index].state is ResidencyState.UNSHARDED

    def gathered_units(self) -> list[int]:
        """The numbers of the units that are gathered, or being gathered."""
        return [index for index, one in enumerate(self._residencies) if one.state is not ResidencyState.SHARDED]

    def unsharded_units(self) -> list[int]:
        """The numbers of the units whose modules use unsharded parameters."""
        return [index for index, one in enumerate(self._residencies) if one.state is ResidencyState.UNSHARDED]

    # failures -----------------------------------------------------------------------------

    @property
    def failing_unit(self) -> int:
        """The unit that an error of this moment comes from: the innermost one whose forward runs, or that of the last event."""
        return self.forward.calls[-1].unit if self.forward.calls else self.last_unit

    def note(self, error: BaseException, index: int | None = None) -> None:
        """Note on `error` the unit that it came from: unit `index`, or `failing_unit`."""
        if not is_noted(error):
            index = self.failing_unit if index is None else index
            self.forward.failed_unit = index
            add_note(error, self.snapshot, index)

    def fail(self, failure: BaseException, index: int) -> None:
        """This library has failed in a unit: note it on the error, and abandon the step."""
        add_note(failure, self.snapshot, index, ours=True)
        self.abandon_step(failure, index)

    def abandon_step(self, failure: BaseException | None = None, index: int | None = None) -> None:
        """Abandon a step that failed, and notify the other ranks."""
        unit = self.units[self.failing_unit if index is None else index].name
        with suppress(Exception):  # no other error may hide the failure
            self.reset_step()
        self.notify_peers(unit, failure)

    def notify_peers(self, unit: str, failure: BaseException | None) -> None:
        """Notify the other ranks, which may wait for this one, that a step has ended early."""
        self.pending_backward.expected = False
        self.path.forget()
        self.stats.abandon_step()
        self.comms.abandon(unit, failure)

    def reset_step(self) -> None:
        """Drop the forward and the backward that run. Then every unit is IDLE and sharded, and nothing is in flight."""
        for call in (*self.forward.calls, *self.backward.calls):
            call.discard()
        self.forward = Pass()
        self.splits_backward = False
        self.forget_backward()
        try:
            self.execute_all(self.root.end_backward(BackwardEvent.STEP_ABANDONED, self.reducer.order.units) or ())
        finally:
            self.path.step_failed()

    def forget_backward(self) -> None:
        """The backward is over: forget what it has recorded."""
        self.backward = Pass()
        while self.visited:
            self.visited.pop().reset()

    def clean_up_dead_forward(self, index: int | None = None) -> None:
        """Clean up after a forward that failed unnoticed: that of unit `index`, or one that Ctrl-C ended."""
        calls = self.forward.calls
        if any([call.unit == index for call in calls]):
            self.abandon_step()
        elif index is None and calls and not self.units[calls[0].unit].is_running:
            self.refuse_two_threads()
            self.abandon_step()

    def refuse_two_threads(self) -> None:
        """Raise ShardingError if another thread is inside this root. Called only where something is wrong already."""
        refuse_two_threads({id(one): unit.name for unit in self.units for one in unit.modules}, self.root.in_backward)

    def snapshot(self) -> EngineSnapshot:
        """Where every unit is now, as data for error notes, the dump and the story. Communicates nothing and changes nothing."""
        rank, world_size = self.place_in_job
        comms = self.comms.each()
        return EngineSnapshot(
            rank=rank,
            world_size=world_size,
            backward=self.root.backward,
            bytes_held=dict(self.tracker.held),
            collectives={name: tuple(comm.recent()) for name, comm in comms.items() if comm.size > 1},
            waits=tuple(wait for comm in comms.values() if (wait := comm.waits()) is not None),
            units=tuple(
                UnitSnapshot(unit.name, lifecycle.state, residency.state, lifecycle.story)
                for unit, lifecycle, residency in zip(self.units, self.root.lifecycles, self._residencies, strict=True)
            ),
        )

    # gradients ----------------------------------------------------------------------------

    @property
    def has_unreduced_grads(self) -> bool:
        """Whether gradients of a backward are not in `.grad` yet, or gradients are kept under `no_sync`."""
        return self.is_before_commits or self.reducer.accumulates

    @property
    def is_before_commits(self) -> bool:
        """Whether a backward runs whose gradients are not in `.grad` yet."""
        return self.root.in_backward or self.reducer.runs_grad_hooks

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
