"""The tables of every legal transition of a bucket of gradients in one backward, one for each kind of bucket.

Rule 1: whether a bucket may be launched, waited for or checked for a remainder is a row here, never an `if` in the reducer.
Rule 2: a missing pair is an error. To ignore an event, write the row that ignores it.

A *remainder* is the gradients that arrive at a bucket after its launch. It is reduced at the end of the backward, and added.
A unit is *done* when its post-backward has run.

[Note: early buckets]
A unit is done at a moment that every rank reaches. The gradients of a bucket can be complete before that moment, on some ranks
only. Such a bucket may be launched early, but this rank must not wait for it until its unit is done: a peer that launches it
later may first wait for an all-gather or for the counts at the end of the backward, and this rank would reach neither.
The buckets after an early bucket in the order are then launched earlier too, on this rank alone. So if any bucket of a root may
be early, each bucket may have a remainder on some ranks only, and all ranks must check for it.

[Note: uses outside the unit]
A parameter can be read outside its unit before the unit runs. Its gradient then arrives after the unit is done: a remainder. All
ranks read it, because reading gathers, but the value may reach the loss on some ranks only. So from its first such read on, all
ranks check the unit for a remainder in every backward. No rank knows when the last graph with such a value is gone.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final

from state_machine.machine import Step
from state_machine.vocabulary import MachineEnum


class BucketState(MachineEnum):
    """Where the gradients of a bucket are."""

    EMPTY = auto()
    """Some gradients are missing, and nothing was launched."""
    READY_EARLY = auto()
    """All gradients have arrived, but its unit is not done, so peers may be behind. It waits for its turn."""
    READY = auto()
    """Its unit is done. It waits for its turn."""
    HELD = auto()
    """Its unit is done, and nothing is launched before the end of the backward."""
    ASKING = auto()
    """The backward is over, and its unit was not done. It is reduced if some rank has a gradient of it."""
    REDUCING_EARLY = auto()
    """Launched before its unit was done: peers may launch it later."""
    REDUCING = auto()
    """Launched, and every peer launches it without waiting for this rank."""
    REDUCED = auto()
    """Its gradients have left its memory. The result is here, or is reduced over the replicas."""
    REDUCING_REMAINDER = auto()
    """Its remainder is launched."""
    PASSED = auto()
    """Its turn is over and it is not reduced: it is frozen, or no rank has a gradient of it."""
    BROKEN_OFF = auto()
    """The step failed while it was in flight. It is not in flight any more, and has no result."""


class BucketEvent(MachineEnum):
    """An event of a bucket."""

    GRADS_COMPLETE = auto()
    """The last gradient that it waits for has arrived."""
    UNUSED = auto()
    """Autograd will reach none of its parameters in this backward."""
    POST_BACKWARD = auto()
    """Its unit is done for the first time, at a moment that every rank reaches."""
    LAUNCH_ANYWAY = auto()
    """The backward is over, and every rank reduces every bucket, because ranks may have used different units."""
    TAKE_STOCK = auto()
    """The backward is over, and this rank is about to send which gradients it has."""
    FLUSH_GRADS = auto()
    """The backward is over, and its unit is flushed."""
    TURN = auto()
    """Its turn in the agreed order has come."""
    TURN_FROZEN = auto()
    """Its turn in the agreed order has come, and it has no trainable parameter."""
    SOME_RANK_HAS = auto()
    """Some rank has a gradient that was not reduced."""
    NO_RANK_HAS = auto()
    """No rank has a gradient that was not reduced."""
    REMAINDER_TURN = auto()
    """All buckets have had their turn, and its turn for a remainder has come. Its unit was gathered and done at most once."""
    REMAINDER_TURN_CHECKED = auto()
    """Its turn for a remainder has come, and all ranks check its unit: it was gathered or done again, or used outside."""
    MAKE_ROOM = auto()
    """It is the oldest in flight, and another bucket is about to be launched."""
    LANDED = auto()
    """The reducer has waited for it: its gradients have left its memory."""
    DRAINED = auto()
    """The step failed, and nothing of it is in flight any more."""
    COMMIT = auto()
    """Everything that can fail is over."""
    ACCUMULATE = auto()
    """A backward that does not synchronise is over."""
    DROP_GRADS = auto()
    """The step failed, and its gradients must be dropped. Nothing of it is in flight."""


class BucketAction(MachineEnum):
    """A task of the reducer. A row lists its actions in order."""

    MARK = auto()
    """Record the time when it was ready, and its place in the order of arrival."""
    OFFER = auto()
    """Allow its launch when its turn has come."""
    COUNT = auto()
    """Count which of its parameters have a gradient."""
    COUNT_REMAINDER = auto()
    """Count which of its parameters have a gradient that was not launched."""
    ASK = auto()
    """Find out whether any rank has a gradient of it; then apply SOME_RANK_HAS or NO_RANK_HAS."""
    LOOK_HERE = auto()
    """Apply SOME_RANK_HAS if this rank has a remainder."""
    LOOK_EVERYWHERE = auto()
    """Apply SOME_RANK_HAS if any rank has a remainder."""
    WAIT = auto()
    """Wait until it has landed and apply LANDED; then try again."""
    LAUNCH_REDUCTION = auto()
    """Fill it with its gradients and with those accumulated under `no_sync`, and reduce it."""
    LAUNCH_REMAINDER = auto()
    """Fill it with its remainder, and reduce that."""
    PASS_BY = auto()
    """Count it as reduced, without a collective."""
    PUT = auto()
    """Put the result into `.grad` of the shards, or add it there."""
    ACCUMULATE_UNSHARDED = auto()
    """Add its gradients to those accumulated under `no_sync`."""
    FORGET = auto()
    """Drop its gradients, reduced or not."""


BucketStep = Step[BucketState, BucketAction]
BucketTable = Mapping[BucketState, Mapping[BucketEvent, BucketStep]]


class BucketKind(MachineEnum):
    """When a bucket may be launched and waited for."""

    ORDINARY = auto()
    """Launched when its unit is done. No bucket of its root is early."""
    BEHIND_EARLY = auto()
    """Launched when its unit is done. Another bucket of its root may be early."""
    EARLY = auto()
    """Launched when its gradients have arrived, and waited for after its unit is done."""
    FIND_UNUSED = auto()
    """Launched when its gradients have arrived, on ranks that may use different units (`find_unused_parameters`)."""
    AT_END = auto()
    """Launched when the backward is over (`at_end`)."""


_S, _E, _A, _Step = BucketState, BucketEvent, BucketAction, Step

ORDINARY: Final[BucketTable] = {
    _S.EMPTY: {
        _E.POST_BACKWARD: _Step(_S.READY, (_A.MARK, _A.OFFER)),
        _E.TAKE_STOCK: _Step(_S.EMPTY, (_A.COUNT,)),
        _E.FLUSH_GRADS: _Step(_S.ASKING, (_A.OFFER,)),
        _E.ACCUMULATE: _Step(_S.EMPTY, (_A.ACCUMULATE_UNSHARDED,)),
        # also without gradients: the step may fail anywhere
        _E.DRAINED: _Step(_S.EMPTY),
        _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.READY: {
        _E.TURN: _Step(_S.REDUCING, (_A.LAUNCH_REDUCTION,)),
        _E.TURN_FROZEN: _Step(_S.PASSED, (_A.PASS_BY,)),
        _E.TAKE_STOCK: _Step(_S.READY, (_A.COUNT,)),
        # it shares a collective with a bucket that is not ready
        _E.FLUSH_GRADS: _Step(_S.READY),
        _E.DRAINED: _Step(_S.READY),
        _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.ASKING: {
        _E.TURN: _Step(_S.ASKING, (_A.ASK,)),
        _E.SOME_RANK_HAS: _Step(_S.REDUCING, (_A.MARK, _A.LAUNCH_REDUCTION)),
        _E.NO_RANK_HAS: _Step(_S.PASSED, (_A.MARK,)),
        _E.TURN_FROZEN: _Step(_S.PASSED, (_A.MARK, _A.PASS_BY)),
        _E.DRAINED: _Step(_S.ASKING),
        _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.REDUCING: {
        _E.MAKE_ROOM: _Step(_S.REDUCING, (_A.WAIT,)),
        _E.LANDED: _Step(_S.REDUCED),
        _E.TAKE_STOCK: _Step(_S.REDUCING, (_A.COUNT_REMAINDER,)),
        _E.FLUSH_GRADS: _Step(_S.REDUCING),
        # only an unsharded parameter that user code has stored can bring a remainder, and that happens on every rank
        _E.REMAINDER_TURN: _Step(_S.REDUCING, (_A.LOOK_HERE,)),
        # with several checkpoints, outputs or calls, each rank may use other parameters
        _E.REMAINDER_TURN_CHECKED: _Step(_S.REDUCING, (_A.LOOK_EVERYWHERE,)),
        # the reduction in flight still reads its memory: it must land first
        _E.SOME_RANK_HAS: _Step(_S.REDUCING, (_A.WAIT,)),
        _E.DRAINED: _Step(_S.BROKEN_OFF),
    },
    _S.REDUCED: {
        _E.TAKE_STOCK: _Step(_S.REDUCED, (_A.COUNT_REMAINDER,)),
        _E.FLUSH_GRADS: _Step(_S.REDUCED),
        _E.REMAINDER_TURN: _Step(_S.REDUCED, (_A.LOOK_HERE,)),
        _E.REMAINDER_TURN_CHECKED: _Step(_S.REDUCED, (_A.LOOK_EVERYWHERE,)),
        _E.SOME_RANK_HAS: _Step(_S.REDUCING_REMAINDER, (_A.LAUNCH_REMAINDER,)),
        _E.COMMIT: _Step(_S.EMPTY, (_A.PUT,)),
        _E.DRAINED: _Step(_S.REDUCED),
        _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.REDUCING_REMAINDER: {
        _E.MAKE_ROOM: _Step(_S.REDUCING_REMAINDER, (_A.WAIT,)),
        _E.LANDED: _Step(_S.REDUCED),
        _E.DRAINED: _Step(_S.BROKEN_OFF),
    },
    _S.PASSED: {
        _E.TAKE_STOCK: _Step(_S.PASSED, (_A.COUNT_REMAINDER,)),
        _E.FLUSH_GRADS: _Step(_S.PASSED),
        # a frozen bucket has no remainder, and no gradient arrives later
        _E.REMAINDER_TURN: _Step(_S.PASSED),
        _E.REMAINDER_TURN_CHECKED: _Step(_S.PASSED),
        _E.COMMIT: _Step(_S.EMPTY),
        _E.DRAINED: _Step(_S.PASSED),
        _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.BROKEN_OFF: {
        # each unit drains all buckets
        _E.DRAINED: _Step(_S.BROKEN_OFF),
        _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
    },
}


def _with(table: BucketTable, changed: Mapping[BucketState, Mapping[BucketEvent, BucketStep | None]]) -> BucketTable:
    """Return the table with some rows changed or added. None removes a row."""
    states = dict.fromkeys((*table, *changed))
    rows = {state: {**table.get(state, {}), **changed.get(state, {})} for state in states}
    return {state: {event: step for event, step in row.items() if step is not None} for state, row in rows.items() if row}


# All ranks check for remainders at the end.
BEHIND_EARLY: Final = _with(
    ORDINARY,
    {
        _S.REDUCING: {_E.REMAINDER_TURN: _Step(_S.REDUCING, (_A.LOOK_EVERYWHERE,))},
        _S.REDUCED: {_E.REMAINDER_TURN: _Step(_S.REDUCED, (_A.LOOK_EVERYWHERE,))},
    },
)

# It may be launched between its last gradient and the post-backward of its unit. This rank does not wait for it there.
EARLY: Final = _with(
    BEHIND_EARLY,
    {
        _S.EMPTY: {_E.GRADS_COMPLETE: _Step(_S.READY_EARLY, (_A.MARK, _A.OFFER))},
        # its unit was done before this gradient arrived
        _S.READY: {_E.GRADS_COMPLETE: _Step(_S.READY)},
        _S.REDUCING: {_E.GRADS_COMPLETE: _Step(_S.REDUCING)},
        _S.READY_EARLY: {
            _E.TURN: _Step(_S.REDUCING_EARLY, (_A.LAUNCH_REDUCTION,)),
            _E.POST_BACKWARD: _Step(_S.READY),
            _E.TAKE_STOCK: _Step(_S.READY_EARLY, (_A.COUNT,)),
            _E.FLUSH_GRADS: _Step(_S.READY),
            _E.DRAINED: _Step(_S.READY_EARLY),
            _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
        },
        _S.REDUCING_EARLY: {
            # do not wait: a peer may launch it only at the end of the backward, after an all-gather that needs this rank
            _E.MAKE_ROOM: _Step(_S.REDUCING_EARLY),
            # with one rank in the shard group, gradients leave the memory of the bucket at the launch
            _E.LANDED: _Step(_S.REDUCED),
            # now every rank launches it before it continues
            _E.POST_BACKWARD: _Step(_S.REDUCING),
            _E.TAKE_STOCK: _Step(_S.REDUCING_EARLY, (_A.COUNT_REMAINDER,)),
            _E.FLUSH_GRADS: _Step(_S.REDUCING),
            _E.DRAINED: _Step(_S.BROKEN_OFF),
        },
        _S.REDUCED: {_E.GRADS_COMPLETE: _Step(_S.REDUCED), _E.POST_BACKWARD: _Step(_S.REDUCED)},
    },
)

# A unit that this rank does not use delays nothing, and at the end every rank launches every bucket before it sends or waits for
# counts. No rank waits for an all-gather (NO_SHARD), so every launched bucket may be waited for.
FIND_UNUSED: Final = _with(
    {state: row for state, row in BEHIND_EARLY.items() if state is not _S.ASKING},
    {
        _S.EMPTY: {
            _E.GRADS_COMPLETE: _Step(_S.READY, (_A.MARK, _A.OFFER)),
            # no MARK: another backward may use it, so it gets no place in the order of arrival
            _E.UNUSED: _Step(_S.READY, (_A.OFFER,)),
            _E.LAUNCH_ANYWAY: _Step(_S.READY, (_A.MARK, _A.OFFER)),
            _E.TAKE_STOCK: None,
            _E.FLUSH_GRADS: None,
        },
        _S.READY: {
            _E.GRADS_COMPLETE: _Step(_S.READY),
            _E.POST_BACKWARD: _Step(_S.READY),
            _E.LAUNCH_ANYWAY: _Step(_S.READY),
            _E.TAKE_STOCK: None,
            _E.FLUSH_GRADS: None,
        },
        _S.REDUCING: {
            _E.GRADS_COMPLETE: _Step(_S.REDUCING),
            _E.POST_BACKWARD: _Step(_S.REDUCING),
            _E.LAUNCH_ANYWAY: _Step(_S.REDUCING),
        },
        _S.REDUCED: {
            _E.GRADS_COMPLETE: _Step(_S.REDUCED),
            _E.POST_BACKWARD: _Step(_S.REDUCED),
            _E.LAUNCH_ANYWAY: _Step(_S.REDUCED),
        },
        # it is frozen, so it has no gradient, but its unit may be done
        _S.PASSED: {_E.POST_BACKWARD: _Step(_S.PASSED), _E.LAUNCH_ANYWAY: _Step(_S.PASSED)},
    },
)

# It is not offered before the end, so no gradient arrives after its launch.
AT_END: Final = _with(
    {state: row for state, row in ORDINARY.items() if state is not _S.REDUCING_REMAINDER},
    {
        _S.EMPTY: {
            _E.POST_BACKWARD: _Step(_S.HELD, (_A.MARK,)),
            # before the end it makes no difference whether it is complete or used
            _E.GRADS_COMPLETE: _Step(_S.EMPTY),
            _E.UNUSED: _Step(_S.EMPTY),
            _E.LAUNCH_ANYWAY: _Step(_S.READY, (_A.MARK, _A.OFFER)),
        },
        _S.HELD: {
            _E.GRADS_COMPLETE: _Step(_S.HELD),
            _E.LAUNCH_ANYWAY: _Step(_S.READY, (_A.OFFER,)),
            _E.TAKE_STOCK: _Step(_S.HELD, (_A.COUNT,)),
            _E.FLUSH_GRADS: _Step(_S.READY, (_A.OFFER,)),
            _E.DRAINED: _Step(_S.HELD),
            _E.DROP_GRADS: _Step(_S.EMPTY, (_A.FORGET,)),
        },
        # it was flushed, or launched by LAUNCH_ANYWAY, before any rank sends counts
        _S.READY: {_E.TAKE_STOCK: None, _E.FLUSH_GRADS: None},
        _S.REDUCING: {
            _E.REMAINDER_TURN: _Step(_S.REDUCING),
            _E.REMAINDER_TURN_CHECKED: _Step(_S.REDUCING),
            _E.SOME_RANK_HAS: None,
        },
        _S.REDUCED: {
            _E.REMAINDER_TURN: _Step(_S.REDUCED),
            _E.REMAINDER_TURN_CHECKED: _Step(_S.REDUCED),
            _E.SOME_RANK_HAS: None,
        },
    },
)

BUCKETS: Final[Mapping[BucketKind, BucketTable]] = {
    BucketKind.ORDINARY: ORDINARY,
    BucketKind.BEHIND_EARLY: BEHIND_EARLY,
    BucketKind.EARLY: EARLY,
    BucketKind.FIND_UNUSED: FIND_UNUSED,
    BucketKind.AT_END: AT_END,
}


class UnitState(MachineEnum):
    """How often a unit was done in one backward, and whether its parameters were ever used outside it."""

    OPEN = auto()
    """It is not done."""
    DONE = auto()
    """It was done once."""
    REOPENED = auto()
    """It was gathered or done again after it was done, on every rank."""
    OPEN_OUTSIDE = auto()
    """It is not done, and its parameters were used outside it, on every rank."""
    DONE_OUTSIDE = auto()
    """It was done, and its parameters were used outside it, on every rank."""


class UnitEvent(MachineEnum):
    """An event of the gradients of a unit."""

    BEGINS = auto()
    """A backward begins."""
    GATHERED = auto()
    """The unit was gathered in the backward."""
    POST_BACKWARD = auto()
    """The unit is done."""
    USED_OUTSIDE = auto()
    """A parameter was read outside the unit, and its value requires a gradient."""


UnitStep = Step[UnitState, BucketEvent]
"""Its actions are the events that the buckets of the unit get."""

UNITS: Final[Mapping[UnitState, Mapping[UnitEvent, UnitStep]]] = {
    UnitState.OPEN: {
        UnitEvent.BEGINS: _Step(UnitState.OPEN),
        UnitEvent.GATHERED: _Step(UnitState.OPEN),
        UnitEvent.POST_BACKWARD: _Step(UnitState.DONE, (_E.POST_BACKWARD,)),
        UnitEvent.USED_OUTSIDE: _Step(UnitState.OPEN_OUTSIDE),
    },
    UnitState.DONE: {
        UnitEvent.BEGINS: _Step(UnitState.OPEN),
        UnitEvent.GATHERED: _Step(UnitState.REOPENED),
        # a unit that stays unsharded can be done again without another all-gather
        UnitEvent.POST_BACKWARD: _Step(UnitState.REOPENED),
        # in a recompute, or in the next forward
        UnitEvent.USED_OUTSIDE: _Step(UnitState.DONE_OUTSIDE),
    },
    UnitState.REOPENED: {
        UnitEvent.BEGINS: _Step(UnitState.OPEN),
        UnitEvent.GATHERED: _Step(UnitState.REOPENED),
        UnitEvent.POST_BACKWARD: _Step(UnitState.REOPENED),
        UnitEvent.USED_OUTSIDE: _Step(UnitState.DONE_OUTSIDE),
    },
    UnitState.OPEN_OUTSIDE: {
        UnitEvent.BEGINS: _Step(UnitState.OPEN_OUTSIDE),
        UnitEvent.GATHERED: _Step(UnitState.OPEN_OUTSIDE),
        UnitEvent.POST_BACKWARD: _Step(UnitState.DONE_OUTSIDE, (_E.POST_BACKWARD,)),
        UnitEvent.USED_OUTSIDE: _Step(UnitState.OPEN_OUTSIDE),
    },
    UnitState.DONE_OUTSIDE: {
        UnitEvent.BEGINS: _Step(UnitState.OPEN_OUTSIDE),
        UnitEvent.GATHERED: _Step(UnitState.DONE_OUTSIDE),
        UnitEvent.POST_BACKWARD: _Step(UnitState.DONE_OUTSIDE),
        UnitEvent.USED_OUTSIDE: _Step(UnitState.DONE_OUTSIDE),
    },
}

CHECKED: Final = frozenset({UnitState.REOPENED, UnitState.OPEN_OUTSIDE, UnitState.DONE_OUTSIDE})
"""The states in which all ranks check the unit for a remainder."""
