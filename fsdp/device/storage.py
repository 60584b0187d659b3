"""Allocates and releases the memory of buffers, and counts the bytes held. The only file that resizes storages.

Releasing resizes the storage to zero and keeps every tensor. Autograd's saved tensors, also derived ones such as
`weight.t()`, share the storage, and are valid again when the backward has filled it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.errors import ShardingError


@dataclass(slots=True)
class MemoryTracker:
    """Bytes that the engine holds on this rank, by kind: shards, whole, bucket, scratch, reduced, kept, lent.

    Not counted: `.grad`, which belongs to the user, and the memory that replicas on the host reuse for it. Where shards are in
    host memory, these bytes are the device's alone.
    """

    held: dict[str, int] = field(default_factory=dict)
    """By kind. A trace puts a dict of its own in the place."""
    peak: int = 0
    now: int = 0

    def add(self, kind: str, count: int) -> None:
        """Count `count` bytes as allocated or, if it is negative, as released."""
        self.held[kind] = self.held.get(kind, 0) + count
        self.now = now = self.now + count
        if now > self.peak:
            self.peak = now


_SHARED_WITH_NUMPY: Final = {
    "whole": ("unsharded parameters", "weight.detach()"),
    "bucket": ("a bucket of gradients", "bucket.buffer()"),
}
"""For each kind of memory, its name in errors and the tensor from which a user can make an array that shares it."""


class ResizableStorage:
    """The memory of one permanent buffer: allocated and released while the buffer and all its views live on.

    It is released at first. With `stays`, it is not released between steps once it has been allocated.
    """

    __slots__ = ("_held", "_kind", "_size", "_stays", "_storage")

    def __init__(self, buffer: Tensor, kind: str, stays: bool = False) -> None:
        self._storage = buffer.untyped_storage()
        self._size = size_of(buffer)
        self._kind = kind
        self._stays = stays
        self._storage.resize_(0)
        self._held = False

    def allocate(self, tracker: MemoryTracker) -> None:
        """Allocate the memory. Its content is undefined. Idempotent."""
        if not self._held:
            self._storage.resize_(self._size)
            self._held = True
            tracker.add(self._kind, self._size)

    def release(self, tracker: MemoryTracker, even_if_stays: bool = False) -> bool:
        """Release the memory, by default unless it stays; return whether any was released. Idempotent.

        Raises:
            ShardingError: something outside torch shares the memory.
        """
        if not self._held or (self._stays and not even_if_stays):
            return False
        try:
            self._storage.resize_(0)
        except RuntimeError as reason:
            owner, source = _SHARED_WITH_NUMPY[self._kind]
            raise ShardingError(
                f"the memory of {owner} cannot be released: something outside torch shares it, such as an array made by "
                f"{source}.numpy(); make it of a copy, {source}.clone().numpy(), and build the model again."
            ) from reason
        self._held = False
        tracker.add(self._kind, -self._size)
        return True


class ReusableBuffer:
    """Memory of one size that is used again as soon as no tensor uses it.

    It serves buffers that would otherwise be allocated in every step, each time with pages cleared by the system.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, count: int, like: Tensor) -> Tensor:
        """A tensor (count,) with undefined content, with the dtype and device of `like`. `count` is the same in each call."""
        if self._memory is None:
            self._memory = like.new_empty(count)
        elif is_shared(self._memory):
            return like.new_empty(count)
        return self._memory.view(count)


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor uses the memory of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _OWN_REFERENCES


_OWN_REFERENCES: Final = 2
"""The references to a storage from one tensor, and from the storage object that is made for the question."""


class HostCopies:
    """Storages whose memory was moved to the host. Every tensor over them lives on, without memory, until it is moved back."""

    __slots__ = ("_moved",)

    def __init__(self) -> None:
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Each storage without memory, and its bytes in host memory."""

    def move(self, tensor: Tensor) -> None:
        """Move the memory of `tensor` to the host. Host tensors stay, and so does what has no memory."""
        storage = tensor.untyped_storage()
        if storage.device.type not in ("cpu", "meta") and storage.nbytes():
            self._moved.append((storage, _bytes_of(storage).cpu()))
            storage.resize_(0)

    def move_back(self) -> None:
        """Move all back to the device. If that runs out of memory, the rest stays here, and this may be called again."""
        while self._moved:
            storage, copy = self._moved[-1]
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
            self._moved.pop()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device, so that other programs can have it."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).empty_cache()


def size_of(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; for a sparse tensor, of its indices and values."""
    if tensor.is_sparse:
        return size_of(tensor._indices()) + size_of(tensor._values())
    return tensor.nbytes


def storage_key(tensor: Tensor) -> int:
    """A number that is equal for two tensors exactly if they share a storage, with or without memory. Of a DTensor: its part."""
    try:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
    except NotImplementedError:  # a sparse tensor has none, nor has one of mkldnn
        return id(tensor)


def with_own_storage(view: Tensor) -> Tensor:
    """A detached view of all of `view`, with its count of changes, whose storage has nothing else.

    What saves or compares storages takes views of one flat tensor for ties, or saves all of it. On devices for which torch has
    no DLPack it is a detached view alone.
    """
    own, base = view.detach(), view.detach()
    if own.device.type in ("cpu", "cuda"):
        own.data = from_dlpack(base)  # which keeps `base`, and with it the memory
        _bases[base] = None
    return own


_bases: Final = WeakIdKeyDictionary()
"""The tensors whose memory storages of their own refer to."""


def is_base(tensor: Tensor) -> bool:
    """Whether a tensor of `with_own_storage` is alive that refers to the memory of `tensor`, which must stay where it is."""
    return any(storage_key(one) == storage_key(tensor) for one in _bases)


class Cutter:
    """Cuts flat tensors into views, in one call into C++: a slice and a view for each would take as long as a small kernel."""

    __slots__ = ("_moved", "_segments", "_templates")

    def __init__(self, extents: Sequence[tuple[int, int, tuple[int, ...], int]], device: torch.device) -> None:
        """`extents` are (start, numel, shape, dim), in the order of their starts; `dim`: where the views have dimension 0."""
        element = torch.empty((), device=device)
        self._templates: list[Tensor] = []
        """Tensors with the shapes of the extents and of the gaps between them, each with the memory of one element."""
        self._segments: list[tuple[int, tuple[int, ...]]] = []
        """For each extent, its index in `_templates`, or -1 if it has no elements; and its shape."""
        self._moved = [(index, dim) for index, (*_, dim) in enumerate(extents) if dim]
        end = 0
        for start, numel, shape, _ in extents:
            if start > end:
                self._templates.append(element.expand(start - end))
            self._segments.append((len(self._templates) if numel else -1, shape))
            if numel:
                self._templates.append(element.expand(shape))
            end = start + numel

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The view of each extent in `flat`."""
        views = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        found = [flat[:0].view(shape) if segment < 0 else views[segment] for segment, shape in self._segments]
        for index, dim in self._moved:
            found[index] = found[index].movedim(0, dim)
        return found
