"""Which ranks have data left, where some have none (`fsdp.join`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError, name_ranks


class DataLeft(NamedTuple):
    """The ranks at the end of a backward, of which some have no data left."""

    ranks: Sequence[int]
    """Those that have data left."""
    cleared: bool
    """Whether these have set all gradients to None."""


OnDataLeft = Callable[[DataLeft], None]
_HAS, _CLEARED, _JOINS = 1, 2, 4


def count_data_left(
    gradients: Sequence[Tensor], comm: Communicator, has_data: bool, joins: bool, device: torch.device
) -> DataLeft:
    """Exchange which ranks have data left. `joins`: this rank is inside `fsdp.join`.

    `gradients`: those of this rank's shards, as earlier steps left them.

    Traffic: an all-reduce of one byte a rank, in a backward that some rank ends without data.

    Raises:
        ShardingError: a rank is not inside `fsdp.join`.
    """
    message = torch.zeros(comm.size, dtype=torch.uint8, device=device)
    message[comm.rank] = _HAS * has_data + _CLEARED * (not gradients) + _JOINS * joins
    comm.all_reduce(message, "max", "who has data left").wait()
    found = message.tolist()
    outside = [rank for rank, flags in enumerate(found) if not flags & _JOINS]
    if outside:
        raise ShardingError(
            f"a rank has no data left and waits at the end of fsdp.join, and {name_ranks(outside)} ended a backward outside of "
            "it; train inside fsdp.join on every rank."
        )
    ranks = [rank for rank, flags in enumerate(found) if flags & _HAS]
    return DataLeft(ranks, all(found[rank] & _CLEARED for rank in ranks))
