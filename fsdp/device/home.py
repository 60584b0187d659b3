"""Where a shard, its gradient and its optimizer state are: on the device that computes, or in host memory.

Rule 1: no other file asks which of both it is, but for the attribute `copies`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fsdp.config import OffloadPolicy
from fsdp.device.storage import MemoryTracker, ResizableStorage, size_of
from fsdp.device.streams import Streams


@dataclass(frozen=True)
class Home:
    """On the device that computes."""

    device: torch.device
    """The device that computes."""

    copies: ClassVar = False
    """Whether shards are copied to the device that computes, and gradients back, while the host program goes on."""

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros (numel,) for a shard."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def count_put_away(self, tracker: MemoryTracker, shard: Tensor, is_away: bool) -> None:
        """Count that `fsdp.offload` has moved a shard to the host, or `fsdp.onload` back. What is on the host stays there."""
        if self.device.type not in ("cpu", "meta"):
            tracker.add("shards", -self.device_bytes(shard) if is_away else self.device_bytes(shard))

    def device_bytes(self, tensor: Tensor) -> int:
        """Bytes that a tensor which is at home takes on the device that computes."""
        return size_of(tensor)

    def on_device(self, part: Tensor) -> Tensor:
        """A part of a shard on the device that computes: itself, or a copy that the current stream makes."""
        return part

    def upload(self, shard: Tensor, memory: ResizableStorage, place: Tensor, streams: Streams, tracker: MemoryTracker) -> None:
        """Allocate the memory of unsharded parameters, and copy a shard to its place there."""
        memory.allocate(tracker)
        place.copy_(shard)

    def copied(self, streams: Streams) -> None:
        """The current stream has copied to the host, or from it, if anything was to be copied."""

    def bring(self, local: Tensor) -> Tensor:
        """A gradient, or a part of one, at home."""
        return local

    def receive(self, reduced: Tensor, is_added: bool, streams: Streams, tracker: MemoryTracker) -> Tensor:
        """A reduced shard at home. `is_added`: it is added to one that is there already."""
        return reduced


@dataclass(frozen=True)
class HostHome(Home):
    """In host memory, while a device computes. In a rehearsal on the meta device there is no host memory either."""

    pins: bool
    """Whether the memory is pinned: the device can then read and write it while the host program goes on."""

    copies: ClassVar = True

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.device.type == "meta":
            return super().memory(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self.pins)

    def device_bytes(self, tensor: Tensor) -> int:
        return 0

    def on_device(self, part: Tensor) -> Tensor:
        return part.to(self.device, non_blocking=True)

    def upload(self, shard: Tensor, memory: ResizableStorage, place: Tensor, streams: Streams, tracker: MemoryTracker) -> None:
        """Memory: with another compute dtype, the elements in the shard's dtype on the device until they are converted."""
        # allocated on the stream that writes first, while the gathers before this one may still run
        with streams.uploading():
            memory.allocate(tracker)
            # a copy from the host to another dtype would be converted on the host
            place.copy_(shard if place.dtype is shard.dtype else self.on_device(shard), non_blocking=True)
            streams.copied()
        streams.uploaded()

    def copied(self, streams: Streams) -> None:
        streams.copied()

    def bring(self, local: Tensor) -> Tensor:
        """With pinned memory, the copy has its values only when the current stream has come there."""
        if local.is_meta:
            return local
        if local.is_sparse or not self.pins:
            return local.cpu()
        return torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=True).copy_(local, non_blocking=True)

    def receive(self, reduced: Tensor, is_added: bool, streams: Streams, tracker: MemoryTracker) -> Tensor:
        """The copy is there when `Streams.await_copies` has returned."""
        if is_added:
            moved = reduced.cpu()  # it is added on the host to the first one, whose copy is over before this one
        else:
            moved = self.bring(reduced)
            streams.copied()
        tracker.add("reduced", -size_of(reduced))
        return moved


def home_of(device: torch.device, offload: OffloadPolicy | None) -> Home:
    """Where the shards of parameters are that compute on `device`."""
    return Home(device) if offload is None or device.type == "cpu" else HostHome(device, offload.pin_memory)
