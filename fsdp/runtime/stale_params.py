"""Sends events to the staleness machine of each unit, and executes its checks before an all-gather.

Rule 1: `state_machine/staleness.py` decides which unsharded copy is dropped. This file reads version counters and communicates.
"""

from collections.abc import Iterable, Sequence

from fsdp.comm.communicator import Communicator
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
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
        self._queued: dict[int, int] = {}
        """For each unit in host memory whose copy to the device may be queued: what `Versions.of_others` was before."""
        self._changed: str | None = None
        """The name of a unit whose weights changed while such a copy may have been queued; None if there is none."""

    def begin_pass(self, records_graph: bool) -> Iterable[int]:
        """Begin a forward of the root. Yield the units whose copies must be dropped.

        Traffic: one byte over all ranks, if a copy is in memory since the last pass. Ranks that may go different ways take any
        such copy for stale.
        """
        self._refuse_changed()
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
        self._refuse_changed()
        self._queued.clear()
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
        if self._units[index].copies_shards:
            self._compare_queued(index)
            self._refuse_changed()
            self._queued[index] = self._units[index].versions.of_others
        actions = self._root.before_gather(index)
        versions = self._units[index].versions
        check = CopyAction.CHECK in actions
        replaced = self._units[index].check_shards() if check else self._units[index].follow_replaced()
        versions.before_gather(in_backward=not check)
        # data of the user is copied just now; a forward may write shards after its pass began, and the gather stream has waited
        # for the beginning alone
        is_written = check and not self._streams.on_host and versions.moved_in_pass
        if replaced or is_written or CopyAction.WAIT in actions:
            self._streams.pass_begins()
        if CopyAction.SUM in actions:
            versions.remember_sums()

    def await_copies(self) -> None:
        """A pass ends: wait for the copies from and to the host. Weights that changed meanwhile are an error of the next pass."""
        self._streams.await_copies()
        for index in self._queued:
            self._compare_queued(index)
        self._queued.clear()

    def _compare_queued(self, index: int) -> None:
        """Record whether the weights of a unit have changed since the copy of them to the device was queued."""
        unit = self._units[index]
        if self._queued.get(index, unit.versions.of_others) != unit.versions.of_others:
            self._changed = unit.name

    def _refuse_changed(self) -> None:
        """Raise ShardingError if a copy to the device may have read weights that were changed after it was queued."""
        name, self._changed = self._changed, None
        if name is not None:
            raise ShardingError(
                f"unit {name!r}: weights in host memory (offload_policy) were changed inside a forward or backward, while a copy "
                "of them to the device may have been queued. So that pass may have computed with the new weights too early. "
                "Change weights between passes."
            )
