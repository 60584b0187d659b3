"""The units of one root together: who joins a backward, and what everyone does when it ends.

Pure: it turns an event into instructions; the engine (and the explorer) carry them out.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from state_machine.lifecycle import Lifecycle
from state_machine.staleness import GATHERS, Copy, CopyAction, CopyEvent
from state_machine.table import BACKWARD, BackwardEvent, BackwardState, BackwardStep
from state_machine.vocabulary import Action, Event, State


class Instruction(NamedTuple):
    """One thing to do, and the unit to do it for."""

    unit: int
    action: Action


COMMITTING: Final = (Action.COMMIT, Action.ACCUMULATE_UNSHARDED)
RESTING: Final = (BackwardState.RESTING, BackwardState.RESTING_INSIDE)


class Root:
    """The lifecycles and the copies of the units of one root, and the one backward they may share.

    Invariant: `backward` changes only in the methods below; `JOIN_BACKWARD` is among the
    instructions exactly once per backward, and is answered by `begin`.
    """

    __slots__ = ("_backward", "_instruction_cache", "copies", "lifecycles", "number")

    def __init__(self, lifecycles: Sequence[Lifecycle]) -> None:
        self.lifecycles = tuple(lifecycles)
        self.copies = tuple(Copy(one.unit, one.reshard_policy) for one in self.lifecycles)
        self._backward = BackwardState.RESTING
        self.number = 1
        """The number of the backward that runs, or of the next one. What was noted under another number is out of date."""
        # the same few answers come over and over
        self._instruction_cache: dict[tuple[int, tuple[Action, ...]], tuple[Instruction, ...]] = {}

    @property
    def backward(self) -> BackwardState:
        return self._backward

    @property
    def synchronises(self) -> bool:
        """Whether the backward that runs reduces its gradients."""
        return self._backward is BackwardState.RUNNING_SYNC

    @property
    def at_rest(self) -> bool:
        """No backward runs and every unit is IDLE."""
        return self._backward in RESTING and all(one.state is State.IDLE for one in self.lifecycles)

    def on_event(self, unit: int, event: Event) -> tuple[Instruction, ...]:
        """Tell one unit of one event; return what must be done, in order.

        Raises:
            IllegalTransition: the unit's table has no row for it. Nothing moved.
        """
        actions = self.lifecycles[unit].on(event)
        if Action.JOIN_BACKWARD in actions and not self._on(BackwardEvent.UNIT_JOINS).queue_callback:
            actions = tuple(action for action in actions if action is not Action.JOIN_BACKWARD)
        if event is Event.GRAD_ACCUMULATED:
            self._on(BackwardEvent.GRAD_ACCUMULATED)
        return self._instructions(unit, actions)

    def begin(self, event: BackwardEvent) -> None:
        """JOIN_BACKWARD is carried out: say which kind of backward it is, by one of the events that end in BEGINS."""
        self._on(event)

    def post_backward_event(self) -> Event:
        """The gradients of a unit are complete: return the event that this is, which depends on the backward."""
        told = self._on(BackwardEvent.UNIT_COMPLETE).event
        assert told is not None
        return told

    def end_backward(self, event: BackwardEvent, order: Sequence[int]) -> tuple[Instruction, ...] | None:
        """End the backward for every unit, in the agreed order; return what must be done, or None if there was nothing to end.

        All that can fail comes before the first COMMIT or ACCUMULATE_UNSHARDED, so that either every unit's gradients are kept
        or none's.

        Raises:
            RuntimeError: no backward is running that could end so, which only a bug of ours can cause.
        """
        told = self._on(event).event
        if told is None:
            return None
        self.number += 1
        if event is BackwardEvent.CALLBACK_RUNS_INSIDE or event is BackwardEvent.FAILS_INSIDE:
            for copy in self.copies:
                copy.on(CopyEvent.BACKWARD_INSIDE)
        found = tuple(one for unit in order for one in self._instructions(unit, self.lifecycles[unit].on(told)))
        first = tuple(one for one in found if one.action not in COMMITTING)
        return first + tuple(one for one in found if one.action in COMMITTING)

    def before_gather(self, unit: int) -> tuple[CopyAction, ...]:
        """A gather is about to be launched; return what must be done before."""
        return self.copies[unit].on(GATHERS[self._backward])

    def evaluation_ends(self) -> None:
        """A forward of the root that recorded no graph is over."""
        for copy in self.copies:
            copy.on(CopyEvent.EVALUATION_ENDS)

    def _on(self, event: BackwardEvent) -> BackwardStep:
        step = BACKWARD[self._backward].get(event)
        if step is None:
            raise RuntimeError(
                f"the backward: {event.name} is not allowed in {self._backward.name}; this is a bug in fsdp, please report it."
            )
        self._backward = step.to
        return step

    def _instructions(self, unit: int, actions: tuple[Action, ...]) -> tuple[Instruction, ...]:
        found = self._instruction_cache.get((unit, actions))
        if found is None:
            found = self._instruction_cache[unit, actions] = tuple(Instruction(unit, action) for action in actions)
        return found
