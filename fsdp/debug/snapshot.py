"""A picture of one engine at one moment, as plain data. Error notes, the dump and `fsdp.story` print it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp.comm.context import CommContext
from fsdp.comm.failure.pending_call import Wait
from fsdp.device.storage import MemoryTracker
from fsdp.params.unit import Unit
from state_machine import BackwardState, Event, ResidencyState, Root, State


@dataclass(frozen=True, slots=True)
class UnitSnapshot:
    """One unit in a snapshot."""

    name: str
    state: State
    residency: ResidencyState
    events: tuple[Event, ...]
    """The last events of the unit, oldest first."""

    @property
    def at_rest(self) -> bool:
        """Whether the unit is IDLE and holds its shards only."""
        return self.state is State.IDLE and self.residency is ResidencyState.SHARDED


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The units, the communicators and the memory of one engine at one moment. It holds no tensor and no engine."""

    rank: int
    """Among all processes of the job, as in errors about ranks."""
    world_size: int
    backward: BackwardState
    bytes_held: Mapping[str, int]
    """Bytes by kind of memory."""
    collectives: Mapping[str, tuple[str, ...]]
    """The last collectives of each communicator of more than one rank, oldest first."""
    waits: tuple[Wait, ...]
    """The waits of this rank that are long, one for each communicator on which it waits."""
    units: tuple[UnitSnapshot, ...]
    """Every unit, outermost first."""


def take_snapshot(
    place_in_job: tuple[int, int],
    units: Sequence[Unit],
    root: Root,
    residencies: Sequence[ResidencyState],
    comms: CommContext,
    tracker: MemoryTracker,
) -> EngineSnapshot:
    """The snapshot of an engine that has these parts. Communicates nothing and changes nothing."""
    rank, world_size = place_in_job
    return EngineSnapshot(
        rank=rank,
        world_size=world_size,
        backward=root.backward,
        bytes_held=dict(tracker.held),
        collectives={name: tuple(comm.recent()) for name, comm in comms.each().items() if comm.size > 1},
        waits=tuple(wait for comm in comms.each().values() if (wait := comm.waits()) is not None),
        units=tuple(
            UnitSnapshot(unit.name, lifecycle.state, residency, lifecycle.story)
            for unit, lifecycle, residency in zip(units, root.lifecycles, residencies, strict=True)
        ),
    )
