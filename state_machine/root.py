"""The units of one root together: who joins a backward, and what everyone does when it ends.

Pure: it turns an event into instructions; the engine (and the explorer) carry them out.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from state_machine.lifecycle import Lifecycle
from state_machine.table import BACKWARD, BackwardEvent, BackwardState
from state_machine.vocabulary import Action, Event, State


class Instruction(NamedTuple):
    """One thing to do, and the unit to do it for."""

    unit: int
    action: Action


COMMITTING: Final = (Action.COMMIT, Action.ACCUMULATE_UNSHARDED)
CLOSING_EVENTS: Final = (Event.FINAL_CALLBACK, Event.FINAL_CALLBACK_NO_SYNC, Event.BACKWARD_FAILED)


class Root:
    """The lifecycles of the units of one root, and the one backward they may share.

    Invariant: `backward` changes only in `on_event` and `end_backward`; `JOIN_BACKWARD` is among the
    instructions exactly once per backward.
    """

    __slots__ = ("_backward", "_instruction_cache", "lifecycles")

    def __init__(self, lifecycles: Sequence[Lifecycle]) -> None:
        self.lifecycles = tuple(lifecycles)
        self._backward = BackwardState.RESTING
        # the same few answers come over and over
        self._instruction_cache: dict[tuple[int, tuple[Action, ...]], tuple[Instruction, ...]] = {}

    @property
    def backward(self) -> BackwardState:
        return self._backward

    @property
    def at_rest(self) -> bool:
        """No backward runs and every unit is IDLE."""
        return self._backward is BackwardState.RESTING and all(one.state is State.IDLE for one in self.lifecycles)

    def on_event(self, unit: int, event: Event) -> tuple[Instruction, ...]:
        """Tell one unit of one event; return what must be done, in order.

        Raises:
            IllegalTransition: the unit's table has no row for it. Nothing moved.
        """
        actions = self.lifecycles[unit].on(event)
        if Action.JOIN_BACKWARD in actions:
            step = BACKWARD[self._backward][BackwardEvent.UNIT_JOINS]
            self._backward = step.to
            if not step.queue_callback:
                actions = tuple(action for action in actions if action is not Action.JOIN_BACKWARD)
        return self._instructions(unit, actions)

    def end_backward(self, event: Event, order: Sequence[int]) -> tuple[Instruction, ...]:
        """End the backward for every unit, in the agreed order.

        All that can fail comes before the first COMMIT or ACCUMULATE_UNSHARDED, so that either every unit's gradients are kept
        or none's.

        Raises:
            RuntimeError: no backward is running, which only a bug of ours can cause.
        """
        if event not in CLOSING_EVENTS:
            raise RuntimeError(f"{event.name} does not close a backward; this is a bug in fsdp, please report it.")
        step = BACKWARD[self._backward].get(BackwardEvent.CLOSES)
        if step is None:
            raise RuntimeError(f"{event.name} while no backward is running; this is a bug in fsdp, please report it.")
        self._backward = step.to
        told = self._step_all(event, order)
        first = tuple(one for one in told if one.action not in COMMITTING)
        return first + tuple(one for one in told if one.action in COMMITTING)

    def abandon_step(self, order: Sequence[int]) -> tuple[Instruction, ...]:
        """Give up whatever is going on. Legal at any moment; leaves the root at rest."""
        self._backward = BACKWARD[self._backward][BackwardEvent.STEP_ABANDONED].to
        return self._step_all(Event.STEP_ABANDONED, order)

    def _step_all(self, event: Event, order: Sequence[int]) -> tuple[Instruction, ...]:
        return tuple(one for unit in order for one in self._instructions(unit, self.lifecycles[unit].on(event)))

    def _instructions(self, unit: int, actions: tuple[Action, ...]) -> tuple[Instruction, ...]:
        found = self._instruction_cache.get((unit, actions))
        if found is None:
            found = self._instruction_cache[unit, actions] = tuple(Instruction(unit, action) for action in actions)
        return found
