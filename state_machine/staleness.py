"""Whether a forward may compute with the unsharded copy that a unit has: a machine of each unit, beside its residency.

The copy is gathered from the shards of all ranks; an optimizer, or whoever else writes a shard, leaves it behind. Version
counters show a change on the rank that made it, and an optimizer passes by empty shards, so a choice that leads to a gather
hangs on what every rank sees alike: the strategy, the passes, the backwards, and one question put to all ranks.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final, NamedTuple

from state_machine.table import BackwardState, ReshardPolicy
from state_machine.vocabulary import MachineEnum


class CopyState(MachineEnum):
    """Whether a forward may compute with the copy."""

    STALE = auto()
    """No: there is none, or the weights have changed since it was gathered, or may have."""
    FRESH = auto()
    """Yes, unless the version counters have moved."""
    UNSURE = auto()
    """Not before all ranks were asked whether the weights have changed."""


class CopyEvent(MachineEnum):
    """What can happen to the copy of a unit."""

    GATHERED = auto()
    """A gather is about to be launched, outside any backward."""
    GATHERED_LATE = auto()
    """The same, in a forward inside which a backward has run: an optimizer may step before the forward ends."""
    GATHERED_IN_BACKWARD = auto()
    PASS_BEGINS = auto()
    """A forward of the root begins, and records a graph."""
    EVALUATION_BEGINS = auto()
    """A forward of the root begins, and records none."""
    EVALUATION_ENDS = auto()
    USED = auto()
    """A forward of the unit begins, and the version counters are those of the gather."""
    USED_CHANGED = auto()
    """A forward of the unit begins, and the version counters have moved since the gather."""
    COMMITTED = auto()
    """The shards were given gradients: an optimizer may step."""
    BACKWARD_INSIDE = auto()
    """A backward inside the forward that runs is over."""
    WEIGHTS_SAME = auto()
    """All ranks were asked, and none has changed any weight."""
    WEIGHTS_CHANGED = auto()
    """All ranks were asked, and some rank has."""
    RELEASED = auto()
    """The memory of the copy was given back."""


class CopyAction(MachineEnum):
    """What the engine must do, in order."""

    DROP = auto()
    """Free the copy, if there is one."""
    ASK = auto()
    """Ask all ranks whether weights have changed."""
    CHECK = auto()
    """Take over what was done to the shards from outside, and note their version counters."""
    WAIT = auto()
    """Let the gather wait for what computes now, which may write the shards."""
    SUM = auto()
    """Note the checksums of the shards."""


class CopyStep(NamedTuple):
    """Where an event leads, and what the engine must do on the way, in order."""

    to: CopyState
    actions: tuple[CopyAction, ...] = ()


CopyTable = Mapping[CopyState, Mapping[CopyEvent, CopyStep]]

_S, _E, _A = CopyState, CopyEvent, CopyAction

WITHIN_A_PASS: Final[CopyTable] = {
    _S.STALE: {
        _E.GATHERED: CopyStep(_S.FRESH, (_A.CHECK,)),
        _E.GATHERED_LATE: CopyStep(_S.FRESH, (_A.CHECK, _A.WAIT)),
        _E.GATHERED_IN_BACKWARD: CopyStep(_S.FRESH),
        # what an earlier pass left behind goes when it is in the way of a forward; a backward of that pass may still come
        _E.USED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.USED_CHANGED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.PASS_BEGINS: CopyStep(_S.STALE),
        _E.EVALUATION_BEGINS: CopyStep(_S.STALE),
        _E.EVALUATION_ENDS: CopyStep(_S.STALE),
        _E.COMMITTED: CopyStep(_S.STALE),
        _E.BACKWARD_INSIDE: CopyStep(_S.STALE),
        _E.RELEASED: CopyStep(_S.STALE),
    },
    _S.FRESH: {
        # a second call in the same pass
        _E.USED: CopyStep(_S.FRESH),
        _E.USED_CHANGED: CopyStep(_S.STALE, (_A.DROP,)),
        # no copy lasts longer than its pass, so nobody needs to ask
        _E.PASS_BEGINS: CopyStep(_S.STALE),
        _E.EVALUATION_BEGINS: CopyStep(_S.STALE),
        _E.EVALUATION_ENDS: CopyStep(_S.FRESH),
        # a unit in its forward, or one that goes at the end of the backward; the next pass gathers anew in any case
        _E.COMMITTED: CopyStep(_S.FRESH),
        _E.BACKWARD_INSIDE: CopyStep(_S.FRESH),
        _E.RELEASED: CopyStep(_S.STALE),
    },
    # never reached: nobody asks
    _S.UNSURE: {},
}
"""For the strategies whose copies do not outlive a pass."""

FROM_PASS_TO_PASS: Final[CopyTable] = {
    _S.STALE: {
        _E.GATHERED: CopyStep(_S.FRESH, (_A.CHECK, _A.SUM)),
        _E.GATHERED_LATE: CopyStep(_S.UNSURE, (_A.CHECK, _A.WAIT, _A.SUM)),
        _E.GATHERED_IN_BACKWARD: CopyStep(_S.FRESH, (_A.SUM,)),
        # at once, so that prefetch may gather it anew
        _E.PASS_BEGINS: CopyStep(_S.STALE, (_A.DROP,)),
        _E.EVALUATION_BEGINS: CopyStep(_S.STALE, (_A.DROP,)),
        _E.EVALUATION_ENDS: CopyStep(_S.STALE),
        _E.USED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.USED_CHANGED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.COMMITTED: CopyStep(_S.STALE),
        _E.BACKWARD_INSIDE: CopyStep(_S.STALE),
        _E.RELEASED: CopyStep(_S.STALE),
    },
    _S.FRESH: {
        _E.USED: CopyStep(_S.FRESH),
        _E.USED_CHANGED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.PASS_BEGINS: CopyStep(_S.UNSURE, (_A.ASK,)),
        # weights are swapped around evaluations, also through `.data`: gathering them is no dearer than asking
        _E.EVALUATION_BEGINS: CopyStep(_S.STALE, (_A.DROP,)),
        _E.EVALUATION_ENDS: CopyStep(_S.STALE),
        _E.COMMITTED: CopyStep(_S.STALE),
        _E.BACKWARD_INSIDE: CopyStep(_S.UNSURE),
        _E.RELEASED: CopyStep(_S.STALE),
    },
    _S.UNSURE: {
        _E.WEIGHTS_SAME: CopyStep(_S.FRESH),
        _E.WEIGHTS_CHANGED: CopyStep(_S.STALE, (_A.DROP,)),
        # inside a forward nobody asks: the counters of ranks differ, and all of them gather anew
        _E.USED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.USED_CHANGED: CopyStep(_S.STALE, (_A.DROP,)),
        _E.PASS_BEGINS: CopyStep(_S.UNSURE, (_A.ASK,)),
        _E.EVALUATION_BEGINS: CopyStep(_S.STALE, (_A.DROP,)),
        _E.EVALUATION_ENDS: CopyStep(_S.STALE),
        _E.COMMITTED: CopyStep(_S.STALE),
        _E.BACKWARD_INSIDE: CopyStep(_S.UNSURE),
        _E.RELEASED: CopyStep(_S.STALE),
    },
}
"""For RESHARD_NEVER, whose copies stay from pass to pass."""

COPY_TABLES: Final[Mapping[ReshardPolicy, CopyTable]] = {
    ReshardPolicy.AFTER_FORWARD: WITHIN_A_PASS,
    ReshardPolicy.AFTER_BACKWARD: WITHIN_A_PASS,
    ReshardPolicy.NEVER: FROM_PASS_TO_PASS,
}

GATHERS: Final[Mapping[BackwardState, CopyEvent]] = {
    BackwardState.RESTING: CopyEvent.GATHERED,
    BackwardState.RESTING_INSIDE: CopyEvent.GATHERED_LATE,
    BackwardState.BEGINNING: CopyEvent.GATHERED_IN_BACKWARD,
    BackwardState.RUNNING_SYNC: CopyEvent.GATHERED_IN_BACKWARD,
    BackwardState.RUNNING_NO_SYNC: CopyEvent.GATHERED_IN_BACKWARD,
    BackwardState.RUNNING_NO_GRADS: CopyEvent.GATHERED_IN_BACKWARD,
}
"""Which event a gather is, by the backward of the root."""


class Copy:
    """The unsharded copy of one unit. `state` changes only in `on`, which moves or raises."""

    __slots__ = ("_reshard_policy", "_state", "unit")

    def __init__(self, unit: str, reshard_policy: ReshardPolicy) -> None:
        self.unit = unit
        self._reshard_policy = reshard_policy
        self._state = CopyState.STALE

    @property
    def state(self) -> CopyState:
        return self._state

    def on(self, event: CopyEvent) -> tuple[CopyAction, ...]:
        """Move and return what the engine must now do, in order.

        Raises:
            RuntimeError: the event makes no sense here, which only a bug of ours can cause.
        """
        step = COPY_TABLES[self._reshard_policy][self._state].get(event)
        if step is None:
            raise RuntimeError(
                f"the copy of unit {self.unit!r}: {event.name} is not allowed in {self._state.name}; "
                "this is a bug in fsdp, please report it."
            )
        self._state = step.to
        return step.actions
