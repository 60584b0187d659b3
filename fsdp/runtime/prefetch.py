"""Which unit comes next. Pure.

The first pass records the order in which units were needed; from then on prefetch follows the
record. A pass that leaves it is recorded anew and not prefetched any further, so that ranks which
leave it alike launch the same gathers.
"""

from collections.abc import Sequence


class Schedule:
    """The order of gathers of one kind of pass: forward, or backward.

    Example: after a pass that needed 0 1 2, with `depth` 1, needing 0 asks for 1 and needing 1 for 2.
    """

    __slots__ = ("_current", "_followed", "_record", "depth")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """How many units may be gathered ahead of the one that computes."""
        self._record: tuple[int, ...] = ()
        self._current: list[int] = []
        self._followed = True

    def begin(self) -> Sequence[int]:
        """A pass begins, and the one before it becomes the record; return the units that will be needed first."""
        if self._current and not self._followed_to_the_end():
            self._record = tuple(self._current)
        self._current = []
        self._followed = True
        return self._record[: self.depth]

    def forget(self) -> None:
        """Ranks that abandoned a step did so in different places: all begin anew."""
        self._record = ()
        self._current = []
        self._followed = True

    def needed(self, unit: int) -> Sequence[int]:
        """Note that `unit` had to be gathered; return the units to gather ahead, nearest first."""
        position = len(self._current)
        self._current.append(unit)
        self._followed = self._followed and position < len(self._record) and self._record[position] == unit
        return self._record[position + 1 : position + 1 + self.depth] if self._followed else ()

    def _followed_to_the_end(self) -> bool:
        return self._followed and len(self._current) == len(self._record)
