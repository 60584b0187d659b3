"""Whether a forward may compute with the unsharded copy of a unit: one machine for each unit, beside its residency.

A copy is gathered from the shards of all ranks, and is stale once an optimizer or the user has changed a shard. A version
counter shows a change only on the rank that made it, and an optimizer does not change empty shards. All ranks must decide alike
whether to gather. So the decision depends on what is the same on all ranks: the reshard policy, the passes, the backwards, and a
comparison over all ranks.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final

from state_machine.machine import Machine, Step
from state_machine.table import BackwardState, ReshardPolicy
from state_machine.vocabulary import MachineEnum


class CopyState(MachineEnum):
    """Whether a forward may compute with the copy of a unit."""

    STALE = auto()
    """It may not: there is no copy, or the weights have changed or may have changed since the gather."""
    FRESH = auto()
    """It may, unless the version counters have changed."""
    UNSURE = auto()
    """It may not before all ranks have compared whether the weights have changed."""


class CopyEvent(MachineEnum):
    """An event of the copy of a unit."""

    GATHERED = auto()
    """An all-gather is about to be launched, outside any backward."""
    GATHERED_LATE = auto()
    """An all-gather is about to be launched in a forward inside which a backward has run: an optimizer may step in it."""
    GATHERED_IN_BACKWARD = auto()
    """An all-gather is about to be launched in a backward."""
    PASS_BEGINS = auto()
    """A forward of the root begins and records a graph."""
    EVALUATION_BEGINS = auto()
    """A forward of the root begins and records no graph."""
    EVALUATION_ENDS = auto()
    """A forward of the root that recorded no graph is over."""
    USED = auto()
    """A forward of the unit begins, and the version counters have not changed since the gather."""
    USED_CHANGED = auto()
    """A forward of the unit begins, and the version counters have changed since the gather."""
    COMMITTED = auto()
    """The shards have got gradients: an optimizer may step."""
    BACKWARD_INSIDE = auto()
    """A backward inside the current forward is over."""
    WEIGHTS_SAME = auto()
    """All ranks have compared, and none has changed a weight."""
    WEIGHTS_CHANGED = auto()
    """All ranks have compared, and at least one has changed a weight."""
    RELEASED = auto()
    """The memory of the copy was freed."""


class CopyAction(MachineEnum):
    """A task of the engine. A row lists its actions in order."""

    DROP_COPY = auto()
    """Free the copy, if there is one."""
    ASK = auto()
    """Compare with all ranks whether weights have changed."""
    CHECK = auto()
    """Check the shards for changes by the user, and record their version counters."""
    WAIT = auto()
    """Let the gather wait for the current computation, which may write the shards."""
    SUM = auto()
    """Record the checksums of the shards."""


CopyTable = Mapping[CopyState, Mapping[CopyEvent, Step[CopyState, CopyAction]]]

_S, _E, _A = CopyState, CopyEvent, CopyAction

WITHIN_A_PASS: Final[CopyTable] = {
    _S.STALE: {
        _E.GATHERED: Step(_S.FRESH, (_A.CHECK,)),
        _E.GATHERED_LATE: Step(_S.FRESH, (_A.CHECK, _A.WAIT)),
        _E.GATHERED_IN_BACKWARD: Step(_S.FRESH),
        # a copy of an earlier pass is freed only now: until here, a backward of that pass could follow
        _E.USED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.USED_CHANGED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.PASS_BEGINS: Step(_S.STALE),
        _E.EVALUATION_BEGINS: Step(_S.STALE),
        _E.EVALUATION_ENDS: Step(_S.STALE),
        _E.COMMITTED: Step(_S.STALE),
        _E.BACKWARD_INSIDE: Step(_S.STALE),
        _E.RELEASED: Step(_S.STALE),
    },
    _S.FRESH: {
        # a second call in the same pass
        _E.USED: Step(_S.FRESH),
        _E.USED_CHANGED: Step(_S.STALE, (_A.DROP_COPY,)),
        # no copy is used in another pass, so no comparison is needed
        _E.PASS_BEGINS: Step(_S.STALE),
        _E.EVALUATION_BEGINS: Step(_S.STALE),
        _E.EVALUATION_ENDS: Step(_S.FRESH),
        # the unit is in its forward, or is freed at the end of the backward; the next pass gathers again anyway
        _E.COMMITTED: Step(_S.FRESH),
        _E.BACKWARD_INSIDE: Step(_S.FRESH),
        _E.RELEASED: Step(_S.STALE),
    },
    # never reached: no comparison is made
    _S.UNSURE: {},
}
"""The table of AFTER_FORWARD and AFTER_BACKWARD, whose copies are not used in another pass."""

FROM_PASS_TO_PASS: Final[CopyTable] = {
    _S.STALE: {
        _E.GATHERED: Step(_S.FRESH, (_A.CHECK, _A.SUM)),
        _E.GATHERED_LATE: Step(_S.UNSURE, (_A.CHECK, _A.WAIT, _A.SUM)),
        _E.GATHERED_IN_BACKWARD: Step(_S.FRESH, (_A.SUM,)),
        # at once, so that prefetch can gather it again
        _E.PASS_BEGINS: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.EVALUATION_BEGINS: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.EVALUATION_ENDS: Step(_S.STALE),
        _E.USED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.USED_CHANGED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.COMMITTED: Step(_S.STALE),
        _E.BACKWARD_INSIDE: Step(_S.STALE),
        _E.RELEASED: Step(_S.STALE),
    },
    _S.FRESH: {
        _E.USED: Step(_S.FRESH),
        _E.USED_CHANGED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.PASS_BEGINS: Step(_S.UNSURE, (_A.ASK,)),
        # users swap weights around evaluations, also through `.data`; a gather costs no more than a comparison
        _E.EVALUATION_BEGINS: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.EVALUATION_ENDS: Step(_S.STALE),
        _E.COMMITTED: Step(_S.STALE),
        _E.BACKWARD_INSIDE: Step(_S.UNSURE),
        _E.RELEASED: Step(_S.STALE),
    },
    _S.UNSURE: {
        _E.WEIGHTS_SAME: Step(_S.FRESH),
        _E.WEIGHTS_CHANGED: Step(_S.STALE, (_A.DROP_COPY,)),
        # no comparison is possible inside a forward, and version counters differ between ranks: all ranks gather again
        _E.USED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.USED_CHANGED: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.PASS_BEGINS: Step(_S.UNSURE, (_A.ASK,)),
        _E.EVALUATION_BEGINS: Step(_S.STALE, (_A.DROP_COPY,)),
        _E.EVALUATION_ENDS: Step(_S.STALE),
        _E.COMMITTED: Step(_S.STALE),
        _E.BACKWARD_INSIDE: Step(_S.UNSURE),
        _E.RELEASED: Step(_S.STALE),
    },
}
"""The table of NEVER, whose copies are used in later passes."""

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
"""The event of an all-gather, by the state of the backward of the root."""


class Copy(Machine[CopyState, CopyEvent, CopyAction]):
    """The unsharded copy of one unit."""

    __slots__ = ()

    def __init__(self, unit: str, reshard_policy: ReshardPolicy) -> None:
        super().__init__(unit, COPY_TABLES[reshard_policy], CopyState.STALE)

    def set_reshard_policy(self, policy: ReshardPolicy) -> None:
        """From now on, follow the table of `policy`. All tables have the same states."""
        self._table = COPY_TABLES[policy]
