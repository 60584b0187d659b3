"""Predicts which unit is gathered next. Imports no torch.

The first pass records the order in which units were gathered. Later passes prefetch in that order. A pass that deviates is
recorded anew and not prefetched any further, so ranks that deviate alike launch the same gathers.
"""

from collections.abc import Sequence

from fsdp.log import LOG


class PrefetchSchedule:
    """The order of gathers in one kind of pass, forward or backward.

    Example: after a pass that gathered 0 1 2, with `depth` 1, gathering 0 prefetches 1, and gathering 1 prefetches 2.
    """

    __slots__ = ("_current", "_followed", "_given", "_name", "_record", "_units", "depth")

    def __init__(self, depth: int, name: str = "pass", units: Sequence[str] = ()) -> None:
        self._name, self._units = name, units
        """The names of the pass and of the units, for the log."""
        self.depth = depth
        """The number of units that may be gathered ahead of the one that computes."""
        self._record: tuple[int, ...] = ()
        self._current: list[int] = []
        self._followed = True
        self._given: dict[int, tuple[int, ...]] = {}
        """For units whose successors the user has given: these, nearest first."""

    def give(self, unit: int, ahead: Sequence[int]) -> None:
        """From now on, gather the units `ahead` whenever `unit` had to be gathered, whatever the record says."""
        self._given[unit] = tuple(ahead)

    def begin(self) -> Sequence[int]:
        """Start a pass. The pass before becomes the record. Return the units that will be needed first."""
        if self._current and not self._followed_to_the_end():
            what = "order changed" if self._record else "schedule learned"
            self._record = tuple(self._current)
            LOG.info(
                "%s: %s: %s", self._name, what, [self._units[unit] for unit in self._record] if self._units else self._record
            )
        self._current = []
        self._followed = True
        return self._record[: self.depth]

    def forget(self) -> None:
        """Drop the record. Ranks abandon a step in different places, so all record again."""
        self._record = ()
        self._current = []
        self._followed = True

    def needed(self, unit: int) -> Sequence[int]:
        """Record that `unit` had to be gathered. Return the units to gather ahead, nearest first."""
        position = len(self._current)
        self._current.append(unit)
        self._followed = self._followed and position < len(self._record) and self._record[position] == unit
        if unit in self._given:
            return self._given[unit]
        return self._record[position + 1 : position + 1 + self.depth] if self._followed else ()

    def _followed_to_the_end(self) -> bool:
        return self._followed and len(self._current) == len(self._record)


class PassSchedules:
    """The schedules of the forward and of the backward of one root."""

    __slots__ = ("backward", "forward")

    def __init__(self, units: Sequence[str], depth: int) -> None:
        self.forward = PrefetchSchedule(depth, f"forward of {units[0]!r}", units)
        self.backward = PrefetchSchedule(depth, f"backward of {units[0]!r}", units)

    def forget(self) -> None:
        """Drop the records of both."""
        self.forward.forget()
        self.backward.forget()
