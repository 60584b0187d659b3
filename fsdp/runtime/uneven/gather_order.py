"""Executes the tasks of `state_machine.paths`: passive gathers, meetings and exchanges of paths.

Rule 1: every gather of a root goes through here first, so that all ranks launch the same sequence.
Rule 2: a passive gather is received in memory of its own, which is released before the next one is launched.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.comm.context import CommContext
from fsdp.comm.work import Work
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError, WorldError, name_ranks
from fsdp.params.flat_buffer import FlatBuffer, copy_label
from fsdp.params.unit import Unit
from fsdp.runtime.uneven.weight_changes import WeightChanges
from state_machine.paths import Call, ChangedWeights, Gather, Meet, Mixed, Paths, Phase, Place, Places, Tasks

Combine = Callable[[Sequence[int]], Sequence[int]]
"""Combines a message of each rank by the maximum."""


class Target(NamedTuple):
    """One thing that is gathered at a time: the flat buffers of a unit, or a copy of one of them."""

    unit: Unit
    flats: Sequence[FlatBuffer]
    dtype: torch.dtype | None
    """The dtype of the copy. None: that of the unsharded parameters."""
    label: str


class GatherOrder:
    """The gathers of one root, in the order of all ranks."""

    def __init__(
        self, units: Sequence[Unit], comms: CommContext, streams: Streams, tracker: MemoryTracker, combine: Combine
    ) -> None:
        self._comms = comms
        self._streams = streams
        self._tracker = tracker
        self._combine = combine
        self._targets = [Target(unit, unit.gathered_flats, None, unit.name) for unit in units]
        self._copies: dict[tuple[int, torch.dtype], int] = {}
        """The target of a copy of a flat buffer in a dtype."""
        for unit in units:
            for flat in unit.flats:
                for dtype in dict.fromkeys((flat.unsharded.dtype, flat.shard.dtype)):
                    self._copies[id(flat), dtype] = len(self._targets)
                    self._targets.append(Target(unit, (flat,), dtype, copy_label(unit.name)))
        self._calls = {phase: [Call(unit, phase) for unit in range(len(units))] for phase in Phase}
        self._paths = Paths(len(self._targets))
        self._changes = WeightChanges(units)
        self._units = len(units)
        self._gathers = comms.shard_comm.size > 1
        """Whether a gather communicates."""
        self._works: list[Work] = []
        self._received: list[Tensor] = []
        """The memory of the passive gather in flight."""

    def forget(self) -> None:
        """A step was abandoned: learn the common path anew."""
        self._paths.forget()
        self._changes.end_step()

    def before_gather(self, unit: int, phase: Phase) -> None:
        """Launch what comes before the gather of a unit in the order of all ranks."""
        if self._gathers:
            self._changes.begin_gather()
            if not self._paths.take_next(call := self._calls[phase][unit]):
                self._execute(self._paths.want(call), self._combine)

    def before_copy(self, flat: FlatBuffer, dtype: torch.dtype, phase: Phase) -> None:
        """The same for a copy of one flat buffer, whose gather this rank waits for at once."""
        if self._gathers:
            self._changes.begin_gather()
            call = Call(self._copies[id(flat), dtype], phase)
            self._execute(self._paths.want(call), self._combine)
            self._paths.wanted(call)

    def needed(self, unit: int, phase: Phase) -> None:
        """This rank has waited for the gather of a unit and computes with it."""
        if self._gathers:
            self._paths.wanted(self._calls[phase][unit])

    def ahead(self, phase: Phase, depth: int) -> Sequence[int]:
        """The units to gather ahead, nearest first, so that at most `depth` gathers are in flight that this rank needs later."""
        # a copy is gathered where it is used
        return list(takewhile(self._units.__gt__, self._paths.ahead(phase, depth)))

    def pass_begins(self, phase: Phase) -> None:
        """A forward or a backward begins. What was gathered ahead and not used is released."""
        self._paths.forget_launched()
        # between a forward and its backward weights cannot change: the backward would be refused
        if phase is not Phase.BACKWARD:
            self.note_changes()

    def note_changes(self) -> None:
        """Between two passes: note the place if weights have changed since the first gather of the step."""
        if changed := self._changes.take():
            self._paths.weights_changed(changed)

    def forward_ends(self) -> None:
        """A forward of the root is over: take part in the rest of those of other ranks, as far as it is known."""
        if self._gathers:
            for target in self._paths.forward_ends():
                self._gather(target)

    def finish(self, place: Place, combine: Combine | None = None) -> Places:
        """End the step together with all ranks; return where they are. `combine` sends more with the message.

        Raises:
            WorldError: the ranks are in different places, such as the end of a backward and `fsdp.meet`.
            ShardingError: weights have changed between two gathers of a step, and ranks took different paths or changed them at
                different places.
        """
        self.note_changes()
        try:
            places = self._execute(self._paths.finish(place, self._changes.held), combine or self._combine)
        except ChangedWeights as found:
            raise ShardingError(self._describe(found.changed)) from None
        except Mixed as found:
            function = "joined.step()" if Place.STEP in found.places else "fsdp.meet"
            others = "are at a backward's end" if Place.END_OF_BACKWARD in found.places else "have called fsdp.meet"
            raise WorldError(
                f"some ranks have called {function}, and others {others} and would wait for ever; call {function} on every rank, "
                "after the same number of backwards."
            ) from None
        self._changes.end_step()
        self.drain()
        for copied in self._streams.gathered():
            copied.wait()  # passive gathers have read the shards, which may change from now on
        return places

    def drain(self) -> None:
        """Wait for the passive gather in flight, and release its memory. Idempotent."""
        works, self._works = self._works, []
        received, self._received = self._received, []
        try:
            with self._streams.gathering():
                for work in works:
                    work.wait()
        finally:
            self._tracker.add("scratch", -sum(map(size_of, received)))

    def _execute(self, tasks: Tasks, combine: Combine) -> Places:
        result: object = None
        while True:
            try:
                task = tasks.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            result = None
            if isinstance(task, Gather):
                self._gather(task.target)
            elif isinstance(task, Meet):
                result = combine(task.message)
            else:
                result = self._comms.world_comm.gather_objects(task, "the paths of all ranks")

    def _describe(self, changed: Sequence[Sequence[int]]) -> str:
        """What to say of the units that each rank has changed in the middle of a step."""
        unit = min(min(units) for units in changed if units)
        ranks = name_ranks([rank for rank, units in enumerate(changed) if unit in units])
        return (
            f"the weights of unit {self._targets[unit].unit.name!r} were changed on {ranks} in the middle of a step, after a "
            "gather, and the ranks take different paths or change weights at different places. So a rank may have computed with "
            "new weights of some ranks and old ones of others. Change weights right after a backward that reduces gradients, or "
            "right after fsdp.meet on every rank."
        )

    def _gather(self, number: int) -> None:
        """Take part in a gather that this rank does not need.

        Traffic: this rank receives (W - 1) * C elements, as in any gather
        Memory: W * C elements until the next passive gather, or the end of the step
        """
        self.drain()
        self._changes.begin_gather()
        unit, flats, dtype, label = self._targets[number]
        unit.check_shards()
        with self._streams.gathering():
            for flat in flats:
                full, work = flat.launch_copy(flat.shard, dtype or flat.unsharded.dtype, label)
                self._received.append(full)
                self._tracker.add("scratch", size_of(full))
                self._works.append(work)
