"""The tables of every legal transition of a unit and of the backward of a root. Start reading here.

Rule 1: every decision about the next state of a unit is a row here, never an `if` in the engine.
Rule 2: this file knows nothing of torch, streams, ranks or sharding arithmetic.
Rule 3: a missing pair is an error. To ignore an event, write the row that ignores it.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final, NamedTuple

from state_machine.machine import Step
from state_machine.vocabulary import Action as A
from state_machine.vocabulary import Event as E
from state_machine.vocabulary import MachineEnum
from state_machine.vocabulary import State as S

Table = Mapping[S, Mapping[E, Step[S, A]]]


class ReshardPolicy(MachineEnum):
    """When the unsharded parameters of a unit are freed."""

    AFTER_FORWARD = auto()
    """After the forward, and gathered again for the backward (`FULL_SHARD`)."""
    AFTER_BACKWARD = auto()
    """After the backward (`SHARD_GRAD_OP`, and the unit of the root itself)."""
    NEVER = auto()
    """When the weights change (`SHARD_GRADIENTS`, `SHARD_OPTIMIZER`)."""


_GIVE_UP: Final = (A.WAIT_REDUCTIONS, A.RESHARD, A.DROP_GRADS)

RESHARD_AFTER_FORWARD: Final[Table] = {
    S.IDLE: {
        E.PRE_FORWARD: Step(S.FORWARD, (A.DROP_STALE, A.UNSHARD)),
        E.PRE_BACKWARD: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.UNSHARD)),
        # a checkpoint around the unit: its first forward ran without grad, so its outputs have no hooks
        E.PRE_RECOMPUTE: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.UNSHARD)),
        # the gradient came by a path without hooks, such as a bias that needs no input
        E.GRAD_ACCUMULATED: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.UNSHARD)),
        E.EXTERNAL_GRAD: Step(S.BACKWARD_POST, (A.JOIN_BACKWARD,)),
        # this backward did not reach the unit on this rank: free a cached copy, and send zeros to the ranks that it reached.
        # Root has all units do what comes before COMMIT first, at every FINAL_CALLBACK
        E.FINAL_CALLBACK: Step(S.IDLE, (A.RESHARD, A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.IDLE, (A.RESHARD,)),
        E.BACKWARD_FAILED: Step(S.IDLE, _GIVE_UP),
        E.SUMMON: Step(S.SUMMONED, (A.RESHARD, A.GATHER_FULL)),
        # the step was abandoned inside its forward: the exception that caused it passes through here
        E.FORWARD_FAILED: Step(S.IDLE),
        # a frozen unit whose output is unused: its input got a gradient by another path
        E.INPUT_GRADS_DONE: Step(S.IDLE),
        # the step was abandoned while the parameters were summoned: they are freed already
        E.UNSUMMON_WRITEBACK: Step(S.IDLE),
        E.UNSUMMON_DISCARD: Step(S.IDLE),
        # FREE_FULL: the write-back may have failed half-way
        E.STEP_ABANDONED: Step(S.IDLE, (A.WAIT_REDUCTIONS, A.FREE_FULL, A.RESHARD, A.DROP_GRADS)),
    },
    S.FORWARD: {
        E.POST_FORWARD: Step(S.IDLE, (A.HOOK_OUTPUTS, A.RESHARD)),
        E.POST_FORWARD_NO_GRAD: Step(S.IDLE, (A.RESHARD,)),
        E.FORWARD_FAILED: Step(S.IDLE, (A.RESHARD,)),
        # a backward inside the forward (a gradient penalty, an inner optimisation): stay unsharded through it
        E.PRE_BACKWARD: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.PRE_RECOMPUTE: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.POST_RECOMPUTE: Step(S.FORWARD, (A.HOOK_OUTPUTS,)),
        E.GRAD_ACCUMULATED: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.EXTERNAL_GRAD: Step(S.FORWARD, (A.JOIN_BACKWARD,)),
        E.POST_BACKWARD: Step(S.FORWARD, (A.REDUCE_GRADS,)),
        E.POST_BACKWARD_NO_SYNC: Step(S.FORWARD),
        E.INPUT_GRADS_DONE: Step(S.FORWARD),
        E.FINAL_CALLBACK: Step(S.FORWARD, (A.INTERCEPT_READS, A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.FORWARD, (A.ACCUMULATE_UNSHARDED,)),
        # the forward around it may catch the exception and go on
        E.BACKWARD_FAILED: Step(S.FORWARD, (A.WAIT_REDUCTIONS, A.DROP_GRADS)),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.BACKWARD_PRE: {
        E.POST_BACKWARD: Step(S.BACKWARD_POST, (A.RESHARD, A.REDUCE_GRADS)),
        E.POST_BACKWARD_NO_SYNC: Step(S.BACKWARD_POST, (A.RESHARD,)),
        E.INPUT_GRADS_DONE: Step(S.BACKWARD_POST, (A.RESHARD,)),
        E.GRAD_ACCUMULATED: Step(S.BACKWARD_PRE),
        E.EXTERNAL_GRAD: Step(S.BACKWARD_PRE),
        # one event per output; UNSHARD does nothing if the unit is unsharded
        E.PRE_BACKWARD: Step(S.BACKWARD_PRE, (A.UNSHARD,)),
        E.PRE_RECOMPUTE: Step(S.BACKWARD_PRE, (A.UNSHARD,)),
        E.POST_RECOMPUTE: Step(S.BACKWARD_PRE, (A.HOOK_OUTPUTS,)),
        # some gradients are missing: unused parameters, `backward(inputs=...)`, a frozen part
        E.FINAL_CALLBACK: Step(S.IDLE, (A.RESHARD, A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.IDLE, (A.RESHARD, A.ACCUMULATE_UNSHARDED)),
        E.BACKWARD_FAILED: Step(S.IDLE, _GIVE_UP),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.BACKWARD_POST: {
        # used again in the same backward: several checkpoints, several outputs, several calls
        E.PRE_BACKWARD: Step(S.BACKWARD_PRE, (A.UNSHARD,)),
        E.PRE_RECOMPUTE: Step(S.BACKWARD_PRE, (A.UNSHARD,)),
        E.GRAD_ACCUMULATED: Step(S.BACKWARD_POST),
        E.EXTERNAL_GRAD: Step(S.BACKWARD_POST),
        E.POST_BACKWARD: Step(S.BACKWARD_POST, (A.REDUCE_GRADS,)),
        E.POST_BACKWARD_NO_SYNC: Step(S.BACKWARD_POST),
        # a frozen unit that is called several times gets this event several times
        E.INPUT_GRADS_DONE: Step(S.BACKWARD_POST),
        E.FINAL_CALLBACK: Step(S.IDLE, (A.RESHARD, A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.IDLE, (A.RESHARD, A.ACCUMULATE_UNSHARDED)),
        E.BACKWARD_FAILED: Step(S.IDLE, _GIVE_UP),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.SUMMONED: {
        E.UNSUMMON_WRITEBACK: Step(S.IDLE, (A.WRITE_BACK, A.FREE_FULL)),
        E.UNSUMMON_DISCARD: Step(S.IDLE, (A.FREE_FULL,)),
        # a forward uses the full parameters that the user sees
        E.PRE_FORWARD: Step(S.SUMMONED),
        E.POST_FORWARD_NO_GRAD: Step(S.SUMMONED),
        E.FORWARD_FAILED: Step(S.SUMMONED),
        # a backward of other units of the root runs and ends while this one is summoned
        E.INPUT_GRADS_DONE: Step(S.SUMMONED),
        E.FINAL_CALLBACK: Step(S.SUMMONED, (A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.SUMMONED),
        E.BACKWARD_FAILED: Step(S.SUMMONED, (A.WAIT_REDUCTIONS, A.DROP_GRADS)),
        # RESHARD: the summon may have failed half-way
        E.STEP_ABANDONED: Step(S.IDLE, (A.WAIT_REDUCTIONS, A.FREE_FULL, A.RESHARD, A.DROP_GRADS)),
    },
}

# One row differs: after the forward the unsharded parameters are cached instead of freed.
RESHARD_AFTER_BACKWARD: Final[Table] = {
    **RESHARD_AFTER_FORWARD,
    S.FORWARD: {
        **RESHARD_AFTER_FORWARD[S.FORWARD],
        E.POST_FORWARD: Step(S.IDLE, (A.HOOK_OUTPUTS, A.KEEP_UNSHARDED)),
    },
}

# Where a pass succeeds, the unsharded parameters are cached instead of freed. DROP_STALE frees them when they are stale.
_SUCCEEDS: Final = (
    E.POST_FORWARD,
    E.POST_FORWARD_NO_GRAD,
    E.POST_BACKWARD,
    E.POST_BACKWARD_NO_SYNC,
    E.INPUT_GRADS_DONE,
    E.FINAL_CALLBACK,
    E.FINAL_CALLBACK_NO_SYNC,
)
RESHARD_NEVER: Final[Table] = {
    state: {
        event: Step(step.to, tuple(A.KEEP_UNSHARDED if action is A.RESHARD else action for action in step.actions))
        if event in _SUCCEEDS
        else step
        for event, step in row.items()
    }
    for state, row in RESHARD_AFTER_FORWARD.items()
}

TABLES: Final[Mapping[ReshardPolicy, Table]] = {
    ReshardPolicy.AFTER_FORWARD: RESHARD_AFTER_FORWARD,
    ReshardPolicy.AFTER_BACKWARD: RESHARD_AFTER_BACKWARD,
    ReshardPolicy.NEVER: RESHARD_NEVER,
}


class BackwardState(MachineEnum):
    """Whether a backward of the root runs, and whether its gradients are reduced."""

    RESTING = auto()
    """No backward runs."""
    RESTING_INSIDE = auto()
    """No backward runs, but one has run inside the current forward: an optimizer may step before the forward ends."""
    BEGINNING = auto()
    """The first unit has joined, and the engine finds out the kind of the backward."""
    RUNNING_SYNC = auto()
    """A backward runs whose gradients are reduced."""
    RUNNING_NO_SYNC = auto()
    """A backward runs whose gradients are not reduced: it began under `no_sync`."""
    RUNNING_NO_GRADS = auto()
    """A backward runs that began as `torch.autograd.grad`. It has accumulated no gradient in a parameter, so no rank reduces."""


class BackwardEvent(MachineEnum):
    """An event of the backward of a root."""

    UNIT_JOINS = auto()
    """A unit joins the backward."""
    SYNC_BEGINS = auto()
    """The backward synchronises."""
    NO_SYNC_BEGINS = auto()
    """The backward runs under `no_sync`."""
    GRAD_ONLY_BEGINS = auto()
    """The backward seems to be `torch.autograd.grad` alone."""
    GRAD_ACCUMULATED = auto()
    """The first gradient of one unit was accumulated."""
    UNIT_COMPLETE = auto()
    """The gradients of a unit are complete."""
    CALLBACK_RUNS = auto()
    """The final callback runs, outside any forward."""
    CALLBACK_RUNS_INSIDE = auto()
    """The final callback runs inside a forward."""
    FAILS = auto()
    """The backward was ended by an exception, outside any forward."""
    FAILS_INSIDE = auto()
    """The backward was ended by an exception inside a forward, which may catch it and continue."""
    PASS_BEGINS = auto()
    """A forward begins, outside any backward and any other forward."""
    STEP_ABANDONED = auto()
    """The engine has failed half-way and abandons the step."""


class BackwardStep(NamedTuple):
    """The next state of the backward, and the event that follows for its units."""

    to: BackwardState
    event: E | None = None
    """For UNIT_COMPLETE, the event of that unit; else the event of every unit of the root."""
    queue_callback: bool = False
    """Whether this is the first unit that joins: it keeps the action JOIN_BACKWARD, which queues the final callback."""


def _running(state: BackwardState, arrives: BackwardState, complete: E, ends: E) -> Mapping[BackwardEvent, BackwardStep]:
    """The rows of a backward that runs.

    `arrives` is the state after a gradient, `complete` the event of a unit whose gradients are complete, and `ends` the event of
    every unit at the end.
    """
    return {
        BackwardEvent.UNIT_JOINS: BackwardStep(state),
        BackwardEvent.GRAD_ACCUMULATED: BackwardStep(arrives),
        BackwardEvent.UNIT_COMPLETE: BackwardStep(state, complete),
        BackwardEvent.CALLBACK_RUNS: BackwardStep(BackwardState.RESTING, ends),
        BackwardEvent.CALLBACK_RUNS_INSIDE: BackwardStep(BackwardState.RESTING_INSIDE, ends),
        BackwardEvent.FAILS: BackwardStep(BackwardState.RESTING, E.BACKWARD_FAILED),
        BackwardEvent.FAILS_INSIDE: BackwardStep(BackwardState.RESTING_INSIDE, E.BACKWARD_FAILED),
        # the backward failed unnoticed
        BackwardEvent.PASS_BEGINS: BackwardStep(BackwardState.RESTING, E.BACKWARD_FAILED),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING, E.STEP_ABANDONED),
    }


_SYNC, _NO_SYNC, _NO_GRADS = BackwardState.RUNNING_SYNC, BackwardState.RUNNING_NO_SYNC, BackwardState.RUNNING_NO_GRADS

BACKWARD: Final[Mapping[BackwardState, Mapping[BackwardEvent, BackwardStep]]] = {
    BackwardState.RESTING: {
        BackwardEvent.UNIT_JOINS: BackwardStep(BackwardState.BEGINNING, queue_callback=True),
        BackwardEvent.PASS_BEGINS: BackwardStep(BackwardState.RESTING),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING, E.STEP_ABANDONED),
    },
    BackwardState.RESTING_INSIDE: {
        BackwardEvent.UNIT_JOINS: BackwardStep(BackwardState.BEGINNING, queue_callback=True),
        BackwardEvent.PASS_BEGINS: BackwardStep(BackwardState.RESTING),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING, E.STEP_ABANDONED),
    },
    BackwardState.BEGINNING: {
        BackwardEvent.SYNC_BEGINS: BackwardStep(_SYNC),
        BackwardEvent.NO_SYNC_BEGINS: BackwardStep(_NO_SYNC),
        BackwardEvent.GRAD_ONLY_BEGINS: BackwardStep(_NO_GRADS),
        # the gradient is the first event of the backward; its kind is found out next
        BackwardEvent.GRAD_ACCUMULATED: BackwardStep(BackwardState.BEGINNING),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING, E.STEP_ABANDONED),
    },
    BackwardState.RUNNING_SYNC: _running(_SYNC, arrives=_SYNC, complete=E.POST_BACKWARD, ends=E.FINAL_CALLBACK),
    BackwardState.RUNNING_NO_SYNC: _running(
        _NO_SYNC, arrives=_NO_SYNC, complete=E.POST_BACKWARD_NO_SYNC, ends=E.FINAL_CALLBACK_NO_SYNC
    ),
    # a backward inside `torch.autograd.grad` has accumulated a gradient
    BackwardState.RUNNING_NO_GRADS: _running(
        _NO_GRADS, arrives=_SYNC, complete=E.POST_BACKWARD_NO_SYNC, ends=E.FINAL_CALLBACK_NO_SYNC
    ),
}
