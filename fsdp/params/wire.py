"""The order in which the elements of a flat buffer travel between ranks.

[Note: order on the wire]
A collective that gathers or scatters chunks takes them one after the other: rank 0's slice of every segment, then rank 1's. In
memory the slices of one segment lie together, so that a full parameter is contiguous. With one segment both orders are the same,
and nothing is copied. With several, the gathered chunks are copied once, into the segments. Gradients are written to their places
on the wire directly.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final

import torch
from torch import Size, Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.work import Work
from fsdp.device.storage import Cutter, MemoryTracker, ResizableStorage
from fsdp.params.layout import Layout
from fsdp.params.placement import Placement

_LARGE: Final = 2**14
"""Average elements of a gradient from which on a pass over the memory costs more than one operator for each gradient."""


class Wire:
    """Where the elements of a flat buffer of one segment lie on the wire (W * C,): where they lie in memory."""

    __slots__ = ("_cutter", "_layout", "_placements")

    def __init__(self, layout: Layout, placements: Sequence[Placement], cutter: Cutter) -> None:
        """`cutter`: makes the views of full parameters in memory."""
        self._layout = layout
        self._placements = placements
        self._cutter = cutter

    def segments_of(self, flat: Tensor) -> list[Tensor]:
        """The slices (W, c) of each segment in an unsharded flat tensor (W * C,), or in its bytes."""
        return [flat.view(self._layout.num_shards, -1)]

    def views_of(self, wire: Tensor) -> list[list[Tensor]]:
        """The parts of each parameter in a tensor (W * C,) in the order of the wire."""
        return [[view] for view in self._cutter.views_of(wire)]

    def parts_of(self, index: int, full: Tensor) -> Sequence[Tensor]:
        """The same parts of a full tensor of the shape of parameter `index`: views."""
        return (full,)

    def fill(self, wire: Tensor, parts: list[Tensor], full: list[Tensor], divisor: float) -> None:
        """Copy one full tensor for each parameter, divided, into such a tensor. `parts`: all of `views_of(wire)`."""
        is_large = wire.device.type == "cpu" and wire.numel() >= _LARGE * len(parts)
        if divisor != 1 and is_large and full[0].dtype is wire.dtype:
            for part, one in zip(parts, self._parts_of_all(full), strict=True):
                torch.div(one, divisor, out=part)
            return
        self._copy(wire, parts, full, is_large)
        if divisor != 1:
            wire.div_(divisor)

    def _parts_of_all(self, full: list[Tensor]) -> list[Tensor]:
        return full

    def _copy(self, wire: Tensor, parts: list[Tensor], full: list[Tensor], is_large: bool) -> None:
        torch._foreach_copy_(parts, full)

    def full_params(self, wire: Tensor) -> list[Tensor]:
        """Each full parameter in such a tensor: a view, or a copy if there is none."""
        return self._cutter.views_of(wire)

    def to_memory(self, wire: Tensor) -> Tensor:
        """Such a tensor in the order of the memory."""
        return wire

    def zero_padding(self, wire: Tensor) -> None:
        """Fill what belongs to no parameter with zeros."""
        slots = self._layout.slots
        ends = [0, *(slot.end for slot in slots)]
        for end, start in zip(ends, [*(slot.start for slot in slots), wire.numel()], strict=True):
            if end < start:
                wire[end:start].zero_()


class WireOfSegments(Wire):
    """The same for a flat buffer of several segments. See [Note: order on the wire]."""

    __slots__ = ("_is_chunked", "_shapes")

    def __init__(self, layout: Layout, placements: Sequence[Placement], cutter: Cutter) -> None:
        super().__init__(layout, placements, cutter)
        self._shapes: list[list[tuple[int, ...]]] = [self._shapes_of(index) for index in range(len(layout.slots))]
        """Of each parameter the shapes of its parts on the wire: (ranks, rows, *row) for those ranks that have a full slice, and
        (rows, *row) for the rank that has a short one. A part without rows is left out."""
        is_packed = len(layout.segments) == len(layout.slots) and all([slot.numel for slot in layout.slots])
        self._is_chunked = is_packed and not any([one.dim for one in placements])
        """Whether the chunk of a rank is one slice after the other, of each parameter one as it lies in memory: no padding."""

    def _shapes_of(self, index: int) -> list[tuple[int, ...]]:
        slot = self._layout.slots[index]
        if not slot.numel:
            return []
        _, per_rank = self._layout.place(index)
        row = slot.numel // slot.shape[0]
        full, short = divmod(slot.numel, per_rank)
        shapes: list[tuple[int, ...]] = [(full, per_rank // row, *slot.shape[1:])] if full else []
        return [*shapes, (short // row, *slot.shape[1:])] if short else shapes

    def segments_of(self, flat: Tensor) -> list[Tensor]:
        size, ranks = flat.numel() // self._layout.numel, self._layout.num_shards
        sizes = [segment.numel * ranks * size for segment in self._layout.segments]
        return [segment.view(ranks, -1) for segment in flat.split_with_sizes(sizes)]

    def views_of(self, wire: Tensor) -> list[list[Tensor]]:
        chunks = wire.view(self._layout.num_shards, -1)
        views: list[list[Tensor]] = []
        for slot, shapes in zip(self._layout.slots, self._shapes, strict=True):
            segment = self._layout.segments[slot.segment]
            slices = chunks.narrow(1, segment.offset, segment.numel)
            rank, parts = 0, []
            for shape in shapes:
                if len(shape) > len(slot.shape):
                    parts.append(slices[: shape[0]].view(shape))
                    rank = shape[0]
                else:
                    parts.append(slices[rank, : Size(shape).numel()].view(shape))
            views.append(parts)
        return views

    def parts_of(self, index: int, full: Tensor) -> Sequence[Tensor]:
        stored, shapes = self._placements[index].stored(full), self._shapes[index]
        if len(shapes) == 1:
            return (stored.view(shapes[0]),)
        start, parts = 0, []
        for shape in shapes:
            rows = shape[0] * shape[1] if len(shape) > stored.dim() else shape[0]
            parts.append(stored[start : start + rows].view(shape))
            start += rows
        return parts

    def _parts_of_all(self, full: list[Tensor]) -> list[Tensor]:
        return [part for index, one in enumerate(full) for part in self.parts_of(index, one)]

    def _copy(self, wire: Tensor, parts: list[Tensor], full: list[Tensor], is_large: bool) -> None:
        # one operator in place of one view for each part, as torch's fully_shard does it; on the host it copies uneven rows twice
        if self._is_chunked and not is_large:
            ranks = self._layout.num_shards
            torch._chunk_cat(full, 0, ranks, out=wire.view(ranks, -1))
        else:
            torch._foreach_copy_(parts, self._parts_of_all(full))

    def full_params(self, wire: Tensor) -> list[Tensor]:
        copies = []
        for placement, parts in zip(self._placements, self.views_of(wire), strict=True):
            shape = placement.extent.shape
            rows = [part.reshape(-1, *shape[1:]) for part in parts]
            copies.append(placement.shown(torch.cat(rows) if rows else wire.new_empty(shape)))
        return copies

    def to_memory(self, wire: Tensor) -> Tensor:
        full = torch.empty_like(wire)
        sizes = [segment.numel for segment in self._layout.segments]
        torch.split_with_sizes_copy(wire.view(self._layout.num_shards, -1), sizes, 1, out=self.segments_of(full))
        return full

    def zero_padding(self, wire: Tensor) -> None:
        is_padding = torch.ones_like(wire, dtype=torch.bool)
        for view in chain.from_iterable(self.views_of(is_padding)):
            view.zero_()
        wire.masked_fill_(is_padding, 0)


class JointGather:
    """An all-gather of chunks that belong to several places. `wait` copies them there; it may be called more than once."""

    __slots__ = ("_joint", "_memories", "_places", "_sizes", "_tracker", "_work")

    def __init__(
        self,
        comm: Communicator,
        places: list[Tensor],
        own: list[Tensor],
        label: str,
        tracker: MemoryTracker,
        memories: Sequence[ResizableStorage],
    ) -> None:
        """`places`: the bytes (W, c) that each part of chunks fills. `own`: this rank's chunk as bytes, in one or more tensors.

        `memories`: those of the places, allocated when they are filled. The bytes of all chunks are there once more until then.
        """
        self._places = places
        self._tracker = tracker
        self._memories = memories
        self._sizes = [place.shape[1] for place in places]
        self._joint = places[0].new_empty(comm.size, sum(self._sizes))
        mine = self._joint[comm.rank]
        if len(own) == 1:
            mine.copy_(own[0])  # a rehearsal counts copies from the host
        else:
            torch.cat(own, out=mine)
        self._work: Work | None = comm.all_gather(self._joint.view(-1), label, mine)
        tracker.add("scratch", self._joint.numel())

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
            for memory in self._memories:
                memory.allocate(self._tracker)
            torch.split_with_sizes_copy(self._joint, self._sizes, 1, out=self._places)
        finally:
            self._tracker.add("scratch", -self._joint.numel())
            del self._joint
