"""Which ranks do what together: which ranks shard a unit, and which hold the same shards.

Communicators belong to a unit, and the average of gradients to its root: it is over all ranks of the root, also for a unit that
some of them share alone.

                shard among       hold the same shards
FULL_SHARD      all ranks         each rank alone
HYBRID_SHARD    rows of a mesh    columns of the mesh
NO_SHARD        each rank alone   all ranks
"""

import time
from operator import methodcaller
from typing import Final, NamedTuple
from weakref import ref

from fsdp.comm.communicator import Communicator
from fsdp.comm.failure.desync import is_of_backend
from fsdp.comm.failure.peer_monitor import ROUTED
from fsdp.errors import WorldError
from fsdp.log import LOG

_EPOCH: Final = methodcaller("epoch")
_SEEN_TO_END: Final = 1.0
"""Seconds in which it is known that a process has ended whose connections have broken."""
# The names of communicators in stories and errors. Each is an attribute of CommContext without its "_comm".
SHARD_NAME: Final = "shard"
REDUCE_NAME: Final = "reduce"
REPLICA_NAME: Final = "replica"
WORLD_NAME: Final = "world"
JOINT_NAME: Final = "joint"


def lane_name(name: str, number: int) -> str:
    """The name of a communicator of lane `number`: the first lane has no number."""
    return f"{name} {number}" if number else name


class Lane(NamedTuple):
    """The communicators of one sequence of reductions, which runs beside those of other lanes."""

    shard: Communicator
    """Reduces among the ranks that share the shards of a unit."""
    replicate: Communicator
    """Reduces among the ranks that hold the same shards."""


class CommContext(NamedTuple):
    """The communicators of a root. All-gathers and reductions have different ones, so that neither can reorder the other."""

    shard_comm: Communicator
    """Gathers among the ranks that share the shards of a unit."""
    world_comm: Communicator
    """Connects all ranks. Never one of a lane: how many reductions precede a question to all ranks may differ between ranks."""
    lanes: tuple[Lane, ...]
    """One for each reduction stream."""
    inner: tuple["CommContext", ...] = ()
    """Those of units of the root that share their work with some of its ranks alone, such as experts."""
    across: Communicator | None = None
    """Connects all ranks of all meshes of the root, those of tensor parallelism too; None if there are no others."""
    routed: tuple[Communicator, ...] = ()
    """Those of the other dimensions: tensor, expert and pipeline parallelism. torch calls them, and the engine does not."""

    @property
    def joint(self) -> Communicator:
        """Connects all ranks that have a part of the root. Called between steps alone."""
        return self.world_comm if self.across is None else self.across

    @property
    def reduce_comm(self) -> Communicator:
        """The first lane's communicator among the ranks that share the shards."""
        return self.lanes[0].shard

    @property
    def replica_comm(self) -> Communicator:
        """The first lane's communicator among the ranks that hold the same shards."""
        return self.lanes[0].replicate

    @property
    def size(self) -> int:
        """The number of ranks that train together."""
        return self.reduce_comm.size * self.replica_comm.size

    def same_ranks_as(self, other: "CommContext") -> bool:
        """Whether both connect the same ranks, in the same roles. The number of lanes may differ."""
        mine, others = (one._replace(lanes=one.lanes[:1], inner=(), across=None, routed=()) for one in (self, other))
        return mine == others

    def lane(self, number: int) -> Lane:
        """The communicators of lane `number` of the root."""
        return self.lanes[number % len(self.lanes)]

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """Notify all other ranks that this one abandons a step."""
        # as text: a handler that keeps records would keep the error, and with its traceback the model
        number = (self.world_comm.ranks or (0,))[self.world_comm.rank]
        LOG.warning("rank %d abandons the step in unit %r: %s", number, unit, repr(failure))
        if is_of_backend(failure) and (first_cause := self._find_failed_peer()) is not None:
            failure.add_note(f"fsdp: {first_cause}")  # connections of the user's broke
            failure = first_cause
        for comm in self.each().values():
            comm.abandon(unit, failure)

    def _find_failed_peer(self) -> WorldError | None:
        """The error about a rank whose connections have broken, if that has ended or abandoned the step."""
        end = time.monotonic() + _SEEN_TO_END
        while True:
            found = next((found for comm in self.each().values() if (found := comm.find_failed_peer()) is not None), None)
            if found is not None or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def reconnect(self) -> None:
        """After an abandoned step: wait for the other ranks, and connect to them for the next step."""
        for comm in self.each().values():
            comm.reconnect()

    def join_groups(self) -> None:
        """From now on these groups reconnect together, and what one of them waits for is known to all ranks of the job."""
        monitors = [*dict.fromkeys(comm.monitor for comm in (self.joint, *self.each().values()) if comm.monitor is not None)]
        for monitor in monitors if len(monitors) > 1 or self.routed else ():
            monitor.joined = [*map(ref, monitors)]

    def completed(self) -> None:
        """Count a backward that ended without an error."""
        for comm in self._beside_lanes().union(*self.lanes):
            comm.completed()

    def epoch(self) -> int:
        """A number that increases with every abandoned step of any model on these communicators."""
        return sum(map(_EPOCH, self._beside_lanes()))

    def _beside_lanes(self) -> "set[Communicator | CommContext]":
        """Every communicator once, but those of the lanes; those of some ranks alone as contexts."""
        return {self.shard_comm, self.world_comm, self.across or self.world_comm, *self.routed, *self.inner}

    def each(self) -> dict[str, Communicator]:
        """Every communicator once, by its first name."""
        found: dict[str, Communicator] = {SHARD_NAME: self.shard_comm}
        for number, lane in enumerate(self.lanes):
            found |= {lane_name(REDUCE_NAME, number): lane.shard, lane_name(REPLICA_NAME, number): lane.replicate}
        found[WORLD_NAME] = self.world_comm
        if self.across is not None:
            found[JOINT_NAME] = self.across
        found |= {lane_name(ROUTED, number): comm for number, comm in enumerate(self.routed)}
        for number, one in enumerate(self.inner):
            found |= {f"inner {lane_name(name, number)}": comm for name, comm in one.each().items()}
        first = {comm: name for name, comm in reversed(found.items())}
        return {name: comm for name, comm in found.items() if first[comm] == name}
