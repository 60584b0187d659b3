"""Groups as drop-in modules give them to the engine: a group that torch does not know, and one group for the same ranks."""

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp.comm.open_communicators import SINGLE_RANK

_first_of: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""The first group that was given for some ranks, by the default group."""


class PlainGroup:
    """The group of all ranks inside `fsdp.simulate`, or that of one rank alone. torch knows nothing of it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size


def shared_group(group: Any) -> Any:
    """What the engine is given for `group`: the first one of the same ranks. Wrappers nested in each other must use one."""
    if group.size() == 1:
        return SINGLE_RANK
    if not isinstance(group, dist.ProcessGroup):
        return None
    known = _first_of.setdefault(c10d._get_default_group(), {})
    return known.setdefault(tuple(dist.get_process_group_ranks(group)), group)
