"""Every legal move of a unit, and of the backward of a root. Start reading here.

Rule 1: whatever decides what a unit may do next is a row here, never an `if` in the engine.
Rule 2: this file knows nothing of torch, streams, ranks or sharding arithmetic.
Rule 3: a missing pair is an error. To ignore an event, write the row that ignores it.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final, NamedTuple

from state_machine.vocabulary import Action as A
from state_machine.vocabulary import Event as E
from state_machine.vocabulary import State as S
from state_machine.vocabulary import Word


class Step(NamedTuple):
    """Where an event leads, and what the engine must do on the way, in order."""

    to: S
    actions: tuple[A, ...] = ()


Table = Mapping[S, Mapping[E, Step]]


class Strategy(Word):
    """Whether the whole parameters outlive the forward."""

    FREE_AFTER_FORWARD = auto()
    """Gathered again for the backward (`FULL_SHARD`)."""
    KEEP_AFTER_FORWARD = auto()
    """Kept until the backward has used them (`SHARD_GRAD_OP`, and the root's own unit)."""
    KEEP_ALWAYS = auto()
    """Kept until the weights change (`SHARD_GRADIENTS`, `SHARD_OPTIMIZER`)."""


_GIVE_UP: Final = (A.DRAIN, A.FREE, A.DROP)

FREE_AFTER_FORWARD: Final[Table] = {
    S.IDLE: {
        E.FORWARD_BEGINS: Step(S.FORWARD, (A.REFRESH, A.NEED)),
        E.BACKWARD_REACHES: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.NEED)),
        # a checkpoint around the unit: its first forward ran without grad, nothing was watched
        E.REPLAY_BEGINS: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.NEED)),
        # a gradient came by a path no hook could see, such as a bias that needs no input
        E.GRADIENT_ARRIVES: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.NEED)),
        E.GRADIENT_FROM_OUTSIDE: Step(S.BACKWARD_POST, (A.JOIN_BACKWARD,)),
        # this backward never came here: a kept copy goes, and peers that did come need our zeros
        E.BACKWARD_ENDS: Step(S.IDLE, (A.FREE, A.FLUSH, A.COMMIT)),
        E.BACKWARD_ENDS_UNSYNCED: Step(S.IDLE, (A.FREE,)),
        E.BACKWARD_FAILS: Step(S.IDLE, _GIVE_UP),
        E.SUMMONED: Step(S.SUMMONED, (A.FREE, A.LEND)),
        # the step was abandoned inside its forward: the exception that caused it passes through here
        E.FORWARD_FAILS: Step(S.IDLE),
        # a frozen unit whose output is unused: its input got a gradient by another way
        E.BACKWARD_LEFT: Step(S.IDLE),
        # the step was abandoned while they were lent: the loan is over already
        E.RETURNED: Step(S.IDLE),
        E.DISCARDED: Step(S.IDLE),
        # RECLAIM: the write-back of a loan may be what failed half-way
        E.STEP_ABANDONED: Step(S.IDLE, (A.DRAIN, A.RECLAIM, A.FREE, A.DROP)),
    },
    S.FORWARD: {
        E.FORWARD_ENDS: Step(S.IDLE, (A.WATCH_OUTPUTS, A.FREE)),
        E.INFERENCE_ENDS: Step(S.IDLE, (A.FREE,)),
        E.FORWARD_FAILS: Step(S.IDLE, (A.FREE,)),
        # a backward inside the forward (a gradient penalty, an inner optimisation): stay whole through it
        E.BACKWARD_REACHES: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.REPLAY_BEGINS: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.REPLAY_ENDS: Step(S.FORWARD, (A.WATCH_OUTPUTS,)),
        E.GRADIENT_ARRIVES: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.GRADIENT_FROM_OUTSIDE: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.GRADIENTS_READY: Step(S.FORWARD, (A.REDUCE,)),
        E.GRADIENTS_KEPT: Step(S.FORWARD),
        E.BACKWARD_LEFT: Step(S.FORWARD),
        E.BACKWARD_ENDS: Step(S.FORWARD, (A.GUARD, A.FLUSH, A.COMMIT)),
        E.BACKWARD_ENDS_UNSYNCED: Step(S.FORWARD, (A.STASH,)),
        # the forward around it may catch the exception and go on
        E.BACKWARD_FAILS: Step(S.FORWARD, (A.DRAIN, A.DROP)),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.BACKWARD_PRE: {
        E.GRADIENTS_READY: Step(S.BACKWARD_POST, (A.FREE, A.REDUCE)),
        E.GRADIENTS_KEPT: Step(S.BACKWARD_POST, (A.FREE,)),
        E.BACKWARD_LEFT: Step(S.BACKWARD_POST, (A.FREE,)),
        E.GRADIENT_ARRIVES: Step(S.BACKWARD_PRE),
        E.GRADIENT_FROM_OUTSIDE: Step(S.BACKWARD_PRE),
        # one announcement per output; costs nothing when already whole
        E.BACKWARD_REACHES: Step(S.BACKWARD_PRE, (A.NEED,)),
        E.REPLAY_BEGINS: Step(S.BACKWARD_PRE, (A.NEED,)),
        E.REPLAY_ENDS: Step(S.BACKWARD_PRE, (A.WATCH_OUTPUTS,)),
        # some gradient never came: unused parameters, `backward(inputs=...)`, a frozen part
        E.BACKWARD_ENDS: Step(S.IDLE, (A.FREE, A.FLUSH, A.COMMIT)),
        E.BACKWARD_ENDS_UNSYNCED: Step(S.IDLE, (A.FREE, A.STASH)),
        E.BACKWARD_FAILS: Step(S.IDLE, _GIVE_UP),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.BACKWARD_POST: {
        # used again in the same backward: several checkpoints, several outputs, several calls
        E.BACKWARD_REACHES: Step(S.BACKWARD_PRE, (A.NEED,)),
        E.REPLAY_BEGINS: Step(S.BACKWARD_PRE, (A.NEED,)),
        E.GRADIENT_ARRIVES: Step(S.BACKWARD_POST),
        E.GRADIENT_FROM_OUTSIDE: Step(S.BACKWARD_POST),
        E.GRADIENTS_READY: Step(S.BACKWARD_POST, (A.REDUCE,)),
        E.GRADIENTS_KEPT: Step(S.BACKWARD_POST),
        # a frozen unit called several times is left several times
        E.BACKWARD_LEFT: Step(S.BACKWARD_POST),
        E.BACKWARD_ENDS: Step(S.IDLE, (A.FREE, A.FLUSH, A.COMMIT)),
        E.BACKWARD_ENDS_UNSYNCED: Step(S.IDLE, (A.FREE, A.STASH)),
        E.BACKWARD_FAILS: Step(S.IDLE, _GIVE_UP),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.SUMMONED: {
        E.RETURNED: Step(S.IDLE, (A.WRITE_BACK, A.RECLAIM)),
        E.DISCARDED: Step(S.IDLE, (A.RECLAIM,)),
        # a forward on lent parameters computes with what the user sees
        E.FORWARD_BEGINS: Step(S.SUMMONED),
        E.INFERENCE_ENDS: Step(S.SUMMONED),
        E.FORWARD_FAILS: Step(S.SUMMONED),
        # a backward of other units of the root runs and ends while this one is lent
        E.BACKWARD_LEFT: Step(S.SUMMONED),
        E.BACKWARD_ENDS: Step(S.SUMMONED, (A.FLUSH, A.COMMIT)),
        E.BACKWARD_ENDS_UNSYNCED: Step(S.SUMMONED),
        E.BACKWARD_FAILS: Step(S.SUMMONED, (A.DRAIN, A.DROP)),
        # FREE: the summon may be what failed half-way
        E.STEP_ABANDONED: Step(S.IDLE, (A.DRAIN, A.RECLAIM, A.FREE, A.DROP)),
    },
}

# One row differs: after the forward the whole parameters are kept instead of freed.
KEEP_AFTER_FORWARD: Final[Table] = {
    **FREE_AFTER_FORWARD,
    S.FORWARD: {
        **FREE_AFTER_FORWARD[S.FORWARD],
        E.FORWARD_ENDS: Step(S.IDLE, (A.WATCH_OUTPUTS, A.KEEP)),
    },
}

# Wherever a pass goes well, they are kept instead of freed; REFRESH frees what the weights have left behind.
_GOES_WELL: Final = (
    E.FORWARD_ENDS,
    E.INFERENCE_ENDS,
    E.GRADIENTS_READY,
    E.GRADIENTS_KEPT,
    E.BACKWARD_LEFT,
    E.BACKWARD_ENDS,
    E.BACKWARD_ENDS_UNSYNCED,
)
KEEP_ALWAYS: Final[Table] = {
    state: {
        event: Step(step.to, tuple(A.KEEP if action is A.FREE else action for action in step.actions))
        if event in _GOES_WELL
        else step
        for event, step in row.items()
    }
    for state, row in FREE_AFTER_FORWARD.items()
}

TABLES: Final[Mapping[Strategy, Table]] = {
    Strategy.FREE_AFTER_FORWARD: FREE_AFTER_FORWARD,
    Strategy.KEEP_AFTER_FORWARD: KEEP_AFTER_FORWARD,
    Strategy.KEEP_ALWAYS: KEEP_ALWAYS,
}


class BackwardState(Word):
    """Whether a backward of the root is running."""

    RESTING = auto()
    RUNNING = auto()


class BackwardEvent(Word):
    """What can happen to the backward of a root."""

    UNIT_JOINS = auto()
    CLOSES = auto()
    """Its callback ran, or it failed."""
    STEP_ABANDONED = auto()


class BackwardStep(NamedTuple):
    """Where the backward goes, and whether its one callback must be queued now."""

    to: BackwardState
    queue_callback: bool = False


BACKWARD: Final[Mapping[BackwardState, Mapping[BackwardEvent, BackwardStep]]] = {
    BackwardState.RESTING: {
        BackwardEvent.UNIT_JOINS: BackwardStep(BackwardState.RUNNING, queue_callback=True),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING),
    },
    BackwardState.RUNNING: {
        BackwardEvent.UNIT_JOINS: BackwardStep(BackwardState.RUNNING),
        BackwardEvent.CLOSES: BackwardStep(BackwardState.RESTING),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING),
    },
}
