"""The buckets of one root together: whose turn it is, and what is asked of each.

Pure: it turns what happens into actions; the reducer (and the explorer) carry them out.
"""

from collections.abc import Sequence
from typing import Final

from state_machine.bucket import (
    BUCKETS,
    UNITS,
    BucketAction,
    BucketEvent,
    BucketKind,
    BucketState,
    UnitEvent,
    UnitState,
)

OFFER: Final = BucketAction.OFFER


class BucketQueue:
    """The buckets of one root in one backward at a time, in groups that take turns in the agreed order.

    Invariant: a bucket changes its state only in `on`, which moves or raises. A group has its turn when all groups before it had
    theirs and each of its buckets was offered.
    """

    __slots__ = (
        "_count",
        "_groups",
        "_kinds",
        "_missing",
        "_place",
        "_states",
        "_tables",
        "_turn",
        "_unit_states",
        "_units",
        "names",
    )

    def __init__(self, names: Sequence[str], units: Sequence[int], kinds: Sequence[BucketKind], count: int) -> None:
        self.names = tuple(names)
        """For each bucket, the name of its unit."""
        self._units = tuple(units)
        """For each bucket, the number of its unit."""
        self._kinds = tuple(kinds)
        self._tables = [BUCKETS[kind] for kind in kinds]
        self._count = count
        """Of units."""
        self.agree_on([(number,) for number in range(len(names))])
        self.begin()

    def agree_on(self, groups: Sequence[Sequence[int]]) -> None:
        """From the next backward on: the groups of buckets that share a collective, in the agreed order."""
        self._groups = tuple(groups)
        self._place = {number: place for place, group in enumerate(groups) for number in group}
        """For each bucket, the place of its group."""

    def begin(self) -> None:
        """A backward begins."""
        self._states = [BucketState.EMPTY] * len(self.names)
        self._unit_states = [UnitState.OPEN] * self._count
        self._missing = [len(group) for group in self._groups]
        """For each group, how many of its buckets were not offered."""
        self._turn = 0

    def on(self, number: int, event: BucketEvent) -> tuple[BucketAction, ...]:
        """Move one bucket along its table and return what the reducer must now do, in order.

        Raises:
            RuntimeError: the table has no row for it, which only a bug of ours can cause. Nothing moved.
        """
        state = self._states[number]
        step = self._tables[number][state].get(event)
        if step is None:
            raise RuntimeError(
                f"bucket {number} of unit {self.names[number]!r} ({self._kinds[number].name}): {event.name} while {state.name}; "
                "this is a bug in fsdp, please report it."
            )
        to, actions = step
        self._states[number] = to
        if actions and OFFER in actions:
            self._missing[self._place[number]] -= 1
        return actions

    def on_unit(self, unit: int, event: UnitEvent) -> bool:
        """Move one unit; return whether its buckets are told that it is done."""
        step = UNITS[self._unit_states[unit]][event]
        self._unit_states[unit] = step.to
        return step.notify_buckets

    def next_group(self) -> Sequence[int] | None:
        """The buckets that have their turn now. None: it is that of a group which is not complete, or all had theirs."""
        if self._turn == len(self._groups) or self._missing[self._turn]:
            return None
        self._turn += 1
        return self._groups[self._turn - 1]

    def on_remainder_turn(self, number: int) -> tuple[BucketAction, ...]:
        """All groups had their turn: what is asked of a bucket about its remainder."""
        reopened = self._unit_states[self._units[number]] is UnitState.REOPENED
        return self.on(number, BucketEvent.REMAINDER_TURN_REOPENED if reopened else BucketEvent.REMAINDER_TURN)
