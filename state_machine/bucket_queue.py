"""The buckets of one root together: their states, and the group of buckets whose turn it is.

This file has no side effects. It turns events into actions; the reducer (and the explorer) execute them.
"""

from collections.abc import Sequence
from typing import Final

from state_machine.bucket import BUCKETS, CHECKED, UNITS, BucketAction, BucketEvent, BucketKind, BucketState, UnitEvent, UnitState

OFFER: Final = BucketAction.OFFER


class BucketQueue:
    """The states of the buckets of one root in a backward. Groups of buckets take turns in the agreed order.

    Invariant: a bucket changes its state only in `on`, which either changes it or raises. A group has its turn when all groups
    before it have had theirs and each of its buckets was offered.
    """

    def __init__(self, names: Sequence[str], units: Sequence[int], kinds: Sequence[BucketKind], count: int) -> None:
        self.names = tuple(names)
        """The name of the unit of each bucket."""
        self._units = tuple(units)
        """The number of the unit of each bucket."""
        self._kinds = tuple(kinds)
        self._tables = [BUCKETS[kind] for kind in kinds]
        self._unit_states = [UnitState.OPEN] * count
        self.agree_on([(number,) for number in range(len(names))])
        self.begin()

    def agree_on(self, groups: Sequence[Sequence[int]]) -> None:
        """Set the groups of buckets that share a collective, in the agreed order, from the next backward on."""
        self._groups = tuple(groups)
        self._place = {number: place for place, group in enumerate(groups) for number in group}
        """The place of the group of each bucket."""

    def begin(self) -> None:
        """Begin a backward: all buckets are EMPTY, and no unit is done."""
        self._states = [BucketState.EMPTY] * len(self.names)
        self._unit_states = [UNITS[state][UnitEvent.BEGINS].to for state in self._unit_states]
        self._missing = [*map(len, self._groups)]
        """The number of buckets of each group that were not offered."""
        self._turn = 0

    def on(self, number: int, event: BucketEvent) -> tuple[BucketAction, ...]:
        """Change the state of a bucket by its table and return the actions of the reducer, in order.

        Raises:
            RuntimeError: the table has no row for the event, which is a bug of fsdp. No state has changed.
        """
        try:
            self._states[number], actions = self._tables[number][self._states[number]][event]
        except KeyError:
            raise self._refusal(number, event) from None
        if actions and OFFER in actions:
            self._missing[self._place[number]] -= 1
        return actions

    def check(self, event: BucketEvent) -> None:
        """Raise RuntimeError, a bug of fsdp, if a bucket has no row for the event, before the first of them gets it."""
        for number, (table, state) in enumerate(zip(self._tables, self._states, strict=True)):
            if event not in table[state]:
                raise self._refusal(number, event)

    def _refusal(self, number: int, event: BucketEvent) -> RuntimeError:
        return RuntimeError(
            f"bucket {number} of unit {self.names[number]!r} ({self._kinds[number].name}): {event.name} while "
            f"{self._states[number].name}; this is a bug in fsdp, please report it."
        )

    def on_unit(self, unit: int, event: UnitEvent) -> bool:
        """Apply an event to a unit; return whether its buckets must get POST_BACKWARD."""
        self._unit_states[unit], of_buckets = UNITS[self._unit_states[unit]][event]
        return BucketEvent.POST_BACKWARD in of_buckets

    def next_group(self) -> Sequence[int] | None:
        """Return the buckets whose turn it is, or None if that group is not complete or all groups have had their turn."""
        if self._turn == len(self._groups) or self._missing[self._turn]:
            return None
        self._turn += 1
        return self._groups[self._turn - 1]

    def on_remainder_turn(self, number: int) -> tuple[BucketAction, ...]:
        """Apply the turn for a remainder to a bucket, after all groups have had their turn; return the actions."""
        checked = self._unit_states[self._units[number]] in CHECKED
        return self.on(number, BucketEvent.REMAINDER_TURN_CHECKED if checked else BucketEvent.REMAINDER_TURN)
