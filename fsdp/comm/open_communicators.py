"""Opens communicators: over process groups, over device meshes, or in a simulated world.

Each process group has a `PeerMonitor`, which all communicators over its ranks share.
"""

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh

from fsdp.comm import simulated
from fsdp.comm.communicator import Communicator
from fsdp.comm.context import JOINT_NAME, REDUCE_NAME, REPLICA_NAME, SHARD_NAME, WORLD_NAME, CommContext, Lane, lane_name
from fsdp.comm.dtensor_mesh import is_part
from fsdp.comm.failure.job_waits import JobWaits
from fsdp.comm.failure.peer_monitor import ROUTED, PeerMonitor, at_end
from fsdp.comm.failure.watchdog import DevicePeerMonitor, DeviceWatchdog
from fsdp.comm.process_group import FORKED, DeviceCommunicator, GlooCommunicator, ProcessGroupCommunicator
from fsdp.comm.routed_group import RoutedCommunicator, RoutedGroup, carrier_of, route
from fsdp.comm.simulated_group import SimulatedGroup
from fsdp.config import MeshKind
from fsdp.errors import ShardingError, require_package

ProcessGroup: TypeAlias = dist.ProcessGroup
Mesh: TypeAlias = DeviceMesh | tuple[int, int]
"""A mesh, or the shape (replicas, shards) of one over all ranks."""
# torch owns the groups, and forgets them in destroy_process_group()
_alone = Communicator()
SINGLE_RANK: Final = object()
"""A process group of this rank alone. It needs no torch.distributed."""
COMPOSABLE_REGISTRY: Final = REGISTRY_KEY
"""The attribute of a module in which torch's composable functions, such as its `fully_shard`, record themselves."""
_CUDA: Final = torch.device("cuda")
_watchdog: Final = DeviceWatchdog()
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()
_peers_of: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMonitor | None] = weakref.WeakKeyDictionary()
_of_parent: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The default group of the process that this one is a fork of, whose rank does not end with the fork."""
_routed: weakref.WeakKeyDictionary[dist.ProcessGroup, RoutedGroup] = weakref.WeakKeyDictionary()
_abortable: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The user's groups that are aborted together with communicators."""
_background: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
_Made = weakref.WeakValueDictionary[tuple[tuple[int, ...], tuple[int, ...]], dist.ProcessGroup]
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()
"""The groups that `_group_of` has made."""


def place_in_job() -> tuple[int, int]:
    """The number of this rank among all processes of the job, or all simulated ranks, and how many these are."""
    if (here := simulated.current_rank()) is not None:
        return here.rank, here.size
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def open_comms(process_group: Any, mesh: Any, mesh_kind: MeshKind, lanes: int = 1) -> CommContext:
    """Open the communicators over a group: the given one, a mesh's, the default one, or that of the simulated world.

    Communicates the first time it gets a group or a mesh, because it makes process groups of it.

    Raises:
        ShardingError: there is no group, both a group and a mesh are given, or the mesh does not fit.
    """
    if process_group is not None and mesh is not None:
        raise ShardingError("process_group and mesh contradict each other; give one of them.")
    if process_group is not None and process_group is not SINGLE_RANK and not isinstance(process_group, dist.ProcessGroup):
        raise ShardingError(
            f"process_group must be a process group of torch.distributed that has this rank, not {process_group!r}."
        )
    shape = isinstance(mesh, tuple | list)
    if mesh is not None and not (shape and mesh_kind is MeshKind.HYBRID) and not hasattr(mesh, "get_group"):
        raise ShardingError(
            f"mesh must be a DeviceMesh, or for HYBRID_SHARD the shape (replicas, shards), not {mesh!r}; for other strategies "
            "leave it out to use all ranks."
        )
    if mesh_kind is MeshKind.HYBRID:
        if mesh is None:
            raise ShardingError(
                "HYBRID_SHARD needs a mesh: a two-dimensional DeviceMesh or the shape (replicas, shards), whose rows shard a "
                "unit and whose columns hold the same shards."
            )
        if not shape and mesh.ndim != 2:
            raise ShardingError(f"mesh has {mesh.ndim} dimension; HYBRID_SHARD needs two: replicas, shards.")
    elif mesh is not None and mesh.ndim > 1:
        raise ShardingError(
            f"mesh has {mesh.ndim} dimensions; give a one-dimensional one, such as mesh['shard'], or ask for "
            "sharding_strategy='HYBRID_SHARD'."
        )
    here = simulated.current_rank()
    find = _process_groups if here is None else partial(_simulated_ranks, here)
    is_alone = process_group is SINGLE_RANK
    shards, replicas, world = (None, None, None) if is_alone else find(process_group, mesh, mesh_kind)

    def comm(name: str, among: Any, apart: bool = True) -> Communicator:
        if among is None:
            return _alone
        return _comm(among, name, apart) if here is None else here.comm(name, among)

    # in a mesh not the row's, even if there is only one row: questions to all ranks must not come between its reductions
    is_mesh = mesh_kind is MeshKind.HYBRID
    of_replicas, of_world = (REPLICA_NAME, WORLD_NAME) if is_mesh else (REDUCE_NAME, SHARD_NAME)

    def lane(number: int) -> Lane:
        return Lane(comm(lane_name(REDUCE_NAME, number), shards), comm(lane_name(of_replicas, number), replicas))

    gathers, of_all = comm(SHARD_NAME, shards, apart=False), comm(of_world, world, apart=is_mesh)
    return CommContext(gathers, of_all, tuple(map(lane, range(lanes))))


