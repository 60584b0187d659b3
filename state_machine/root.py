"""The units of one root together: which unit joins a backward, and the instructions for all units at its end.

This file has no side effects. It turns an event into instructions; the engine (and the explorer) execute them.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from state_machine.lifecycle import Lifecycle
from state_machine.staleness import GATHERS, Copy, CopyAction, CopyEvent
from state_machine.table import BACKWARD, BackwardEvent, BackwardState, BackwardStep, ReshardPolicy
from state_machine.vocabulary import Action, Event, State


class Instruction(NamedTuple):
    """An action, and its unit."""

    unit: int
    action: Action


COMMITTING: Final = (Action.COMMIT, Action.ACCUMULATE_UNSHARDED)
RESTING: Final = (BackwardState.RESTING, BackwardState.RESTING_INSIDE)


class Root:
    """The lifecycles and copies of the units of one root, and the backward that they share.

    Invariant: `backward` changes only in the methods below. `JOIN_BACKWARD` is among the instructions once per backward, and the
    engine then calls `begin`.
    """

    __slots__ = ("backward", "copies", "in_backward", "lifecycles", "number")

    def __init__(self, lifecycles: Sequence[Lifecycle]) -> None:
        self.lifecycles = tuple(lifecycles)
        self.copies = tuple(Copy(one.unit, one.reshard_policy) for one in self.lifecycles)
        self.backward, self.in_backward = BackwardState.RESTING, False
        self.number = 1
        """The number of the backward that runs, or of the next one. Data recorded under another number is out of date."""

    @property
    def synchronises(self) -> bool:
        """Whether the backward that runs reduces its gradients."""
        return self.backward is BackwardState.RUNNING_SYNC

    @property
    def at_rest(self) -> bool:
        """No backward runs and every unit is IDLE."""
        return not self.in_backward and all(one.state is State.IDLE for one in self.lifecycles)

    @property
    def backward_gathers(self) -> bool:
        """Whether a backward gathers some unit, so that it needs the other ranks even if it reduces nothing."""
        return any([one.reshard_policy is ReshardPolicy.AFTER_FORWARD for one in self.lifecycles])

    def on_event(self, unit: int, event: Event) -> tuple[Instruction, ...]:
        """Apply an event to a unit; return the instructions, in order.

        Raises:
            IllegalTransition: the table of the unit has no row for it. No state has changed.
        """
        actions = self.lifecycles[unit].on(event)
        if Action.JOIN_BACKWARD in actions and not self._on(BackwardEvent.UNIT_JOINS).queue_callback:
            actions = tuple([action for action in actions if action is not Action.JOIN_BACKWARD])
        if event is Event.GRAD_ACCUMULATED:
            self._on(BackwardEvent.GRAD_ACCUMULATED)
        return _instructions(unit, actions)

    def set_reshard_policy(self, unit: int, policy: ReshardPolicy) -> None:
        """From now on, a unit follows the tables of `policy`. The states of a unit are the same in all of them."""
        self.lifecycles[unit].set_reshard_policy(policy)
        self.copies[unit].set_reshard_policy(policy)

    def begin(self, event: BackwardEvent) -> None:
        """Set the kind of the backward in JOIN_BACKWARD: SYNC_BEGINS, NO_SYNC_BEGINS or GRAD_ONLY_BEGINS."""
        self._on(event)

    def post_backward_event(self) -> Event:
        """Return the event of a unit whose gradients are complete. It depends on the kind of the backward."""
        unit_event = self._on(BackwardEvent.UNIT_COMPLETE).event
        assert unit_event is not None
        return unit_event

    def end_backward(self, event: BackwardEvent, order: Sequence[int]) -> tuple[Instruction, ...] | None:
        """End the backward for every unit, in the agreed order; return the instructions, or None if no backward runs.

        Everything that can fail is before the first COMMIT or ACCUMULATE_UNSHARDED. So the gradients of all units are kept, or
        those of none.

        Raises:
            RuntimeError: no backward runs that can end in this way. This is a bug of fsdp.
        """
        unit_event = self._on(event).event
        if unit_event is None:
            return None
        self.number += 1
        if event is BackwardEvent.CALLBACK_RUNS_INSIDE or event is BackwardEvent.FAILS_INSIDE:
            for copy in self.copies:
                copy.on(CopyEvent.BACKWARD_INSIDE)
        found: list[Instruction] = []
        for unit in order:
            found += _instructions(unit, self.lifecycles[unit].on(unit_event))
        first = [one for one in found if one.action not in COMMITTING]
        return (*first, *[one for one in found if one.action in COMMITTING])

    def before_gather(self, unit: int) -> tuple[CopyAction, ...]:
        """Apply the event of an all-gather that is about to be launched; return the actions that come first."""
        return self.copies[unit].on(GATHERS[self.backward])

    def evaluation_ends(self) -> None:
        """Apply the end of a forward of the root that recorded no graph."""
        for copy in self.copies:
            copy.on(CopyEvent.EVALUATION_ENDS)

    def _on(self, event: BackwardEvent) -> BackwardStep:
        try:
            step = BACKWARD[self.backward][event]
        except KeyError:
            raise RuntimeError(
                f"the backward: {event.name} is not allowed in {self.backward.name}; this is a bug in fsdp, please report it."
            ) from None
        self.backward, self.in_backward = step.to, step.to not in RESTING
        return step


@cache
def _instructions(unit: int, actions: tuple[Action, ...]) -> tuple[Instruction, ...]:
    # only a few different results exist
    return tuple([Instruction(unit, action) for action in actions])
