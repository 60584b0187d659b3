"""Launches the all-gathers of units: one for each, or one for several small ones that are gathered at the same time."""

from collections.abc import Callable, Sequence

import torch

from fsdp.comm.communicator import Communicator
from fsdp.device.streams import Streams
from fsdp.params.unit import Unit
from fsdp.reduction.stats import StepStats
from fsdp.runtime.prefetch import share_gathers


class Gathers:
    """The all-gathers of one root.

    Rule 1: which units share an all-gather follows from the order of the calls and from sizes, which all ranks have alike.
    """

    __slots__ = ("_cap", "_collected", "_kinds", "_sizes", "_stats", "_streams", "_units")

    def __init__(self, units: Sequence[Unit], streams: Streams, cap: int, stats: StepStats) -> None:
        """`cap`: the most bytes that several units fill together. `stats` counts the launches."""
        self._units = tuple(units)
        self._streams = streams
        self._cap = cap
        self._stats = stats
        self._sizes = [sum(unit.gather_sizes) for unit in units]
        self._kinds = [_kind(unit) for unit in units]
        """Units of one kind can share an all-gather. None: the unit has its own."""
        self._collected: list[int] | None = None
        """The units to be gathered together; None while each gather is launched at once."""

    def prefetch(self, indices: Sequence[int], request: Callable[[int], object]) -> None:
        """Call `request` for each of these units. Those that it gathers share all-gathers, which are launched at the end."""
        if not self._cap:
            for index in indices:
                request(index)
            return
        collected: list[int] = []
        self._collected = collected
        try:
            for index in indices:
                request(index)
        finally:
            self._collected = None
        for group in share_gathers(collected, self._sizes, self._cap, self._kinds):
            self._launch(group)

    def gather(self, index: int) -> None:
        """Launch the all-gather of a unit, or collect it for a later one."""
        if self._collected is None:
            self._units[index].all_gather()
            self._stats.add_gathers((index,))
        else:
            self._collected.append(index)

    def _launch(self, group: Sequence[int]) -> None:
        units = [self._units[index] for index in group if len(group) == 1 or self._sizes[index]]
        if len(units) > 1:
            with self._streams.gathering():
                flats = [flat for unit in units for flat in unit.gathered_flats]
                works = (units[0].gather_together(flats), *self._streams.gathered())
            for unit in units:
                unit.add_works(works)
        else:
            for unit in units:
                unit.all_gather()
        self._stats.add_gathers(group)


def _kind(unit: Unit) -> tuple[Communicator, torch.device] | None:
    """Where a unit is gathered; None if its shard is in host memory, or its parameters are cut among different ranks."""
    comms = dict.fromkeys(flat.comm for flat in unit.flats) or {unit.comm: None}
    return None if unit.copies_shards or len(comms) > 1 else (next(iter(comms)), unit.device)