def open_across(mesh: Any, comms: CommContext, ranks: tuple[int, ...]) -> CommContext:
    """`comms` over `mesh`, with a communicator among `ranks` besides, if they are more. Communicates.

    `ranks`: as this rank sees it. If some rank sees more of them, all of them meet, to compare what they are about to build.
    """
    if is_part(mesh):
        ranks = tuple(sorted({one for seen in comms.world_comm.gather_objects(ranks, "fully_shard") for one in seen}))
    if set(ranks) <= set(comms.world_comm.ranks) or len(ranks) < 2:
        return comms
    here = simulated.current_rank()
    if here is not None:
        return comms._replace(across=here.comm(JOINT_NAME, ranks))
    return comms._replace(across=_comm(_group_of(mesh.get_group(mesh.ndim - 1), ranks), JOINT_NAME, apart=True))


def open_routed(group: dist.ProcessGroup | None, comms: CommContext) -> tuple[Any, CommContext]:
    """Pass failures on to a group of the user, of another dimension (None: the default one). Communicates the first time.

    Over gloo the group is routed (routed_group.py). A group of a device is aborted together with the communicators of `comms`.
    Returns what stands for the group from now on, and `comms` with it.
    """
    one = _routed_group(group or _default_group())
    if isinstance(one, RoutedGroup | SimulatedGroup):
        comms = comms._replace(routed=tuple(dict.fromkeys((*comms.routed, one.comm))))
        one.beside.update(comms.each().values())
        return one, comms
    peers = comms.joint.monitor
    if isinstance(peers, DevicePeerMonitor) and _carries_on_device(one):
        peers.counts_all = False
        if one not in _abortable:
            _abortable.add(one)
            peers.aborts.append(partial(_abort, weakref.ref(one)))
    return group, comms


def _routed_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that stands for `group`: itself, if it cannot be routed."""
    if isinstance(group, RoutedGroup | SimulatedGroup) or dist.get_world_size(group) == 1 or not _is_of_gloo(group):
        return group
    if group not in _routed:
        comm = _comm(group, ROUTED)
        assert isinstance(comm, RoutedCommunicator)
        _routed[group] = route(group, comm)
    return _routed[group]


def background_comm(world_comm: Communicator) -> Communicator:
    """Return a communicator among the same ranks, for a thread whose collectives must not come between those of training.

    It is over gloo, for tensors on the host. Communicates the first time.
    """
    if not isinstance(world_comm, ProcessGroupCommunicator) or dist.get_backend(world_comm.group) == "fake":
        return world_comm
    if world_comm.group not in _background:
        ranks = dist.get_process_group_ranks(world_comm.group)
        world_comm.gather_objects(None, "save with async_")  # new_group does not ask whether the others will come
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _background[world_comm.group] = _comm(group, "background")
    return _background[world_comm.group]


def _row_and_column(shape: Sequence[int], rank: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of the row and of the column of `rank` in a mesh of this shape, (replicas, shards), over `ranks` ranks.

    Raises:
        ShardingError: the shape is no such shape.
    """
    if len(shape) != 2 or not all(isinstance(side, int) and side > 0 for side in shape) or prod(shape) != ranks:
        raise ShardingError(
            f"mesh {tuple(shape)} does not fit: give (replicas, shards) with a product of {ranks}, the number of ranks."
        )
    row, column = divmod(rank, shape[1])
    return tuple(range(row * shape[1], (row + 1) * shape[1])), tuple(range(column, ranks, shape[1]))


