"""Sends events to the staleness machine of each unit, and executes its checks before an all-gather.

Rule 1: `state_machine/staleness.py` decides which unsharded copy is dropped. This file reads version counters and communicates.
"""

from collections.abc import Iterable, Sequence

from fsdp.comm.communicator import Communicator
from fsdp.device.streams import Streams
from fsdp.params.unit import Unit
from fsdp.params.versions import any_changed
from state_machine import CopyAction, CopyEvent, Root


class StaleParams:
    """The staleness of the unsharded copies of all units of one root."""

    def __init__(self, units: Sequence[Unit], root: Root, streams: Streams, world_comm: Communicator) -> None:
        self._units = tuple(units)
        self._root = root
        self._streams = streams
        self._world_comm = world_comm
        self._compares = not units[0].config.uneven_paths
        """Whether all ranks begin a forward at the same time, so that they can compare."""
        self._drops_early = units[0].config.coalesce_bytes > 0
        """Whether a forward of the root drops all stale copies when it begins, and not each where it would be used.

        Units share gathers then. Which units a gather fills must not depend on what a rank kept of a pass that it alone gave up.
        """

    def begin_pass(self, records_graph: bool) -> Iterable[int]:
        """Begin a forward of the root. Yield the units whose copies must be dropped.

        Traffic: one byte over all ranks, if a copy is in memory since the last pass. Ranks that may go different ways take any
        such copy for stale.
        """
        event = CopyEvent.PASS_BEGINS if records_graph else CopyEvent.EVALUATION_BEGINS
        compared = []
        for index, copy in enumerate(self._root.copies):
            actions = copy.on(event)
            if CopyAction.ASK in actions:
                compared.append(index)
            if CopyAction.DROP_COPY in actions:
                yield index
        if compared:
            changed = not self._compares or any_changed([self._units[index].versions for index in compared], self._world_comm)
            answer = CopyEvent.WEIGHTS_CHANGED if changed else CopyEvent.WEIGHTS_SAME
            for index in compared:
                if CopyAction.DROP_COPY in self._root.copies[index].on(answer):
                    yield index
        if self._drops_early:
            yield from filter(self.must_drop, range(len(self._units)))

    def show_to_gathers(self, is_forward: bool) -> None:
        """A pass begins: let its gathers see all that was written to the shards so far."""
        self._streams.pass_begins()
        if is_forward and not self._streams.on_host:
            for unit in self._units:
                unit.versions.pass_begins()

    def must_drop(self, index: int) -> bool:
        """Begin a forward of a unit. Return whether its copy must be dropped first."""
        moved = self._units[index].versions.moved
        return CopyAction.DROP_COPY in self._root.copies[index].on(CopyEvent.USED_CHANGED if moved else CopyEvent.USED)

    def prepare_gather(self, index: int) -> None:
        """Check the shards of a unit before its all-gather, and record their version counters."""
        actions = self._root.before_gather(index)
        versions = self._units[index].versions
        if CopyAction.CHECK in actions:
            replaced = self._units[index].check_shards()
            versions.gathered()
            # a forward may write shards after its pass began, and the gather stream has waited for the beginning alone
            if replaced or (not self._streams.on_host and versions.moved_in_pass):
                self._streams.pass_begins()
        if CopyAction.WAIT in actions:
            self._streams.pass_begins()
        if CopyAction.SUM in actions:
            versions.remember_sums()

    def on_commit(self, index: int) -> None:
        """The shards of a unit have got gradients: an optimizer may step."""
        if self._units[index].trains:
            self._root.copies[index].on(CopyEvent.COMMITTED)

    def on_freed(self, index: int) -> None:
        """The memory of a copy was freed."""
        self._root.copies[index].on(CopyEvent.RELEASED)
