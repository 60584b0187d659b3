"""Which ranks have data left, where some have none (`fsdp.join`)."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError, name_ranks
from fsdp.shards.shard_tensor import plain


class DataLeft(NamedTuple):
    """The ranks at the end of a backward, of which some have no data left."""

    ranks: Sequence[int]
    """Those that have data left."""
    cleared: bool
    """Whether these have set all gradients to None."""


class ShardGrads(IntEnum):
    """What earlier steps have left in `.grad` of the shards of a rank."""

    NONE = 0
    ZEROS = 1
    VALUES = 2


def refuse_zeroed(found: Sequence[ShardGrads], has_data: Sequence[bool]) -> None:
    """Before a backward: refuse gradients that were zeroed in place, which a rank without data can not know.

    Gradients that are None on all ranks with data become None on the others. Zeros may be the gradients themselves.

    Raises:
        ShardingError: they are zeros on the ranks that have data left, and not on the others.
    """
    of_data = max(one for one, has in zip(found, has_data, strict=True) if has)
    keeping = [rank for rank, one in enumerate(found) if one is ShardGrads.VALUES and not has_data[rank]]
    if of_data is ShardGrads.ZEROS and keeping:
        raise ShardingError(
            f"inside fsdp.join, gradients are zeros on the ranks that have data left, and not on {name_ranks(keeping)}, which "
            "cannot know of it: call zero_grad() without set_to_none=False, or zero them in the function that steps."
        )


def shard_grads_of(gradients: Sequence[Tensor]) -> ShardGrads:
    """Look at the gradients of all shards of a rank, up to the first one that is not zero."""
    if not gradients:
        return ShardGrads.NONE
    values = (one._values() if one.is_sparse else plain(one) for one in gradients)
    return ShardGrads.VALUES if any(bool(one.any()) for one in values if one.numel()) else ShardGrads.ZEROS


OnDataLeft = Callable[[DataLeft], None]
_HAS, _JOINS, _GRADS = 1, 2, 4


def count_data_left(
    gradients: Sequence[Tensor], comm: Communicator, has_data: bool, joins: bool, device: torch.device
) -> DataLeft:
    """Exchange which ranks have data left. `joins`: this rank is inside `fsdp.join`.

    `gradients`: those of this rank's shards, as earlier steps left them.

    Traffic: an all-reduce of one byte a rank, in a backward that some rank ends without data.

    Raises:
        ShardingError: a rank is not inside `fsdp.join`, or gradients were zeroed in place.
    """
    message = torch.zeros(comm.size, dtype=torch.uint8, device=device)
    message[comm.rank] = _HAS * has_data + _JOINS * joins + _GRADS * shard_grads_of(gradients)
    comm.all_reduce(message, "max", "who has data left").wait()
    found = message.tolist()
    outside = [rank for rank, flags in enumerate(found) if not flags & _JOINS]
    if outside:
        raise ShardingError(
            f"a rank has no data left and waits at the end of fsdp.join, and {name_ranks(outside)} ended a backward outside of "
            "it; train inside fsdp.join on every rank."
        )
    ranks = [rank for rank, flags in enumerate(found) if flags & _HAS]
    left = [ShardGrads(flags // _GRADS) for flags in found]
    refuse_zeroed(left, [bool(flags & _HAS) for flags in found])
    return DataLeft(ranks, all(left[rank] is ShardGrads.NONE for rank in ranks))
