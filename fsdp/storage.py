"""Allocate and release the memory of a buffer, and know how much is held. The only file that does either.

Releasing resizes the storage to nothing and keeps every tensor: autograd's saved tensors, also
derived ones such as `weight.t()`, share the storage and come alive again when it is filled in the
backward.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Ledger:
    """Bytes the engine holds on this rank, by kind: shards, whole, bucket, scratch, reduced, lent."""

    held: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    now: int = 0

    def add(self, kind: str, count: int) -> None:
        """Note `count` bytes taken (or, when negative, given back)."""
        self.held[kind] = self.held.get(kind, 0) + count
        self.now += count
        if self.now > self.peak:
            self.peak = self.now


def allocate(buffer: Tensor, ledger: Ledger, kind: str) -> None:
    """Give `buffer` its memory; the content is undefined. Idempotent."""
    storage = buffer.untyped_storage()
    size = buffer.numel() * buffer.element_size()
    if storage.size() != size:
        storage.resize_(size)
        ledger.add(kind, size)


def release(buffer: Tensor, ledger: Ledger, kind: str) -> None:
    """Give the memory of `buffer` back. Idempotent."""
    storage = buffer.untyped_storage()
    size = storage.size()
    if size:
        storage.resize_(0)
        ledger.add(kind, -size)


def size_of(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`."""
    return tensor.numel() * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """The same for two tensors exactly when they share their memory, allocated or not."""
    return int(tensor.untyped_storage()._cdata)
