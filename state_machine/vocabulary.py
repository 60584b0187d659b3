"""The states, events and actions of a unit's lifecycle. Each member has one meaning, written below it.

The tables (table.py) are made of these members alone.
"""

from enum import Enum, auto


class MachineEnum(Enum):
    """An enum of a machine. It hashes by identity, because the hash of `Enum` is slow."""

    __hash__ = object.__hash__


class State(MachineEnum):
    """The state of a unit."""

    IDLE = auto()
    """No forward or backward runs in the unit. Its shards are in memory, and unsharded parameters only if they are cached."""
    FORWARD = auto()
    """Its forward runs, outside any backward."""
    BACKWARD_PRE = auto()
    """A backward has entered the unit, and its gradients are not complete."""
    BACKWARD_POST = auto()
    """Its gradients are complete in this backward, or all came from uses outside it. The backward still runs in other units."""
    SUMMONED = auto()
    """The user has its full parameters (`summon_full_params`)."""


class Event(MachineEnum):
    """An event of a unit."""

    PRE_FORWARD = auto()
    """Its forward is called, outside any backward."""
    POST_FORWARD = auto()
    """Its forward has returned an output that requires grad."""
    POST_FORWARD_NO_GRAD = auto()
    """Its forward has returned and no output requires grad: no backward will follow."""
    FORWARD_FAILED = auto()
    """Its forward was left by an exception."""
    PRE_RECOMPUTE = auto()
    """Its forward is called inside a backward, by activation checkpointing."""
    POST_RECOMPUTE = auto()
    """A recomputed forward has returned. It may never do so: an exception of torch can stop a recompute early."""
    PRE_BACKWARD = auto()
    """Autograd is about to enter the unit through one of its outputs."""
    GRAD_ACCUMULATED = auto()
    """The first gradient of one of its parameters in this backward was accumulated."""
    EXTERNAL_GRAD = auto()
    """A gradient is about to come from a use of a parameter outside the unit. It does not need the unsharded parameters."""
    POST_BACKWARD = auto()
    """Its gradients are complete in a backward that synchronises, at a moment that every rank reaches."""
    POST_BACKWARD_NO_SYNC = auto()
    """Its gradients are complete and are not reduced now: under `no_sync`, or because other ranks may not reach this moment."""
    INPUT_GRADS_DONE = auto()
    """The gradients of its inputs are computed. This event ends the backward of a frozen unit."""
    FINAL_CALLBACK = auto()
    """A backward that synchronises is over. Every unit of the root gets this event."""
    FINAL_CALLBACK_NO_SYNC = auto()
    """A backward that does not synchronise is over. Every unit of the root gets this event."""
    BACKWARD_FAILED = auto()
    """The backward was ended by an exception. Every unit of the root gets this event."""
    SUMMON = auto()
    """The user calls `summon_full_params`."""
    UNSUMMON_WRITEBACK = auto()
    """The user leaves `summon_full_params(writeback=True)`."""
    UNSUMMON_DISCARD = auto()
    """The user leaves `summon_full_params(writeback=False)`."""
    STEP_ABANDONED = auto()
    """The engine has failed half-way and abandons the step. Allowed in every state."""


class Action(MachineEnum):
    """A task of the engine. A row of a table lists its actions in order."""

    DROP_STALE = auto()
    """Apply changes of `requires_grad`, and reshard if the unsharded parameters are stale."""
    UNSHARD = auto()
    """Gather the parameters if necessary, wait for them, and let the modules use them."""
    KEEP_UNSHARDED = auto()
    """Let the modules use the shards again, and keep the unsharded parameters in memory."""
    RESHARD = auto()
    """Let the modules use the shards again, and free the unsharded parameters."""
    HOOK_OUTPUTS = auto()
    """Put pre-backward hooks on the outputs of the forward."""
    INTERCEPT_READS = auto()
    """Return a fresh copy for each read of a parameter from now on: an optimizer may step inside the forward."""
    JOIN_BACKWARD = auto()
    """Join the backward that runs. The first unit that joins queues the final callback."""
    REDUCE_GRADS = auto()
    """Pass the gradients to the reducer, which launches buckets in the agreed order."""
    FLUSH_GRADS = auto()
    """Reduce the gradients that were not reduced yet, with zeros for missing ones."""
    COMMIT = auto()
    """Wait for the reduced gradients and put them into `.grad` of the shards."""
    ACCUMULATE_UNSHARDED = auto()
    """Add the unsharded gradients of this backward to those accumulated under `no_sync`."""
    WAIT_REDUCTIONS = auto()
    """Wait until no reduction is in flight."""
    DROP_GRADS = auto()
    """Drop the gradients of this backward, reduced or not."""
    GATHER_FULL = auto()
    """Gather the full parameters into memory of their own, and let the user see them."""
    WRITE_BACK = auto()
    """Copy the user's changes of the full parameters into the shards."""
    FREE_FULL = auto()
    """Let the modules use the shards again, and free the full parameters."""
