"""The words of the lifecycle: where a unit can be, what can happen to it, what must be done.

Every word has one meaning, written beside it. The tables (table.py) are made of these words alone.
"""

from enum import Enum, auto


class Word(Enum):
    """A word of the machine. There is one object for each, so its identity is its hash (Enum's own is slow)."""

    __hash__ = object.__hash__


class State(Word):
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


class Event(Word):
    """What can happen to a unit."""

    FORWARD_BEGINS = auto()
    """Its forward is called, outside any backward."""
    FORWARD_ENDS = auto()
    """Its forward returned something a backward can come back through."""
    INFERENCE_ENDS = auto()
    """Its forward returned and nothing of it requires grad: no backward will come."""
    FORWARD_FAILS = auto()
    """An exception passes through its forward."""
    REPLAY_BEGINS = auto()
    """Its forward is called inside a backward: activation checkpointing."""
    REPLAY_ENDS = auto()
    """That forward returned. May never come: a replay can be stopped early by an exception."""
    BACKWARD_REACHES = auto()
    """Autograd is about to enter the unit through one of its outputs."""
    GRADIENT_ARRIVES = auto()
    """The first gradient of one of its parameters in this backward."""
    GRADIENT_FROM_OUTSIDE = auto()
    """A gradient comes from a use of a parameter outside the unit, which needs none of the unit's own memory."""
    GRADIENTS_READY = auto()
    """Its gradients are complete, at a moment every rank comes to, in a backward that synchronises."""
    GRADIENTS_KEPT = auto()
    """They are complete, and stay here: under `no_sync`, or because other ranks may not have come to this moment."""
    BACKWARD_LEFT = auto()
    """The gradients of its inputs are computed; how a frozen unit learns that it is done."""
    BACKWARD_ENDS = auto()
    """The root callback of a backward that synchronises. Told to every unit of the root."""
    BACKWARD_ENDS_UNSYNCED = auto()
    """The root callback of a backward under `no_sync`. Told to every unit of the root."""
    BACKWARD_FAILS = auto()
    """The backward died by an exception. Told to every unit of the root."""
    SUMMONED = auto()
    """The user asks for the full parameters."""
    RETURNED = auto()
    """The user gives them back, and the changes shall be kept."""
    DISCARDED = auto()
    """The user gives them back, and the changes shall be forgotten."""
    STEP_ABANDONED = auto()
    """Something of ours failed half-way: give up the pass. Legal everywhere."""


class Action(Word):
    """What the engine must do, in the order the table gives."""

    REFRESH = auto()
    """Take over what the user froze or thawed, and forget a copy gathered in an earlier pass."""
    NEED = auto()
    """Have the whole parameters now, and show them."""
    KEEP = auto()
    """Show the shards again and keep the memory of the whole parameters for the backward."""
    FREE = auto()
    """Show the shards and give the memory of the whole parameters back."""
    WATCH_OUTPUTS = auto()
    """Put a pre-backward hook on everything the forward returned."""
    GUARD = auto()
    """An optimizer may step inside the forward: from now on, answer each read of a parameter with its value then."""
    JOIN_BACKWARD = auto()
    """Be part of the running backward; the first unit to join queues the root callback."""
    REDUCE = auto()
    """Hand the gradients to the reducer, which launches in the agreed order."""
    FLUSH = auto()
    """Reduce what did arrive and was not reduced yet, zeros for the rest."""
    COMMIT = auto()
    """Await the reduced gradients and put them into `.grad` of the shards."""
    STASH = auto()
    """Add this backward's whole gradients to those kept under `no_sync`."""
    DRAIN = auto()
    """Wait until no reduction is in flight."""
    DROP = auto()
    """Forget the gradients of this backward, reduced or not."""
    LEND = auto()
    """Gather the full parameters into memory of their own and let the user see them."""
    WRITE_BACK = auto()
    """Copy what the user changed into the shards."""
    RECLAIM = auto()
    """Show the shards again and give the lent memory back."""
