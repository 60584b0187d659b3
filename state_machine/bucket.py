"""Every legal move of a bucket of gradients in one backward, one table per kind of bucket.

Rule 1: whether a bucket may be launched, may be waited for, or is looked at again is a row here, never an `if` in the reducer.
Rule 2: a missing pair is an error. To ignore an event, write the row that ignores it.

A *remainder* is what comes to a bucket after it was launched. It is reduced at the end of the backward, and added.

[Note: early buckets]
A unit is done at a moment every rank comes to. A bucket whose gradients have all come may be launched before that moment, which
peers with other gradients do not share, as long as this rank does not wait for it until then: a peer that launches it later may
wait before that for a gather, or for what this rank has to say at the end, and this rank would not come to either.
Behind an early bucket the others in the order are launched earlier too, on this rank alone. So wherever a bucket may be early,
each bucket may have a remainder on some ranks only, and all ranks look.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final, NamedTuple

from state_machine.vocabulary import MachineEnum


class BucketState(MachineEnum):
    """Where the gradients of a bucket are."""

    EMPTY = auto()
    """Some have not come, and nothing was launched."""
    READY_EARLY = auto()
    """All have come, and its unit is not done: peers may not be as far. It waits for its turn."""
    READY = auto()
    """Its unit is done. It waits for its turn."""
    HELD = auto()
    """Its unit is done, and nothing is launched before the end of the backward."""
    ASKING = auto()
    """The backward is over, and its unit was not done: it is reduced if some rank has a gradient of it."""
    REDUCING_EARLY = auto()
    """Launched before its unit was done: peers may launch it later."""
    REDUCING = auto()
    """Launched, and every peer launches it, whatever this rank does."""
    REDUCED = auto()
    """Its gradients have left its memory; the result is here, or on its way to other replicas."""
    REDUCING_REMAINDER = auto()
    """What came after it was launched is launched too."""
    PASSED = auto()
    """Its turn is over and nothing of it is reduced: it is frozen, or no rank has a gradient of it."""
    BROKEN_OFF = auto()
    """The step failed while it was launched or in flight. It is not any more, and there is no result."""


class BucketEvent(MachineEnum):
    """What can happen to a bucket."""

    GRADS_COMPLETE = auto()
    """The last of the gradients that it waits for has come."""
    UNUSED = auto()
    """Autograd says that this backward comes to none of its parameters."""
    POST_BACKWARD = auto()
    """Its unit is done for the first time, at a moment every rank comes to."""
    LAUNCH_ANYWAY = auto()
    """The backward is over, and every rank reduces every bucket, since each came through units of its own."""
    TAKE_STOCK = auto()
    """The backward is over: this rank is about to say which gradients it has."""
    FLUSH = auto()
    """The backward is over, and its unit is flushed."""
    TURN = auto()
    """Its turn in the agreed order has come."""
    TURN_FROZEN = auto()
    """The same, and there is nothing trainable in it."""
    SOME_RANK_HAS = auto()
    """The answer: there is a gradient that was not reduced."""
    NO_RANK_HAS = auto()
    """The answer: there is none."""
    REMAINDER_TURN = auto()
    """All buckets had their turn, and its turn for a remainder has come. Its unit was gathered and done once at most."""
    REMAINDER_TURN_REOPENED = auto()
    """The same, and its unit was gathered or done again after it was done, on every rank."""
    MAKE_ROOM = auto()
    """It is the oldest in flight, and another bucket is about to be launched."""
    LANDED = auto()
    """It was waited for: its gradients have left its memory."""
    DRAINED = auto()
    """The step failed, and nothing of it is in flight any more."""
    COMMIT = auto()
    """All that can fail is over."""
    ACCUMULATE = auto()
    """A backward that does not synchronise is over."""
    DROP = auto()
    """The step failed, and nothing of it is in flight: forget its gradients."""


class BucketAction(MachineEnum):
    """What the reducer must do, in order."""

    MARK = auto()
    """Note when it was ready, and its place in the order of arrival."""
    OFFER = auto()
    """It may be launched when its turn has come."""
    COUNT = auto()
    """Say which of its parameters have a gradient."""
    COUNT_REMAINDER = auto()
    """Say which of its parameters have another gradient than those that were launched."""
    ASK = auto()
    """Find out whether any rank has a gradient of it, and come back with the answer."""
    LOOK_HERE = auto()
    """Come back if this rank has a remainder."""
    LOOK_EVERYWHERE = auto()
    """Come back if any rank has a remainder."""
    AWAIT = auto()
    """Wait until it has landed, and come back."""
    LAUNCH = auto()
    """Fill it with its gradients, and with those kept under `no_sync`, and reduce it."""
    LAUNCH_REMAINDER = auto()
    """Fill it with what came after it was launched, and reduce that."""
    PASS_BY = auto()
    """Nothing of it is missing."""
    PUT = auto()
    """Set or accumulate the result into `.grad` of the shards."""
    KEEP = auto()
    """Add its gradients to those kept under `no_sync`."""
    FORGET = auto()
    """Let go of its gradients, reduced or not."""


class BucketStep(NamedTuple):
    """Where an event leads, and what the reducer must do on the way, in order."""

    to: BucketState
    actions: tuple[BucketAction, ...] = ()


BucketTable = Mapping[BucketState, Mapping[BucketEvent, BucketStep]]


class BucketKind(MachineEnum):
    """When a bucket may be launched and waited for."""

    ORDINARY = auto()
    """Launched when its unit is done. No bucket of its root is early."""
    BEHIND_EARLY = auto()
    """Launched when its unit is done. Some bucket of its root may be launched early."""
    EARLY = auto()
    """Launched when its gradients have come; waited for when its unit is done."""
    FIND_UNUSED = auto()
    """The same, and ranks may come through different units (`find_unused_parameters`)."""
    AT_END = auto()
    """Launched when the backward is over (`at_end`)."""


_S, _E, _A, _Step = BucketState, BucketEvent, BucketAction, BucketStep

ORDINARY: Final[BucketTable] = {
    _S.EMPTY: {
        _E.POST_BACKWARD: _Step(_S.READY, (_A.MARK, _A.OFFER)),
        _E.TAKE_STOCK: _Step(_S.EMPTY, (_A.COUNT,)),
        _E.FLUSH: _Step(_S.ASKING, (_A.OFFER,)),
        _E.ACCUMULATE: _Step(_S.EMPTY, (_A.KEEP,)),
        # also where nothing came to it: the step may fail anywhere
        _E.DRAINED: _Step(_S.EMPTY),
        _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.READY: {
        _E.TURN: _Step(_S.REDUCING, (_A.LAUNCH,)),
        _E.TURN_FROZEN: _Step(_S.PASSED, (_A.PASS_BY,)),
        _E.TAKE_STOCK: _Step(_S.READY, (_A.COUNT,)),
        # it shares a collective with one that is not ready
        _E.FLUSH: _Step(_S.READY),
        _E.DRAINED: _Step(_S.READY),
        _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.ASKING: {
        _E.TURN: _Step(_S.ASKING, (_A.ASK,)),
        _E.SOME_RANK_HAS: _Step(_S.REDUCING, (_A.MARK, _A.LAUNCH)),
        _E.NO_RANK_HAS: _Step(_S.PASSED, (_A.MARK,)),
        _E.TURN_FROZEN: _Step(_S.PASSED, (_A.MARK, _A.PASS_BY)),
        _E.DRAINED: _Step(_S.ASKING),
        _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.REDUCING: {
        _E.MAKE_ROOM: _Step(_S.REDUCING, (_A.AWAIT,)),
        _E.LANDED: _Step(_S.REDUCED),
        _E.TAKE_STOCK: _Step(_S.REDUCING, (_A.COUNT_REMAINDER,)),
        _E.FLUSH: _Step(_S.REDUCING),
        # only a use outside its unit can bring one, and that comes on every rank
        _E.REMAINDER_TURN: _Step(_S.REDUCING, (_A.LOOK_HERE,)),
        # several checkpoints, outputs or calls, in which each rank may use other parameters
        _E.REMAINDER_TURN_REOPENED: _Step(_S.REDUCING, (_A.LOOK_EVERYWHERE,)),
        # its memory would be filled under the reduction that reads it: first it lands
        _E.SOME_RANK_HAS: _Step(_S.REDUCING, (_A.AWAIT,)),
        _E.DRAINED: _Step(_S.BROKEN_OFF),
    },
    _S.REDUCED: {
        _E.TAKE_STOCK: _Step(_S.REDUCED, (_A.COUNT_REMAINDER,)),
        _E.FLUSH: _Step(_S.REDUCED),
        _E.REMAINDER_TURN: _Step(_S.REDUCED, (_A.LOOK_HERE,)),
        _E.REMAINDER_TURN_REOPENED: _Step(_S.REDUCED, (_A.LOOK_EVERYWHERE,)),
        _E.SOME_RANK_HAS: _Step(_S.REDUCING_REMAINDER, (_A.LAUNCH_REMAINDER,)),
        _E.COMMIT: _Step(_S.EMPTY, (_A.PUT,)),
        _E.DRAINED: _Step(_S.REDUCED),
        _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.REDUCING_REMAINDER: {
        _E.MAKE_ROOM: _Step(_S.REDUCING_REMAINDER, (_A.AWAIT,)),
        _E.LANDED: _Step(_S.REDUCED),
        _E.DRAINED: _Step(_S.BROKEN_OFF),
    },
    _S.PASSED: {
        _E.TAKE_STOCK: _Step(_S.PASSED, (_A.COUNT_REMAINDER,)),
        _E.FLUSH: _Step(_S.PASSED),
        # what is frozen has no remainder, and what no rank has comes on no rank later
        _E.REMAINDER_TURN: _Step(_S.PASSED),
        _E.REMAINDER_TURN_REOPENED: _Step(_S.PASSED),
        _E.COMMIT: _Step(_S.EMPTY),
        _E.DRAINED: _Step(_S.PASSED),
        _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
    },
    _S.BROKEN_OFF: {
        # each unit drains, the first of them for all
        _E.DRAINED: _Step(_S.BROKEN_OFF),
        _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
    },
}


def _with(table: BucketTable, changed: Mapping[BucketState, Mapping[BucketEvent, BucketStep | None]]) -> BucketTable:
    """The table with some rows changed or added and, for None, without them."""
    states = dict.fromkeys((*table, *changed))
    rows = {state: {**table.get(state, {}), **changed.get(state, {})} for state in states}
    return {state: {event: step for event, step in row.items() if step is not None} for state, row in rows.items() if row}


# All ranks look at the end.
BEHIND_EARLY: Final = _with(
    ORDINARY,
    {
        _S.REDUCING: {_E.REMAINDER_TURN: _Step(_S.REDUCING, (_A.LOOK_EVERYWHERE,))},
        _S.REDUCED: {_E.REMAINDER_TURN: _Step(_S.REDUCED, (_A.LOOK_EVERYWHERE,))},
    },
)

# Between its last gradient and the end of its unit it may be launched, and this rank does not wait for it.
EARLY: Final = _with(
    BEHIND_EARLY,
    {
        _S.EMPTY: {_E.GRADS_COMPLETE: _Step(_S.READY_EARLY, (_A.MARK, _A.OFFER))},
        # its unit was done without a gradient that comes all the same
        _S.READY: {_E.GRADS_COMPLETE: _Step(_S.READY)},
        _S.REDUCING: {_E.GRADS_COMPLETE: _Step(_S.REDUCING)},
        _S.READY_EARLY: {
            _E.TURN: _Step(_S.REDUCING_EARLY, (_A.LAUNCH,)),
            _E.POST_BACKWARD: _Step(_S.READY),
            _E.TAKE_STOCK: _Step(_S.READY_EARLY, (_A.COUNT,)),
            _E.FLUSH: _Step(_S.READY),
            _E.DRAINED: _Step(_S.READY_EARLY),
            _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
        },
        _S.REDUCING_EARLY: {
            # a peer may launch it at the end of the backward only, after a gather that needs this rank
            _E.MAKE_ROOM: _Step(_S.REDUCING_EARLY),
            # where one rank holds the shard, gradients leave its memory with the launch, and nobody waits
            _E.LANDED: _Step(_S.REDUCED),
            # now every rank launches it before it goes on
            _E.POST_BACKWARD: _Step(_S.REDUCING),
            _E.TAKE_STOCK: _Step(_S.REDUCING_EARLY, (_A.COUNT_REMAINDER,)),
            _E.FLUSH: _Step(_S.REDUCING),
            _E.DRAINED: _Step(_S.BROKEN_OFF),
        },
        _S.REDUCED: {_E.GRADS_COMPLETE: _Step(_S.REDUCED), _E.POST_BACKWARD: _Step(_S.REDUCED)},
    },
)

# What this rank does not come to holds nothing up, and in the end every rank launches every bucket before it says or asks
# anything. No rank waits for a gather (NO_SHARD), so whatever is launched may be waited for.
FIND_UNUSED: Final = _with(
    {state: row for state, row in BEHIND_EARLY.items() if state is not _S.ASKING},
    {
        _S.EMPTY: {
            _E.GRADS_COMPLETE: _Step(_S.READY, (_A.MARK, _A.OFFER)),
            # no place in the order of arrival: another backward may use it
            _E.UNUSED: _Step(_S.READY, (_A.OFFER,)),
            _E.LAUNCH_ANYWAY: _Step(_S.READY, (_A.MARK, _A.OFFER)),
            _E.TAKE_STOCK: None,
            _E.FLUSH: None,
        },
        _S.READY: {
            _E.GRADS_COMPLETE: _Step(_S.READY),
            _E.POST_BACKWARD: _Step(_S.READY),
            _E.LAUNCH_ANYWAY: _Step(_S.READY),
            _E.TAKE_STOCK: None,
            _E.FLUSH: None,
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
        # frozen, so nothing came to it, and its unit may be done all the same
        _S.PASSED: {_E.POST_BACKWARD: _Step(_S.PASSED), _E.LAUNCH_ANYWAY: _Step(_S.PASSED)},
    },
)

# Nothing is offered before the end, so nothing comes after it was launched.
AT_END: Final = _with(
    {state: row for state, row in ORDINARY.items() if state is not _S.REDUCING_REMAINDER},
    {
        _S.EMPTY: {
            _E.POST_BACKWARD: _Step(_S.HELD, (_A.MARK,)),
            # whether it is complete, or used at all, makes no difference before the end
            _E.GRADS_COMPLETE: _Step(_S.EMPTY),
            _E.UNUSED: _Step(_S.EMPTY),
            _E.LAUNCH_ANYWAY: _Step(_S.READY, (_A.MARK, _A.OFFER)),
        },
        _S.HELD: {
            _E.GRADS_COMPLETE: _Step(_S.HELD),
            _E.LAUNCH_ANYWAY: _Step(_S.READY, (_A.OFFER,)),
            _E.TAKE_STOCK: _Step(_S.HELD, (_A.COUNT,)),
            _E.FLUSH: _Step(_S.READY, (_A.OFFER,)),
            _E.DRAINED: _Step(_S.HELD),
            _E.DROP: _Step(_S.EMPTY, (_A.FORGET,)),
        },
        # it was flushed, or was launched anyway before any rank says what it has
        _S.READY: {_E.TAKE_STOCK: None, _E.FLUSH: None},
        _S.REDUCING: {
            _E.REMAINDER_TURN: _Step(_S.REDUCING),
            _E.REMAINDER_TURN_REOPENED: _Step(_S.REDUCING),
            _E.SOME_RANK_HAS: None,
        },
        _S.REDUCED: {
            _E.REMAINDER_TURN: _Step(_S.REDUCED),
            _E.REMAINDER_TURN_REOPENED: _Step(_S.REDUCED),
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
    """How often a unit was done in a backward."""

    OPEN = auto()
    """It was not done."""
    DONE = auto()
    """Once."""
    REOPENED = auto()
    """It was gathered or done again after that, on every rank."""


class UnitEvent(MachineEnum):
    """What can happen to the gradients of a unit."""

    GATHERED = auto()
    POST_BACKWARD = auto()


class UnitStep(NamedTuple):
    """Where a unit goes, and whether its buckets are told that it is done."""

    to: UnitState
    notify_buckets: bool = False


UNITS: Final[Mapping[UnitState, Mapping[UnitEvent, UnitStep]]] = {
    UnitState.OPEN: {
        UnitEvent.GATHERED: UnitStep(UnitState.OPEN),
        UnitEvent.POST_BACKWARD: UnitStep(UnitState.DONE, notify_buckets=True),
    },
    UnitState.DONE: {
        UnitEvent.GATHERED: UnitStep(UnitState.REOPENED),
        # a unit that stays unsharded is done again and was not gathered again
        UnitEvent.POST_BACKWARD: UnitStep(UnitState.REOPENED),
    },
    UnitState.REOPENED: {
        UnitEvent.GATHERED: UnitStep(UnitState.REOPENED),
        UnitEvent.POST_BACKWARD: UnitStep(UnitState.REOPENED),
    },
}
