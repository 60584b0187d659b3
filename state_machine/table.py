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
from state_machine.vocabulary import MachineEnum
from state_machine.vocabulary import State as S


class Step(NamedTuple):
    """Where an event leads, and what the engine must do on the way, in order."""

    to: S
    actions: tuple[A, ...] = ()


Table = Mapping[S, Mapping[E, Step]]


class ReshardPolicy(MachineEnum):
    """Whether the whole parameters outlive the forward."""

    AFTER_FORWARD = auto()
    """Gathered again for the backward (`FULL_SHARD`)."""
    AFTER_BACKWARD = auto()
    """Kept until the backward has used them (`SHARD_GRAD_OP`, and the root's own unit)."""
    NEVER = auto()
    """Kept until the weights change (`SHARD_GRADIENTS`, `SHARD_OPTIMIZER`)."""


_GIVE_UP: Final = (A.WAIT_REDUCTIONS, A.RESHARD, A.DROP_GRADS)

RESHARD_AFTER_FORWARD: Final[Table] = {
    S.IDLE: {
        E.PRE_FORWARD: Step(S.FORWARD, (A.DROP_STALE, A.UNSHARD)),
        E.PRE_BACKWARD: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.UNSHARD)),
        # a checkpoint around the unit: its first forward ran without grad, nothing was watched
        E.PRE_RECOMPUTE: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.UNSHARD)),
        # a gradient came by a path no hook could see, such as a bias that needs no input
        E.GRAD_ACCUMULATED: Step(S.BACKWARD_PRE, (A.JOIN_BACKWARD, A.UNSHARD)),
        E.EXTERNAL_GRAD: Step(S.BACKWARD_POST, (A.JOIN_BACKWARD,)),
        # this backward never came here: a kept copy goes, and peers that did come need our zeros
        E.FINAL_CALLBACK: Step(S.IDLE, (A.RESHARD, A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.IDLE, (A.RESHARD,)),
        E.BACKWARD_FAILED: Step(S.IDLE, _GIVE_UP),
        E.SUMMON: Step(S.SUMMONED, (A.RESHARD, A.GATHER_FULL)),
        # the step was abandoned inside its forward: the exception that caused it passes through here
        E.FORWARD_FAILED: Step(S.IDLE),
        # a frozen unit whose output is unused: its input got a gradient by another way
        E.INPUT_GRADS_DONE: Step(S.IDLE),
        # the step was abandoned while they were lent: the loan is over already
        E.UNSUMMON_WRITEBACK: Step(S.IDLE),
        E.UNSUMMON_DISCARD: Step(S.IDLE),
        # FREE_FULL: the write-back of a loan may be what failed half-way
        E.STEP_ABANDONED: Step(S.IDLE, (A.WAIT_REDUCTIONS, A.FREE_FULL, A.RESHARD, A.DROP_GRADS)),
    },
    S.FORWARD: {
        E.POST_FORWARD: Step(S.IDLE, (A.HOOK_OUTPUTS, A.RESHARD)),
        E.POST_FORWARD_NO_GRAD: Step(S.IDLE, (A.RESHARD,)),
        E.FORWARD_FAILED: Step(S.IDLE, (A.RESHARD,)),
        # a backward inside the forward (a gradient penalty, an inner optimisation): stay whole through it
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
        # one announcement per output; costs nothing when already whole
        E.PRE_BACKWARD: Step(S.BACKWARD_PRE, (A.UNSHARD,)),
        E.PRE_RECOMPUTE: Step(S.BACKWARD_PRE, (A.UNSHARD,)),
        E.POST_RECOMPUTE: Step(S.BACKWARD_PRE, (A.HOOK_OUTPUTS,)),
        # some gradient never came: unused parameters, `backward(inputs=...)`, a frozen part
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
        # a frozen unit called several times is left several times
        E.INPUT_GRADS_DONE: Step(S.BACKWARD_POST),
        E.FINAL_CALLBACK: Step(S.IDLE, (A.RESHARD, A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.IDLE, (A.RESHARD, A.ACCUMULATE_UNSHARDED)),
        E.BACKWARD_FAILED: Step(S.IDLE, _GIVE_UP),
        E.STEP_ABANDONED: Step(S.IDLE, _GIVE_UP),
    },
    S.SUMMONED: {
        E.UNSUMMON_WRITEBACK: Step(S.IDLE, (A.WRITE_BACK, A.FREE_FULL)),
        E.UNSUMMON_DISCARD: Step(S.IDLE, (A.FREE_FULL,)),
        # a forward on lent parameters computes with what the user sees
        E.PRE_FORWARD: Step(S.SUMMONED),
        E.POST_FORWARD_NO_GRAD: Step(S.SUMMONED),
        E.FORWARD_FAILED: Step(S.SUMMONED),
        # a backward of other units of the root runs and ends while this one is lent
        E.INPUT_GRADS_DONE: Step(S.SUMMONED),
        E.FINAL_CALLBACK: Step(S.SUMMONED, (A.FLUSH_GRADS, A.COMMIT)),
        E.FINAL_CALLBACK_NO_SYNC: Step(S.SUMMONED),
        E.BACKWARD_FAILED: Step(S.SUMMONED, (A.WAIT_REDUCTIONS, A.DROP_GRADS)),
        # RESHARD: the summon may be what failed half-way
        E.STEP_ABANDONED: Step(S.IDLE, (A.WAIT_REDUCTIONS, A.FREE_FULL, A.RESHARD, A.DROP_GRADS)),
    },
}

