"""Which ranks have data left, where some have none (`fsdp.join`): the message of both joins.

[Note: gradients that are set to None]
Outside the step of a join only ranks with data set gradients to None. So the message says of each sharded parameter whether a
rank with data has a gradient. A rank without data drops its own gradients of the other parameters. `.grad` exists on all ranks
alike, also where a rank holds no element of a parameter.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError, name_ranks
from fsdp.shards.shard_tensor import plain


class ShardGrads(IntEnum):
    """What earlier steps have left in `.grad` of the shards of a rank."""

    NONE = 0
    ZEROS = 1
    VALUES = 2

    @staticmethod
    def of(gradients: Sequence[Tensor | None]) -> "ShardGrads":
        """Look at the gradients of all shards of a rank, up to the first one that is not zero."""
        found = [one for one in gradients if one is not None]
        if not found:
            return ShardGrads.NONE
        values = (one._values() if one.is_sparse else plain(one) for one in found)
        return ShardGrads.VALUES if any(bool(one.any()) for one in values if one.numel()) else ShardGrads.ZEROS


class DataLeft(NamedTuple):
    """What all ranks have said of themselves."""

    ranks: Sequence[int]
    """Those that have data left."""
    joined: Sequence[bool]
    """For each rank, whether it is inside `fsdp.join`."""
    shard_grads: Sequence[ShardGrads]
    """For each rank."""
    notes: Sequence[int]
    """For each rank, the number that it sent along."""
    has_grad: Sequence[bool]
    """For each sharded parameter, whether a rank with data left has a gradient. See [Note: gradients that are set to None]."""

    def refuse_zeroed(self) -> None:
        """In a backward: refuse gradients that were zeroed in place before, which a rank without data cannot know.

        Zeros may be the gradients themselves, so they cannot be taken over.

        Raises:
            ShardingError: they are zeros on the ranks that have data left, and not on the others.
        """
        keeping = [rank for rank, one in enumerate(self.shard_grads) if one is ShardGrads.VALUES]
        if keeping and max(self.shard_grads[rank] for rank in self.ranks) is ShardGrads.ZEROS:
            raise ShardingError(
                f"inside fsdp.join, gradients are zeros on the ranks that have data left, and not on {name_ranks(keeping)}, "
                "which cannot know of it: call zero_grad() without set_to_none=False, or zero them in the function that steps."
            )


OnDataLeft = Callable[[DataLeft, bool], None]
"""Called with what all ranks have said, and whether they are in a backward."""
_HAS, _JOINS, _GRADS, _NOTE = 1, 2, 4, 16
"""The parts of the byte of a rank, by their lowest bit. `_GRADS` has two bits, `_NOTE` four."""


def exchange_data_left(
    gradients: Sequence[Tensor | None],
    comm: Communicator,
    has_data: bool,
    device: torch.device,
    joins: bool = True,
    note: int = 0,
) -> DataLeft:
    """Exchange which ranks have data left, and which gradients they have.

    `gradients`: those of this rank's shards, as earlier steps left them. `joins`: this rank is inside `fsdp.join`. `note`: a
    number below 16 that is sent along.

    Traffic: an all-reduce of one byte a rank and one byte a sharded parameter.
    """
    message = [0] * comm.size
    message[comm.rank] = _HAS * has_data + _JOINS * joins + _GRADS * ShardGrads.of(gradients) + _NOTE * note
    message += [int(has_data and one is not None) for one in gradients]
    combined = torch.tensor(message, dtype=torch.uint8, device=device)
    comm.all_reduce(combined, "max", "who has data left").wait()
    values = combined.tolist()
    flags = values[: comm.size]
    return DataLeft(
        [rank for rank, one in enumerate(flags) if one & _HAS],
        [bool(one & _JOINS) for one in flags],
        [ShardGrads(one % _NOTE // _GRADS) for one in flags],
        [one // _NOTE for one in flags],
        [value > 0 for value in values[comm.size :]],
    )