def _simulated_ranks(here: simulated.SimulatedRank, process_group: Any, mesh: Any, mesh_kind: MeshKind) -> tuple[Any, Any, Any]:
    """The ranks that share the shards of this one, those that hold the same shards, and all. None: this rank alone."""
    if mesh_kind is not MeshKind.HYBRID:
        group = mesh.get_group() if mesh is not None else process_group
        ranks = tuple(range(here.size)) if group is None else tuple(dist.get_process_group_ranks(group))
        return (ranks, None, ranks) if mesh_kind is MeshKind.SHARD else (None, ranks, ranks)
    if isinstance(mesh, tuple | list):
        shards, replicas = _row_and_column(mesh, here.rank, here.size)
        world = tuple(range(here.size))
    else:
        replicas, shards = (tuple(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in (0, 1))
        world = tuple(mesh.mesh.flatten().tolist())
    return shards if len(shards) > 1 else None, replicas if len(replicas) > 1 else None, world


def _process_groups(process_group: Any, mesh: Any, mesh_kind: MeshKind) -> tuple[Any, Any, Any]:
    """The groups of the ranks that share the shards of this one, of those that hold the same shards, and of all. None: alone."""
    if dist.is_initialized() and c10d._get_default_group() in _of_parent:
        raise ShardingError(FORKED)
    if mesh_kind is not MeshKind.HYBRID:
        group = mesh.get_group() if mesh is not None else process_group or _default_group()
        return (group, None, group) if mesh_kind is MeshKind.SHARD else (None, group, group)
    if isinstance(mesh, tuple | list):
        world, shape = _default_group(), tuple(mesh)
        members = _row_and_column(shape, dist.get_rank(world), dist.get_world_size(world))
        replicas, shards = (_group_of(world, ranks, shape) for ranks in reversed(members))
        return shards, replicas, _group_of(shards, tuple(range(dist.get_world_size())))
    return mesh.get_group(1), mesh.get_group(0), _group_of(mesh.get_group(1), tuple(mesh.mesh.flatten().tolist()))


def _group_of(row: dist.ProcessGroup, ranks: tuple[int, ...], shape: tuple[int, ...] = ()) -> dist.ProcessGroup:
    """A group of all `ranks` of a mesh that has this row, or of a row or column in a mesh of this shape. The first call makes it.

    Every mesh has groups of its own, even if another mesh has the same ranks: the other one's groups may be unusable after a
    failure. The key is the row and all ranks, because meshes over different ranks may have a row in common. For a shape `row` is
    the default group, which the group is made like, without a DeviceMesh: that makes a device of its type the current one, but a
    group may know types that this machine lacks. gloo's first type is "cuda" everywhere.
    """
    known = _made.setdefault(row, weakref.WeakValueDictionary())
    if (shape, ranks) not in known:
        if shape or len(ranks) == dist.get_world_size():
            _meet(_default_group())
        known[shape, ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return known[shape, ranks]


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ShardingError(
            "No process group and no mesh: call torch.distributed.init_process_group() first and start the "
            "script with torchrun, "
            "or run it inside fsdp.simulate(world_size, fn)."
        )
    return c10d._get_default_group()


def _comm(group: dist.ProcessGroup, name: str, apart: bool = False) -> Communicator:
    """The communicator of that name over the ranks of a group. The first call opens it.

    `apart`: its collectives come in no order with those of others over these ranks.
    """
    if dist.get_world_size(group) == 1:
        return _alone
    require_package("A process group of several ranks", "numpy")  # torch sends and receives objects with it
    known, peers = _opened.setdefault(group, {}), _peers_in(group)
    if name not in known:
        if peers is not None:
            peers.meet()
            peers.open(name)
        carries = _group_apart(group, peers) if apart else group
        if isinstance(peers, DevicePeerMonitor):
            peers.aborts.append(partial(_abort, weakref.ref(carries)))
        known[name] = _open(group, carries, name, peers)
    return known[name]


def _group_apart(group: dist.ProcessGroup, peers: PeerMonitor | None) -> Any:
    """A group over the same ranks, for a communicator whose collectives come in no order with those of others."""
    # with gloo alone, communicators have connections of their own and need no group of their own
    if peers is not None and _gloo(group) is not None and not torch.accelerator.is_available():
        return group
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def _open(group: dist.ProcessGroup, carries: dist.ProcessGroup, name: str, peers: PeerMonitor | None) -> Communicator:
    if name == ROUTED and peers is not None:
        return RoutedCommunicator(group, peers)
    kinds = [device.type for device in group._device_types]
    if kinds and "cpu" not in kinds:
        return DeviceCommunicator(carries, name, peers)
    if peers is None or _gloo(group) is None:
        return ProcessGroupCommunicator(carries, name, peers)
    return GlooCommunicator(carries, name, peers)


def _peers_in(group: dist.ProcessGroup) -> PeerMonitor | None:
    """The monitor that all communicators over the ranks of a group share. The first call makes it. Does not wait for others."""
    if group not in _peers_of:
        _peers_of[group] = _peers(group)
    return _peers_of[group]


def _meet(group: dist.ProcessGroup) -> None:
    if (peers := _peers_in(group)) is not None:
        peers.meet()


def _on_exit() -> None:
    """Write for ranks that wrap a module, and wait for this one, that this process ends without having wrapped any."""
    if not dist.is_initialized():
        return
    group = c10d._get_default_group()
    if group not in _peers_of and group not in _of_parent and dist.get_backend(group) != "fake":
        with suppress(RuntimeError):  # the store may have gone
            PeerMonitor(*_in_store(group, c10d._get_default_store()), None).on_exit()


def _record_failure() -> None:
    """Give torchrun, for its summary of the job, the exception that ends this process, as torch's decorator `record` does."""
    # the interpreter keeps the exception that ends it
    failure, file = getattr(sys, "last_value", None), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not isinstance(failure, Exception) or file is None or os.path.exists(file):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise failure
    except Exception:
        get_error_handler().record_exception(failure)


def _after_fork() -> None:
    if dist.is_initialized():
        _of_parent.add(c10d._get_default_group())


at_end(_on_exit)
at_end(_record_failure)
os.register_at_fork(after_in_child=_after_fork)


def _abort(reference: "weakref.ref[dist.ProcessGroup]") -> None:
    if (group := reference()) is not None:
        group._get_backend(_CUDA).abort()


def _carries_on_device(group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives on CUDA can be aborted, as NCCL's can."""
    is_on_device = torch.accelerator.is_available() and any(device.type == _CUDA.type for device in group._device_types)
    return is_on_device and "nccl" in group._get_backend(_CUDA).name()  # since torch 2.15 "nccl2", which is another class


def _gloo(group: dist.ProcessGroup) -> Any:
    """The group's backend for the host if it is gloo, else None."""
    if not any(device.type == "cpu" for device in group._device_types):
        return None
    found = group._get_backend(torch.device("cpu"))
    return found if isinstance(found, getattr(dist, "ProcessGroupGloo", ())) else None


def _is_of_gloo(group: dist.ProcessGroup) -> bool:
    """Whether all tensors are communicated by gloo."""
    return _gloo(group) is not None and len({id(group._get_backend(device)) for device in group._device_types}) == 1


def _peers(group: dist.ProcessGroup) -> PeerMonitor | None:
    if dist.get_backend(group) == "fake":
        return None
    store, on_device = c10d._get_default_store(), _carries_on_device(group)
    if on_device:
        # the watchdog's thread uses the store while torch may wait in its own connection to it
        store = store.clone()  # type: ignore[attr-defined]
    size, gloo = dist.get_world_size(group), _gloo(group)
    time_out = (group._get_backend(_CUDA) if gloo is None else gloo).options._timeout
    place = _in_store(group, store)
    _, scope, _, rank = place
    devices = group._device_types

    def connect(more: str) -> Any:
        connected = dist.ProcessGroupGloo(scope(f"connections/{more}"), rank, size, time_out)
        return carrier_of(connected, devices) if more.endswith(f"/{ROUTED}") else connected

    args, limit = (*place, None if gloo is None else connect), time_out.total_seconds()
    peers = DevicePeerMonitor(_watchdog, *args, limit) if on_device else PeerMonitor(*args, limit)
    peers.group = group.group_name
    peers.job = JobWaits(c10d.PrefixStore("fsdp/waits of the job", store), dist.get_rank())
    # torch owns the group: its threads and the monitor's end with destroy_process_group()
    weakref.finalize(group, peers.close).atexit = False
    return peers


def _in_store(group: dist.ProcessGroup, store: Any) -> tuple[Any, Callable[[str], Any], list[int], int]:
    """The place of a group in the store, as a monitor takes it: keys of its own, parts of them, all ranks, this rank."""
    rank = dist.get_rank(group)
    # a group may have the name of one that was destroyed
    name = f"fsdp/{group.group_name}/{store.add(f'fsdp/{group.group_name}/made by {rank}', 1)}"

    def scope(more: str) -> Any:
        return c10d.PrefixStore(f"{name}/{more}", store)

    return c10d.PrefixStore(name, store), scope, dist.get_process_group_ranks(group), rank
