"""Which ranks have data left, where some have none (`fsdp.join`): the message of both joins.

[Note: gradients of ranks without data]
A rank without data takes part in backwards and steps, so its gradients follow those of the others. It does not see what the
others do with theirs outside the function that steps. So the message says of each sharded parameter whether a rank with data has
a gradient, and a rank without data drops those that the others have set to None. Other changes cannot be repeated, and are
refused; zeros on all ranks are alike before a forward or backward. `.grad` exists on all ranks alike, also where a rank holds no
element of a parameter, except of a plain shard. If no rank with data can have a gradient of a parameter, it is dropped if all
others are. Before a step that means: if they were set to None since the backward. It may be the only parameter that is trained.
"""

import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.errors import ShardingError, name_ranks
from fsdp.runtime.engine import Engine
from fsdp.shards.shard_tensor import plain, quick_attributes


class Operation(IntEnum):
    """The next operation of a rank with data, as it is announced."""

    TRAINS = 0
    EVALUATES = 1
    REDUCES = 2
    KEEPS = 3
    STEPS = 4


class ShardGrads(IntEnum):
    """What earlier steps have left in `.grad` of the shards of a rank."""

    NONE = 0
    REMOVED = 1
    """There is none, and some were set to None since the last backward or step."""
    ZEROS = 2
    VALUES = 3

    @staticmethod
    def of(gradients: Sequence[Tensor | None], were_removed: bool) -> "ShardGrads":
        """Look at the gradients of all shards of a rank, up to the first one that is not zero."""
        # one without elements says nothing
        found = [one for one in gradients if one is not None and (one.is_sparse or plain(one).numel())]
        if not found:
            return ShardGrads.REMOVED if were_removed else ShardGrads.NONE
        values = (one._values() if one.is_sparse else plain(one) for one in found)
        return ShardGrads.VALUES if any(bool(one.any()) for one in values if one.numel()) else ShardGrads.ZEROS


class RankState(NamedTuple):
    """What a rank says of itself: a byte each."""

    has_data: int
    is_joined: int
    """Whether it is inside `fsdp.join`."""
    changed_grads: int
    """Whether its gradients were changed outside a backward and the function that steps, other than set to None."""
    shard_grads: int
    """A `ShardGrads`."""
    operation: int
    """The `Operation` that it does next, if ranks announce that."""


class DataLeft(NamedTuple):
    """What all ranks have said."""

    states: Sequence[RankState]
    """For each rank."""
    of_params: Sequence[int]
    """For each sharded parameter, the largest of its bytes."""

    @property
    def ranks(self) -> list[int]:
        """Those that have data left."""
        return [rank for rank, state in enumerate(self.states) if state.has_data]

    @property
    def finished(self) -> list[int]:
        """Those that have none."""
        return [rank for rank, state in enumerate(self.states) if not state.has_data]

    def keeps_grads(self, comes: Operation) -> list[bool]:
        """For each sharded parameter, whether ranks without data keep their gradient. See the note above."""
        were_removed = any(self.states[rank].shard_grads == ShardGrads.REMOVED for rank in self.ranks)
        unknown_are_kept = _SOME in self.of_params or (comes is Operation.STEPS and not were_removed)
        return [unknown_are_kept if one == _UNKNOWN else one == _SOME for one in self.of_params]

    def refuse_changes(self, comes: Operation) -> None:
        """Refuse changes of gradients outside the step that a rank without data cannot know.

        A change through `.data` is not noticed by itself. If all gradients are zeros before a backward, it was one.

        Raises:
            ShardingError: there are such changes, and ranks without data.
        """
        keeping = [rank for rank, state in enumerate(self.states) if state.shard_grads == ShardGrads.VALUES]
        changed = [rank for rank in self.ranks if self.states[rank].changed_grads]
        if self.finished and changed and (keeping or comes is Operation.STEPS):
            raise ShardingError(
                f"inside fsdp.join, gradients were changed outside the function that steps on {name_ranks(changed)}, and so "
                f"not on {name_ranks(self.finished)}, where no data is left: change them in that function, or set them to None."
            )
        of_data = max(self.states[rank].shard_grads for rank in self.ranks)
        if comes in (Operation.REDUCES, Operation.KEEPS) and keeping and of_data == ShardGrads.ZEROS:
            raise ShardingError(
                f"inside fsdp.join, gradients are zeros on the ranks that have data left, and not on {name_ranks(keeping)}, "
                "which cannot know of it: call zero_grad() without set_to_none=False, or zero them in the function that steps."
            )


class GradVersions:
    """The gradients of the shards of a rank as they were when they were last remembered."""

    def __init__(self, gradients: Sequence[Tensor | None]) -> None:
        self.remember(gradients)

    def remember(self, gradients: Sequence[Tensor | None]) -> None:
        """Compare with these gradients from now on."""
        with quick_attributes():
            # not the id, which may be that of a new gradient later
            self._known = [None if one is None else (weakref.ref(one), one._version) for one in gradients]

    def have_changed(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether any of these gradients has changed, but for those that are None."""
        with quick_attributes():
            return any(
                one is not None and (before is None or before[0]() is not one or before[1] != one._version)
                for one, before in zip(gradients, self._known, strict=True)
            )

    def were_removed(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether any of these gradients is None now, and was not."""
        return any(one is None and before is not None for one, before in zip(gradients, self._known, strict=True))


_UNKNOWN, _NONE, _SOME = 0, 1, 2
"""The byte of a parameter: of the ranks with data, none can have a gradient; none has one; some rank has one."""


def exchange_data_left(engine: Engine, *, has_data: bool, known_grads: GradVersions | None, operation: int = 0) -> DataLeft:
    """Exchange what the ranks say of themselves, and which gradients they have.

    `known_grads`: those of this rank after its last backward or step inside a join; None outside of one.

    Traffic: an all-reduce of five bytes a rank and one byte a sharded parameter.
    """
    comm, gradients = engine.comms.world_comm, engine.reducer.shard_grads
    changed = known_grads is not None and known_grads.have_changed(gradients)
    removed = known_grads is not None and known_grads.were_removed(gradients)
    state = RankState(has_data, known_grads is not None, changed, ShardGrads.of(gradients, removed), operation)
    message = [value if rank == comm.rank else 0 for rank in range(comm.size) for value in state]
    message += [
        _UNKNOWN if not (has_data and can) else _NONE if one is None else _SOME
        for can, one in zip(engine.reducer.can_have_shard_grads, gradients, strict=True)
    ]
    combined = torch.tensor(message, dtype=torch.uint8, device=engine.units[0].device)
    comm.all_reduce(combined, "max", "who has data left").wait()
    values, end = combined.tolist(), comm.size * len(state)
    return DataLeft([RankState(*values[place : place + len(state)]) for place in range(0, end, len(state))], values[end:])