# One row differs: after the forward the whole parameters are kept instead of freed.
RESHARD_AFTER_BACKWARD: Final[Table] = {
    **RESHARD_AFTER_FORWARD,
    S.FORWARD: {
        **RESHARD_AFTER_FORWARD[S.FORWARD],
        E.POST_FORWARD: Step(S.IDLE, (A.HOOK_OUTPUTS, A.KEEP_UNSHARDED)),
    },
}

# Wherever a pass goes well, they are kept instead of freed; DROP_STALE frees what the weights have left behind.
_GOES_WELL: Final = (
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
        if event in _GOES_WELL
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
    """Whether a backward of the root is running, and what becomes of its gradients."""

    RESTING = auto()
    RESTING_INSIDE = auto()
    """One inside the forward that runs is over: an optimizer may step before the forward ends."""
    BEGINNING = auto()
    """The first unit has joined, and the engine finds out which kind of backward it is."""
    RUNNING_SYNC = auto()
    """Its gradients are reduced."""
    RUNNING_NO_SYNC = auto()
    """Its gradients stay here: it began under `no_sync`."""
    RUNNING_NO_GRADS = auto()
    """It began as `torch.autograd.grad`, which brings no gradient to a parameter, so there is nothing to reduce, on any rank."""


class BackwardEvent(MachineEnum):
    """What can happen to the backward of a root."""

    UNIT_JOINS = auto()
    SYNC_BEGINS = auto()
    NO_SYNC_BEGINS = auto()
    GRAD_ONLY_BEGINS = auto()
    """As far as can be seen, the backward is `torch.autograd.grad` alone."""
    GRAD_ACCUMULATED = auto()
    """The first gradient of some unit."""
    UNIT_COMPLETE = auto()
    """The gradients of a unit are complete."""
    CALLBACK_RUNS = auto()
    CALLBACK_RUNS_INSIDE = auto()
    """The same, inside a forward."""
    FAILS = auto()
    """It died by an exception."""
    FAILS_INSIDE = auto()
    """The same, inside a forward, which may catch the exception and go on."""
    PASS_BEGINS = auto()
    """A forward begins, outside any backward and any other forward."""
    STEP_ABANDONED = auto()


class BackwardStep(NamedTuple):
    """Where the backward goes, and the event that this is: for the unit that is complete, else for every unit of the root."""

    to: BackwardState
    event: E | None = None
    queue_callback: bool = False
    """Its one callback must be queued now."""


def _running(state: BackwardState, arrives: BackwardState, complete: E, ends: E) -> Mapping[BackwardEvent, BackwardStep]:
    """The rows of a backward that runs: what a gradient makes of it, and what its units are told when they are done, and it."""
    return {
        BackwardEvent.UNIT_JOINS: BackwardStep(state),
        BackwardEvent.GRAD_ACCUMULATED: BackwardStep(arrives),
        BackwardEvent.UNIT_COMPLETE: BackwardStep(state, complete),
        BackwardEvent.CALLBACK_RUNS: BackwardStep(BackwardState.RESTING, ends),
        BackwardEvent.CALLBACK_RUNS_INSIDE: BackwardStep(BackwardState.RESTING_INSIDE, ends),
        BackwardEvent.FAILS: BackwardStep(BackwardState.RESTING, E.BACKWARD_FAILED),
        BackwardEvent.FAILS_INSIDE: BackwardStep(BackwardState.RESTING_INSIDE, E.BACKWARD_FAILED),
        # it died and nobody noticed
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
        # the gradient was the first that any unit heard of the backward; what kind it is comes next
        BackwardEvent.GRAD_ACCUMULATED: BackwardStep(BackwardState.BEGINNING),
        BackwardEvent.STEP_ABANDONED: BackwardStep(BackwardState.RESTING, E.STEP_ABANDONED),
    },
    BackwardState.RUNNING_SYNC: _running(_SYNC, arrives=_SYNC, complete=E.POST_BACKWARD, ends=E.FINAL_CALLBACK),
    BackwardState.RUNNING_NO_SYNC: _running(
        _NO_SYNC, arrives=_NO_SYNC, complete=E.POST_BACKWARD_NO_SYNC, ends=E.FINAL_CALLBACK_NO_SYNC
    ),
    # a backward inside what looked like autograd.grad alone brings a gradient after all
    BackwardState.RUNNING_NO_GRADS: _running(
        _NO_GRADS, arrives=_SYNC, complete=E.POST_BACKWARD_NO_SYNC, ends=E.FINAL_CALLBACK_NO_SYNC
    ),
}
