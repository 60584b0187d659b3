"""Allocate and release the memory of a buffer, and know how much is held. The only file that does either.

Releasing resizes the storage to nothing and keeps every tensor: autograd's saved tensors, also
derived ones such as `weight.t()`, share the storage and come alive again when it is filled in the
backward.
"""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from fsdp.errors import ShardingError


@dataclass(slots=True)
class Ledger:
    """Bytes the engine holds on this rank, by kind: shards, whole, bucket, scratch, reduced, kept, lent.

    `.grad` is the user's, and its memory, which replicas on the host keep for the next backward, is not in the books.
    """

    held: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    now: int = 0

    def add(self, kind: str, count: int) -> None:
        """Note `count` bytes taken (or, when negative, given back)."""
        self.held[kind] = self.held.get(kind, 0) + count
        self.now += count
        if self.now > self.peak:
            self.peak = self.now


_SHARED: Final = {
    "whole": ("whole parameters", "weight.detach()"),
    "bucket": ("a bucket of gradients", "bucket.buffer()"),
}
"""By kind of memory: what it is, and what a user has of it."""


class Memory:
    """The memory of one permanent buffer, which comes and goes while the buffer and every view of it stay.

    Released from the beginning. With `stays`, it comes once and does not go.
    """

    __slots__ = ("_held", "_kind", "_size", "_stays", "_storage")

    def __init__(self, buffer: Tensor, kind: str, stays: bool = False) -> None:
        self._storage = buffer.untyped_storage()
        self._size = size_of(buffer)
        self._kind = kind
        self._stays = stays
        self._storage.resize_(0)
        self._held = False

    def allocate(self, ledger: Ledger) -> None:
        """Have memory; its content is undefined. Idempotent."""
        if not self._held:
            self._storage.resize_(self._size)
            self._held = True
            ledger.add(self._kind, self._size)

    def release(self, ledger: Ledger) -> bool:
        """Give the memory back, unless it stays; return whether there was any. Idempotent.

        Raises:
            ShardingError: it is shared with something that torch does not know.
        """
        if not self._held or self._stays:
            return False
        try:
            self._storage.resize_(0)
        except RuntimeError as reason:
            whose, made = _SHARED[self._kind]
            raise ShardingError(
                f"the memory of {whose} cannot be given back: something outside torch shares it, such as an array made by "
                f"{made}.numpy(); make it of a copy, {made}.clone().numpy(), and the model anew."
            ) from reason
        self._held = False
        ledger.add(self._kind, -self._size)
        return True


class Spare:
    """Memory of one size that is given out again as soon as nobody has any of it.

    For what would else be asked of the system, and cleared by it page by page, in every step.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, count: int, like: Tensor) -> Tensor:
        """(count,), always the same number, undefined, of the dtype and on the device of `like`."""
        if self._memory is None:
            self._memory = like.new_empty(count)
        elif torch._C._storage_Use_Count(self._memory.untyped_storage()._cdata) > _OURS:
            return like.new_empty(count)
        return self._memory.view(count)


_OURS: Final = 2
"""The tensor that is kept, and the storage that is asked."""


class Borrowed:
    """The memory of a buffer that is somebody else's, and always there."""

    __slots__ = ()

    def allocate(self, ledger: Ledger) -> None:
        """It has memory."""

    def release(self, ledger: Ledger) -> bool:
        """It is not ours to give back."""
        return False


def size_of(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; of a sparse one, of what it has."""
    if tensor.is_sparse:
        return size_of(tensor._indices()) + size_of(tensor._values())
    return tensor.numel() * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """The same for two tensors exactly when they share their memory, allocated or not."""
    return int(tensor.untyped_storage()._cdata)
