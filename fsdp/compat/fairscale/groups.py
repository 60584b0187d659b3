"""Process groups as fairscale makes and checks them. The engine has communicators of its own over their ranks."""

import weakref
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp.comm.communicator import Communicator
from fsdp.comm.open_communicators import open_comms
from fsdp.comm.simulated import current_rank
from fsdp.compat.shared.plain_group import PlainGroup, shared_group
from fsdp.config import MeshKind
from fsdp.errors import ShardingError

_cached: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The groups made here, by the default group that they belong to."""


class ProcessGroupName(StrEnum):
    """The name of a cached process group."""

    default = "default"
    reduce_scatter = "reduce_scatter"


def get_process_group_cached(name: ProcessGroupName = ProcessGroupName.default, ranks: Sequence[int] | None = None) -> Any:
    """Return the process group of this name over `ranks`, or over all ranks. Communicates the first time.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    here = current_rank()
    if ranks is not None and [*ranks] == [global_rank()]:
        return PlainGroup(0, 1)
    if here is not None and (ranks is None or len(set(ranks)) == here.size):
        return PlainGroup(here.rank, here.size)
    if here is not None:
        raise ShardingError(
            f"get_process_group_cached: inside fsdp.simulate a group has all {here.size} ranks or this one alone, not {ranks!r}."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "get_process_group_cached: torch.distributed is not initialised; call torch.distributed.init_process_group() first."
        )
    key = name, None if ranks is None else tuple(sorted(set(ranks)))
    known = _cached.setdefault(c10d._get_default_group(), {})
    if key not in known:
        known[key] = dist.new_group() if key[1] is None else dist.new_group(list(key[1]), use_local_synchronization=True)
    return known[key]


def reduce_group(given: Any, group: Any) -> Any:
    """The group of `process_group_reduce_scatter`. The engine reduces over a communicator of its own."""
    if isinstance(given, ProcessGroupName):
        wanted = given is ProcessGroupName.reduce_scatter and isinstance(group, dist.ProcessGroup)
        given = get_process_group_cached(given) if wanted else group
    elif not (hasattr(given, "rank") and hasattr(given, "size")):
        raise TypeError(f"process_group_reduce_scatter must be a process group or a ProcessGroupName, not {given!r}.")
    return given if given.size() == group.size() else group


def can_communicate(group: Any) -> bool:
    """Whether the ranks of `group` can communicate. An object with rank() and size() alone cannot, but a single rank need not."""
    return isinstance(group, dist.ProcessGroup | PlainGroup) or (not isinstance(group, str) and group.size() == 1)


def global_rank() -> int:
    """This process's number among all."""
    here = current_rank()
    return here.rank if here is not None else dist.get_rank() if dist.is_initialized() else 0


def all_reduce_max(tensor: Any, group: Any) -> None:
    """Replace `tensor` by the largest value of all ranks of `group`. None: all ranks. A process without a group is alone."""
    if group is not None or dist.is_initialized() or current_rank() is not None:
        open_comms(group, None, MeshKind.SHARD).world_comm.all_reduce(tensor, "max", "found inf").wait()


def comm_of(group: Any) -> Communicator:
    """A communicator of the engine over the ranks of `group`."""
    return open_comms(shared_group(group), None, MeshKind.SHARD).shard_comm
