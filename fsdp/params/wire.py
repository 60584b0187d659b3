"""A flat buffer of several segments on its way between ranks. See `Layout`.

[Note: order on the wire]
A collective that gathers or scatters chunks takes them one after the other: rank 0's slice of every segment, then rank 1's. In
memory the slices of one segment lie together, so that a full parameter is contiguous. The gathered chunks are copied once, into
the segments. Gradients are written to their places on the wire directly.
"""

from collections.abc import Sequence

from torch import Size, Tensor

from fsdp.params.layout import Layout


class Wire:
    """Where the elements of a flat buffer, cut by `layout`, lie on the wire (W * C,)."""

    __slots__ = ("_layout", "_shapes")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._shapes: list[list[tuple[int, ...]]] = [self._shapes_of(index) for index in range(len(layout.slots))]
        """Of each parameter the shapes of its parts on the wire: (ranks, rows, *row) for those ranks that have a full slice, and
        (rows, *row) for the rank that has a short one. A part without rows is left out."""

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
        """The slices (W, c) of each segment in an unsharded flat tensor (W * C,), or in its bytes."""
        size, ranks = flat.numel() // self._layout.numel, self._layout.num_shards
        sizes = [segment.numel * ranks * size for segment in self._layout.segments]
        return [segment.view(ranks, -1) for segment in flat.split_with_sizes(sizes)]

    def views_of(self, wire: Tensor) -> list[list[Tensor]]:
        """The parts of each parameter in a tensor (W * C,) in the order of the wire."""
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
        """The same parts of a full tensor (rows, *row) of the shape of parameter `index`: views."""
        shapes = self._shapes[index]
        if len(shapes) == 1:
            return (full.view(shapes[0]),)
        start, parts = 0, []
        for shape in shapes:
            rows = shape[0] * shape[1] if len(shape) > full.dim() else shape[0]
            parts.append(full[start : start + rows].view(shape))
            start += rows
        return parts
