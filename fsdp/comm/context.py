"""Which ranks do what together: who shards a unit, and who holds the same shards.

                shard among       hold the same shards
FULL_SHARD      all ranks         each rank alone
HYBRID_SHARD    rows of a mesh    columns of the mesh
NO_SHARD        each rank alone   all ranks
"""

import weakref
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from fsdp.comm import simulated
from fsdp.comm.process_group import Alone, Collectives, ProcessGroupCollectives
from fsdp.config import Grouping
from fsdp.errors import ShardingError
from fsdp.failure.peers import Lines
from fsdp.failure.watchdog import Device, DeviceLines


class Lane(NamedTuple):
    """One way for reductions, which do not wait for those on another."""

    reductions: Collectives
    """Among the ranks that share the shards of a unit."""
    replicas: Collectives
    """Among the ranks that hold the same shards."""


class Channels(NamedTuple):
    """Gathers and reductions on groups of their own, so that neither can reorder the other."""

    gathers: Collectives
    """Among the ranks that share the shards of a unit."""
    everyone: Collectives
    """Among all ranks. Not that of the reductions: which of these come before a question to all may differ between ranks."""
    lanes: tuple[Lane, ...]
    """As many as there are reduction streams."""

    @property
    def reductions(self) -> Collectives:
        """Those of the first lane."""
        return self.lanes[0].reductions

    @property
    def replicas(self) -> Collectives:
        """Those of the first lane."""
        return self.lanes[0].replicas

    @property
    def size(self) -> int:
        """How many ranks train together."""
        return self.reductions.size * self.replicas.size

    def same_ranks_as(self, other: "Channels") -> bool:
        """Whether both are between the same ranks, which share the work alike; on how many lanes does not matter."""
        return self._replace(lanes=self.lanes[:1]) == other._replace(lanes=other.lanes[:1])

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """This rank gives up a step: let all the others know."""
        for channel in self.each().values():
            channel.abandon(unit, failure)

    def connect_anew(self) -> None:
        """After an abandoned step: meet the others and be ready for the next one."""
        for channel in self.each().values():
            channel.connect_anew()

    def completed(self) -> None:
        """A backward has ended well."""
        for channel in self.each().values():
            channel.completed()

    def epoch(self) -> int:
        """Grows with every step that is abandoned, by whichever model on these channels."""
        return sum([channel.epoch() for channel in (self.gathers, self.everyone)])

    def each(self) -> dict[str, Collectives]:
        """Every channel once, by name."""
        lanes = [
            (_lane_name(name, number), channel)
            for number, lane in enumerate(self.lanes)
            for name, channel in zip(lane._fields, lane, strict=True)
        ]
        names = {id(channel): name for name, channel in (("everyone", self.everyone), *lanes, ("gathers", self.gathers))}
        found = {"gathers": self.gathers, **dict(lanes), "everyone": self.everyone}
        return {name: channel for name, channel in found.items() if names[id(channel)] == name}


def open_channels(process_group: Any, mesh: Any, grouping: Grouping, lanes: int = 1) -> Channels:
    """The channels of a group: the given one, or a mesh's, or the default group, or the simulated world's.

    Communicates the first time a group or a mesh is seen: groups are made of it.

    Raises:
        ShardingError: none of them exists, both a group and a mesh are given, or the mesh does not fit.
    """
    if process_group is not None and mesh is not None:
        raise ShardingError("process_group and mesh contradict each other; give one of them.")
    shape = isinstance(mesh, tuple | list)
    if mesh is not None and not (shape and grouping is Grouping.HYBRID) and not hasattr(mesh, "get_group"):
        raise ShardingError(
            f"mesh must be a DeviceMesh, or for HYBRID_SHARD the shape (replicas, shards), not {mesh!r}; for other strategies "
            "leave it out to use all ranks."
        )
    if grouping is Grouping.HYBRID:
        if mesh is None:
            raise ShardingError(
                "HYBRID_SHARD needs a mesh: a two-dimensional DeviceMesh or the shape (replicas, shards), whose rows shard a "
                "unit and whose columns hold the same shards."
            )
    elif mesh is not None and mesh.ndim > 1:
        raise ShardingError(
            f"mesh has {mesh.ndim} dimensions; give a one-dimensional one, such as mesh['shard'], or ask for "
            "sharding_strategy='HYBRID_SHARD'."
        )
    world = simulated.current_rank()
    if world is not None:
        return _simulated_channels(world, process_group, mesh, grouping, lanes)
    if grouping is Grouping.HYBRID:
        return _hybrid_channels(mesh, lanes)
    if mesh is not None:
        process_group = mesh.get_group()
    if process_group is None:
        process_group = _default_group()
    gathers = _gathers(process_group)
    found = [_reductions(process_group, number) for number in range(lanes)]
    if grouping is Grouping.REPLICATED:
        return Channels(_alone, gathers, tuple(Lane(_alone, one) for one in found))
    return Channels(gathers, gathers, tuple(Lane(one, _alone) for one in found))


