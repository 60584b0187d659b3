"""Predicts which unit is gathered next. Imports no torch.

The first pass records the order in which units were gathered. Later passes prefetch in that order. A pass that deviates is
recorded anew and not prefetched any further, so ranks that deviate alike launch the same gathers.

[Note: when units share gathers]
Without sharing, a record decides when a gather is launched, and never which gathers there are. So each rank may learn and
forget it by itself. Where small units share gathers, a record decides which collectives there are, and all ranks must have the
same one, also after one of them has failed alone. So a record changes only when all ranks have reduced the gradients of a step.
After that only hooks of the user can fail.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice

from fsdp.log import LOG

Group = tuple[int, ...]
"""Units that share an all-gather, in the order in which they are needed."""


def share_gathers(units: Sequence[int], sizes: Sequence[int], cap: int, kinds: Sequence[Hashable] = ()) -> Iterator[Group]:
    """Neighbours among the units that one all-gather serves: each once, of at most `cap` bytes, and of one kind that is not None.

    The first one alone may be larger. Without `kinds` all units are of one.
    """
    group: Group = ()
    for unit in units:
        if group and not (
            cap
            and unit not in group
            and sum([sizes[one] for one in (*group, unit)]) <= cap
            and (not kinds or (kinds[group[0]] is not None and kinds[unit] == kinds[group[0]]))
        ):
            yield group
            group = ()
        group = (*group, unit)
    if group:
        yield group


class PrefetchSchedule:
    """The order of gathers in one kind of pass, forward or backward.

    Example: after a pass that gathered 0 1 2, with `depth` 1, gathering 0 prefetches 1, and gathering 1 prefetches 2.
    Small units that follow each other form a group, which is gathered as if it were one unit.
    """

    __slots__ = ("_cap", "_current", "_followed", "_given", "_groups", "_name", "_record", "_sizes", "_units", "depth")

    def __init__(
        self, depth: int, name: str = "pass", units: Sequence[str] = (), sizes: Sequence[int] = (), cap: int = 0
    ) -> None:
        """`sizes`: for each unit, the bytes of its gather. `cap`: the most bytes of a group of more than one unit."""
        self._name, self._units = name, units
        """The names of the pass and of the units, for the log."""
        self._sizes, self._cap = sizes, cap
        self.depth = depth
        """The number of groups that may be gathered ahead of the one that computes."""
        self._record: tuple[int, ...] = ()
        self._groups: tuple[Group, ...] = ()
        """The groups of the record, each at the place of its first unit. An empty one stands at the places of the others."""
        self._current: list[int] = []
        self._followed = True
        self._given: dict[int, tuple[int, ...]] = {}
        """For units whose successors the user has given: these, nearest first."""

    def give(self, unit: int, ahead: Sequence[int]) -> None:
        """From now on, gather the units `ahead` whenever `unit` had to be gathered; if there are none, what the record says."""
        self._given.pop(unit, None)
        if ahead:
            self._given[unit] = tuple(ahead)

    def begin(self) -> Sequence[int]:
        """Start a pass. The pass before becomes the record, unless units share gathers. Return the units needed first."""
        if not self._cap:
            self._learn()
        self._begin_anew()
        return self._ahead(0)

    def on_step_completed(self) -> None:
        """All ranks have completed a step: where units share gathers, its pass becomes the record."""
        if self._cap:
            self._learn()
            self._begin_anew()

    def forget(self) -> None:
        """Forget the pass that runs, and the record unless units share gathers. Ranks abandon a step in different places."""
        if not self._cap:
            self._record, self._groups = (), ()
        self._begin_anew()

    def gathered_with(self, unit: int) -> Sequence[int]:
        """Return `unit`, which is needed now, and the units that share its gather; nothing if it has one of its own."""
        group = self._groups[len(self._current)] if self._followed and len(self._current) < len(self._groups) else ()
        return group if len(group) > 1 and group[0] == unit else ()

    def needed(self, unit: int) -> Sequence[int]:
        """Record that `unit` had to be gathered. Return the units to gather ahead, nearest first."""
        position = len(self._current)
        self._current.append(unit)
        self._followed = self._followed and position < len(self._record) and self._record[position] == unit
        if unit in self._given:
            return self._given[unit]
        if not self._followed or not self._groups[position]:
            return ()
        return self._ahead(position + len(self._groups[position]))

    def _learn(self) -> None:
        """Make the pass before the record."""
        if self._current and not (self._followed and len(self._current) == len(self._record)):
            what = "order changed" if self._record else "schedule learned"
            self._record = tuple(self._current)
            groups = share_gathers(self._record, self._sizes, self._cap)
            self._groups = tuple(chain.from_iterable((group, *((),) * (len(group) - 1)) for group in groups))
            LOG.info(
                "%s: %s: %s", self._name, what, [self._units[unit] for unit in self._record] if self._units else self._record
            )

    def _begin_anew(self) -> None:
        self._current = []
        self._followed = True

    def _ahead(self, place: int) -> Sequence[int]:
        """The units of `depth` groups, of which the first begins at `place` of the record."""
        return tuple(chain.from_iterable(islice(filter(None, self._groups[place:]), self.depth)))
