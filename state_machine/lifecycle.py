"""The lifecycle of one unit: follows its table, records its events, and refuses illegal ones."""

from collections import deque
from typing import Final

from state_machine.machine import Machine
from state_machine.table import TABLES, ReshardPolicy
from state_machine.vocabulary import Action, Event, State

STORY_LENGTH: Final = 24

# Remedies for the illegal transitions that user code can cause. Every other one is a bug of fsdp.
_TRAIN_OUTSIDE: Final = (
    "Summoned parameters cannot be trained: leave summon_full_params before a training forward, "
    "or run this forward under torch.no_grad()."
)
_AFTER_BACKWARD: Final = "Call summon_full_params after backward() has returned, not from a hook inside it."
_LEAVE_FIRST: Final = "Leave summon_full_params before calling backward()."
_SUMMONED_ALREADY: Final = "The full parameters are summoned already; leave the first summon_full_params before entering another."
_STEP_IS_OVER: Final = (
    "The step was abandoned inside this forward; let the error that caused it leave the forward, then start the step again."
)
REMEDIES: Final[dict[tuple[State, Event], str]] = {
    (State.FORWARD, Event.PRE_FORWARD): (
        "A unit cannot be called from inside its own forward; "
        "shard the inner module as a unit of its own, or move the recursion out of it."
    ),
    (State.FORWARD, Event.SUMMON): "Call summon_full_params before or after the forward, not from inside it.",
    (State.BACKWARD_PRE, Event.SUMMON): _AFTER_BACKWARD,
    (State.BACKWARD_POST, Event.SUMMON): _AFTER_BACKWARD,
    (State.SUMMONED, Event.SUMMON): _SUMMONED_ALREADY,
    (State.SUMMONED, Event.POST_FORWARD): _TRAIN_OUTSIDE,
    (State.SUMMONED, Event.PRE_BACKWARD): _LEAVE_FIRST,
    (State.SUMMONED, Event.PRE_RECOMPUTE): _LEAVE_FIRST,
    (State.SUMMONED, Event.GRAD_ACCUMULATED): _LEAVE_FIRST,
    (State.SUMMONED, Event.EXTERNAL_GRAD): _LEAVE_FIRST,
    (State.IDLE, Event.POST_FORWARD): _STEP_IS_OVER,
    (State.IDLE, Event.POST_FORWARD_NO_GRAD): _STEP_IS_OVER,
}
OUR_BUG: Final = "No use of the public interface should lead here; this is a bug in fsdp, please report it with this message."


class IllegalTransition(RuntimeError):
    """The table has no row for this event. The state of the unit is unchanged."""

    def __init__(self, unit: str, state: State, event: Event, legal: tuple[Event, ...], story: tuple[Event, ...]) -> None:
        self.unit = unit
        self.state = state
        self.event = event
        self.legal = legal
        self.story = story
        super().__init__(
            f"unit {unit!r}: {event.name} is not allowed in {state.name} "
            f"(allowed here: {', '.join(e.name for e in legal)}). "
            f"Events so far: {', '.join(e.name for e in story) or 'none'}. "
            f"{REMEDIES.get((state, event), OUR_BUG)}"
        )


class Lifecycle(Machine[State, Event, Action]):
    """The lifecycle of one unit. It keeps its last events."""

    __slots__ = ("reshard_policy",)

    def __init__(self, unit: str, reshard_policy: ReshardPolicy) -> None:
        self.reshard_policy = reshard_policy
        super().__init__(unit, TABLES[reshard_policy], State.IDLE, kept=STORY_LENGTH)

    def set_reshard_policy(self, policy: ReshardPolicy) -> None:
        """From now on, follow the table of `policy`. All tables have the same states."""
        self.reshard_policy = policy
        self._table = TABLES[policy]

    @property
    def story(self) -> tuple[Event, ...]:
        """The last events, oldest first."""
        return tuple(self._story)

    def keep_story_in(self, story: deque[Event]) -> None:
        """From now on, append events to `story`, which has the last events already. A recorder gives one that keeps the time."""
        self._story = story

    def _refusal(self, event: Event) -> IllegalTransition:
        return IllegalTransition(self.unit, self.state, event, tuple(self._table[self.state]), self.story)