def channel_beside(everyone: Collectives) -> Collectives:
    """A channel to the same ranks, for a thread that must not come between the calls of training.

    Its group is gloo's, which carries what is on the host. Communicates the first time.
    """
    if not isinstance(everyone, ProcessGroupCollectives) or dist.get_backend(everyone.group) == "fake":
        return everyone
    if everyone.group not in _beside:
        ranks = dist.get_process_group_ranks(everyone.group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _beside[everyone.group] = ProcessGroupCollectives(group, "beside", None)
    return _beside[everyone.group]


def _check_shape(shape: tuple[int, ...], ranks: int) -> None:
    """(replicas, shards) of a mesh over `ranks` ranks."""
    if len(shape) != 2 or not all(isinstance(side, int) and side > 0 for side in shape) or prod(shape) != ranks:
        raise ShardingError(f"mesh {shape} does not fit: give (replicas, shards) with a product of {ranks}, the number of ranks.")


def _simulated_channels(
    world: simulated.SimulatedRank, process_group: Any, mesh: Any, grouping: Grouping, lanes: int
) -> Channels:
    if process_group is not None or (mesh is not None and grouping is not Grouping.HYBRID):
        raise ShardingError("process_group and mesh have no meaning inside fsdp.simulate; leave them out.")
    gathers, names = world.channel("gathers"), [_lane_name("reductions", number) for number in range(lanes)]
    if grouping is Grouping.SHARDED:
        return Channels(gathers, gathers, tuple(Lane(world.channel(name), _alone) for name in names))
    if grouping is Grouping.REPLICATED:
        return Channels(_alone, gathers, tuple(Lane(_alone, world.channel(name)) for name in names))
    if not isinstance(mesh, tuple | list):
        raise ShardingError("inside fsdp.simulate there are no meshes; give the shape (replicas, shards) as mesh.")
    _check_shape(tuple(mesh), world.size)
    row, column = divmod(world.rank, mesh[1])
    shards = tuple(range(row * mesh[1], (row + 1) * mesh[1]))
    replicas = tuple(range(column, world.size, mesh[1]))

    def channel(name: str, ranks: tuple[int, ...]) -> Collectives:
        return world.channel(name, ranks) if len(ranks) > 1 else _alone

    columns = [_lane_name("replicas", number) for number in range(lanes)]
    ways = (Lane(channel(name, shards), channel(column, replicas)) for name, column in zip(names, columns, strict=True))
    # a row may be all there is, and what is asked of everyone must not come between its reductions
    return Channels(channel("gathers", shards), world.channel("everyone"), tuple(ways))


def _hybrid_channels(mesh: Any, lanes: int) -> Channels:
    if isinstance(mesh, tuple | list):
        mesh = _mesh(tuple(mesh))
    if mesh.ndim != 2:
        raise ShardingError(f"mesh has {mesh.ndim} dimension; HYBRID_SHARD needs two: replicas, shards.")
    columns, rows = mesh.get_group(0), mesh.get_group(1)
    # a mesh of its own has groups of its own, also where the ranks are those of one on which nobody can go on; and meshes
    # of other ranks may have rows in common
    known, everyone = _flattened.setdefault(rows, weakref.WeakValueDictionary()), tuple(mesh.mesh.flatten().tolist())
    if everyone not in known:
        known[everyone] = dist.new_group(list(everyone), use_local_synchronization=True)
    ways = tuple(Lane(_reductions(rows, number), _reductions(columns, number)) for number in range(lanes))
    return Channels(_gathers(rows), _reductions(known[everyone], 0), ways)


def _mesh(shape: tuple[int, ...]) -> Any:
    """A mesh of that shape over all ranks, made once."""
    world = _default_group()
    _check_shape(shape, dist.get_world_size(world))
    known = _meshes.setdefault(world, {})
    if shape not in known:
        known[shape] = init_device_mesh(world._device_types[0].type, shape)
    return known[shape]


def _default_group() -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ShardingError(
            "No process group and no mesh: call torch.distributed.init_process_group() first and start the "
            "script with torchrun, "
            "or run it inside fsdp.simulate(world_size, fn)."
        )
    return c10d._get_default_group()


# torch owns the groups, and forgets them in destroy_process_group()
_alone = Alone()
_CUDA: Final = torch.device("cuda")
_device: Final = Device()
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Collectives]] = weakref.WeakKeyDictionary()
_lines_of: weakref.WeakKeyDictionary[dist.ProcessGroup, Lines | None] = weakref.WeakKeyDictionary()
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Collectives] = weakref.WeakKeyDictionary()
_Flattened = weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]
_flattened: weakref.WeakKeyDictionary[dist.ProcessGroup, _Flattened] = weakref.WeakKeyDictionary()
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _gathers(group: dist.ProcessGroup) -> Collectives:
    """The channel of the gathers over the ranks of a group."""
    return _channel(group, "gathers", lambda lines: group)


