"""The words of the lifecycle: where a unit can be, what can happen to it, what must be done.

Every word has one meaning, written beside it. The tables (table.py) are made of these words alone.
"""

from enum import Enum, auto


class MachineEnum(Enum):
    """A word of the machine. There is one object for each, so its identity is its hash (Enum's own is slow)."""

    __hash__ = object.__hash__


class State(MachineEnum):
    """Where a unit is."""

    IDLE = auto()
    """At rest: the shard is all there is, or a kept copy waits for the backward."""
    FORWARD = auto()
    """Its forward runs, outside any backward."""
    BACKWARD_PRE = auto()
    """A backward has reached it; its gradients are not complete."""
    BACKWARD_POST = auto()
    """Its gradients are complete, or come from outside it; the backward goes on elsewhere."""
    SUMMONED = auto()
    """Its full parameters are lent to the user."""


class Event(MachineEnum):
    """What can happen to a unit."""

    PRE_FORWARD = auto()
    """Its forward is called, outside any backward."""
    POST_FORWARD = auto()
    """Its forward returned something a backward can come back through."""
    POST_FORWARD_NO_GRAD = auto()
    """Its forward returned and nothing of it requires grad: no backward will come."""
    FORWARD_FAILED = auto()
    """An exception passes through its forward."""
    PRE_RECOMPUTE = auto()
    """Its forward is called inside a backward: activation checkpointing."""
    POST_RECOMPUTE = auto()
    """That forward returned. May never come: a replay can be stopped early by an exception."""
    PRE_BACKWARD = auto()
    """Autograd is about to enter the unit through one of its outputs."""
    GRAD_ACCUMULATED = auto()
    """The first gradient of one of its parameters in this backward."""
    EXTERNAL_GRAD = auto()
    """A gradient comes from a use of a parameter outside the unit, which needs none of the unit's own memory."""
    POST_BACKWARD = auto()
    """Its gradients are complete, at a moment every rank comes to, in a backward that synchronises."""
    POST_BACKWARD_NO_SYNC = auto()
    """They are complete, and stay here: under `no_sync`, or because other ranks may not have come to this moment."""
    INPUT_GRADS_DONE = auto()
    """The gradients of its inputs are computed; how a frozen unit learns that it is done."""
    FINAL_CALLBACK = auto()
    """The root callback of a backward that synchronises. Told to every unit of the root."""
    FINAL_CALLBACK_NO_SYNC = auto()
    """The root callback of a backward under `no_sync`. Told to every unit of the root."""
    BACKWARD_FAILED = auto()
    """The backward died by an exception. Told to every unit of the root."""
    SUMMON = auto()
    """The user asks for the full parameters."""
    UNSUMMON_WRITEBACK = auto()
    """The user gives them back, and the changes shall be kept."""
    UNSUMMON_DISCARD = auto()
    """The user gives them back, and the changes shall be forgotten."""
    STEP_ABANDONED = auto()
    """Something of ours failed half-way: give up the pass. Legal everywhere."""


class Action(MachineEnum):
    """What the engine must do, in the order the table gives."""

    DROP_STALE = auto()
    """Take over what the user froze or thawed, and forget a copy gathered in an earlier pass."""
    UNSHARD = auto()
    """Have the whole parameters now, and show them."""
    KEEP_UNSHARDED = auto()
    """Show the shards again and keep the memory of the whole parameters for the backward."""
    RESHARD = auto()
    """Show the shards and give the memory of the whole parameters back."""
    HOOK_OUTPUTS = auto()
    """Put a pre-backward hook on everything the forward returned."""
    INTERCEPT_READS = auto()
    """An optimizer may step inside the forward: from now on, answer each read of a parameter with its value then."""
    JOIN_BACKWARD = auto()
    """Be part of the running backward; the first unit to join queues the root callback."""
    REDUCE_GRADS = auto()
    """Hand the gradients to the reducer, which launches in the agreed order."""
    FLUSH_GRADS = auto()
    """Reduce what did arrive and was not reduced yet, zeros for the rest."""
    COMMIT = auto()
    """Await the reduced gradients and put them into `.grad` of the shards."""
    ACCUMULATE_UNSHARDED = auto()
    """Add this backward's whole gradients to those kept under `no_sync`."""
    WAIT_REDUCTIONS = auto()
    """Wait until no reduction is in flight."""
    DROP_GRADS = auto()
    """Forget the gradients of this backward, reduced or not."""
    GATHER_FULL = auto()
    """Gather the full parameters into memory of their own and let the user see them."""
    WRITE_BACK = auto()
    """Copy what the user changed into the shards."""
    FREE_FULL = auto()
    """Show the shards again and give the lent memory back."""