def _reductions(group: dist.ProcessGroup, number: int) -> Collectives:
    """That of a lane of reductions. Whoever asks for it, asks for the gathers as well."""

    def carrier(lines: Lines | None) -> Any:
        # where gloo is all there is, the channels have connections of their own
        if lines is not None and _gloo(group) is not None and not torch.accelerator.is_available():
            return group
        return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)

    return _channel(group, _lane_name("reductions", number), carrier)


def _lane_name(name: str, number: int) -> str:
    return f"{name} {number}" if number else name


def _channel(group: dist.ProcessGroup, name: str, carrier: Callable[[Lines | None], Any]) -> Collectives:
    if dist.get_world_size(group) == 1:
        return _alone
    if group not in _lines_of:
        _lines_of[group] = _lines(group)
    known, lines = _opened.setdefault(group, {}), _lines_of[group]
    if name not in known:
        if lines is not None:
            lines.open(name)
        carries = carrier(lines)
        if isinstance(lines, DeviceLines):
            lines.aborts.append(partial(_abort, weakref.ref(carries)))
        known[name] = ProcessGroupCollectives(carries, name, lines)
    return known[name]


def _abort(reference: "weakref.ref[dist.ProcessGroup]") -> None:
    """End what a group has in flight on its device."""
    group = reference()
    if group is not None:
        group._get_backend(_CUDA).abort()


def _carries_on_device(group: dist.ProcessGroup) -> bool:
    """Whether its collectives on CUDA can be aborted: NCCL's can."""
    if not torch.accelerator.is_available() or not any(device.type == "cuda" for device in group._device_types):
        return False
    return isinstance(group._get_backend(_CUDA), getattr(dist, "ProcessGroupNCCL", ()))


def _gloo(group: dist.ProcessGroup) -> Any:
    """What carries its collectives on the host, if that is gloo."""
    if not any(device.type == "cpu" for device in group._device_types):
        return None
    found = group._get_backend(torch.device("cpu"))
    return found if isinstance(found, getattr(dist, "ProcessGroupGloo", ())) else None


def _lines(group: dist.ProcessGroup) -> Lines | None:
    """What the channels of a real group share."""
    if dist.get_backend(group) == "fake":
        return None
    store, on_device = c10d._get_default_store(), _carries_on_device(group)
    if on_device:
        # another thread asks it, while torch may wait in the one it has
        store = store.clone()  # type: ignore[attr-defined]
    rank, size, gloo = dist.get_rank(group), dist.get_world_size(group), _gloo(group)
    # a group may be given the name of one that was destroyed
    name = f"fsdp/{group.group_name}/{store.add(f'fsdp/{group.group_name}/made by {rank}', 1)}"

    def scope(more: str) -> Any:
        return c10d.PrefixStore(f"{name}/{more}", store)

    def connect(more: str) -> Any:
        return dist.ProcessGroupGloo(scope(f"lines/{more}"), rank, size, gloo.options._timeout)

    ranks = dist.get_process_group_ranks(group)
    how = c10d.PrefixStore(name, store), scope, ranks, rank, None if gloo is None else connect
    lines = DeviceLines(*how, _device) if on_device else Lines(*how)
    # torch owns the group: its threads and ours end with destroy_process_group()
    weakref.finalize(group, lines.close).atexit = False
    return lines
