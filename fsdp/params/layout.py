"""Where each parameter lies in the flat buffer of its unit. Pure arithmetic, no torch.

Rule 1: a layout is a pure function of (shapes, itemsize, number of shards). Any process can compute any rank's part.
Rule 2: it costs O(parameters), independent of the number of shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, lcm, prod
from typing import Final

from fsdp.shards.cut import Cut, Shape, part_shape

ALIGNMENT: Final = 16
"""Bytes. NCCL sends packets of one element each if a chunk is not a multiple of this."""
PADDING_BUDGET: Final = 0.03
"""The fraction by which a chunk may grow so that no row is cut."""


@dataclass(frozen=True, slots=True)
class ParamExtent:
    """Where one parameter lies in the unsharded flat buffer, in elements."""

    shape: Shape
    start: int
    numel: int
    segment: int = 0
    """The number of its segment, see `Layout`."""

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class ShardExtent:
    """Where one rank's part of one parameter lies, in elements."""

    shape: Shape
    offset: int
    """Counted from the start of the rank's chunk."""
    first: int
    """The first element of the part, counted from the start of the flattened parameter."""
    numel: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the unsharded flat buffer that is cut into equal slices, one for each rank."""

    offset: int
    """Elements of a rank's chunk before its slice."""
    numel: int
    """Elements of one slice."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters laid end to end and cut over the ranks. A rank's chunk is its slice of each segment, one after the other.

    Example: shapes (3, 2) and (1,) of 8-byte elements over 2 ranks. Chunks are multiples of 16 bytes, which is 2 elements.
    With one segment, 7 elements are padded to 8. The boundary falls between rows:

        unsharded a a a a a a b .
        rank 0    a a a a            shape (2, 2), and (0,) of b
        rank 1            a a b .    shape (1, 2), and (1,) of b

    With a segment for each parameter, and one for padding, each parameter is cut in two:

        unsharded a a a a | a a . .   b | .   . | .
        rank 0    a a a a             b       .
        rank 1              a a . .       .       .
    """

    slots: tuple[ParamExtent, ...]
    shard_numel: int
    num_shards: int
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        """Elements of the unsharded flat buffer, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def is_gathered_in_place(self) -> bool:
        """Whether the chunks of all ranks, one after the other, are the unsharded flat buffer."""
        return len(self.segments) == 1

    def place(self, index: int) -> tuple[int, int]:
        """Where parameter `index` begins in its segment, and how many elements of the segment each rank has."""
        slot = self.slots[index]
        segment = self.segments[slot.segment]
        return slot.start - segment.offset * self.num_shards, segment.numel

    def part(self, index: int, rank: int) -> ShardExtent:
        """The part of parameter `index` on `rank`. Shapes: see `part_shape`."""
        slot = self.slots[index]
        segment = self.segments[slot.segment]
        begin = segment.offset * self.num_shards + rank * segment.numel
        low = min(max(begin, slot.start), slot.end)
        high = max(min(begin + segment.numel, slot.end), low)
        offset = segment.offset + low - begin if high > low else 0
        return ShardExtent(part_shape(slot.shape, high - low, self.cut(index).by_element), offset, low - slot.start, high - low)

    def cut(self, index: int) -> Cut:
        """How parameter `index` is cut over the ranks."""
        slot = self.slots[index]
        start, per_rank = self.place(index)
        holder, offset = divmod(start, per_rank) if slot.numel else (0, 0)
        first = per_rank - offset
        if slot.numel <= first:
            return Cut(slot.shape, self.num_shards, holder, None, None)
        numel_next = per_rank if slot.numel > first + per_rank else None
        return Cut(slot.shape, self.num_shards, holder, first, numel_next)


@lru_cache(maxsize=4096)
def make_layout(shapes: tuple[Shape, ...], itemsize: int, num_shards: int, aligned: bool = True) -> Layout:
    """Lay parameters of `shapes` (elements of `itemsize` bytes) into `num_shards` chunks.

    Boundaries fall between rows (dim 0) as long as the chunk stays within `PADDING_BUDGET` of the smallest possible one.
    If it does not, the parameters with the longest rows are cut by element first. Parameters and chunks begin at multiples of
    `ALIGNMENT`; without `aligned` at any element, so that a vector whose length is a multiple of the chunks is cut evenly.
    """
    step = max(ALIGNMENT // itemsize, 1) if aligned else 1
    # row lengths that may stay uncut, shortest first
    rows = sorted({_row(shape) for shape in shapes if len(shape) > 1 and prod(shape) > 0})
    smallest = _fit(shapes, frozenset(), step, num_shards, inf)
    assert smallest is not None, "an unlimited chunk always fits"
    limit = max(smallest.shard_numel, int(smallest.shard_numel * (1 + PADDING_BUDGET)))
    for count in range(len(rows), 0, -1):
        layout = _fit(shapes, frozenset(rows[:count]), step, num_shards, limit)
        if layout is not None:
            return layout
    return smallest


def make_row_layout(shapes: tuple[Shape, ...], itemsize: int, num_shards: int) -> Layout:
    """Cut each parameter into `num_shards` slices of equally many rows, as DTensor's Shard(0) does. The last ones may be short.

    Each parameter is a segment of its own. With several parameters, each slice begins at a multiple of `ALIGNMENT`, so what
    pads the slice before it is a segment too.

    Example: 5 rows over 4 ranks are 2, 2, 1 and 0 rows.
    """
    step = max(ALIGNMENT // itemsize, 1) if len(shapes) > 1 else 1
    slots: list[ParamExtent] = []
    segments: list[Segment] = []
    offset = 0
    for shape in shapes:
        per_rank = -(-shape[0] // num_shards) * _row(shape)
        slots.append(ParamExtent(shape, offset * num_shards, prod(shape), len(segments)))
        for numel in filter(None, (per_rank, _round_up(max(per_rank, 1), step) - per_rank)):
            segments.append(Segment(offset, numel))
            offset += numel
    if num_shards == 1:  # the only chunk is the flat buffer
        slots, segments = [replace(slot, segment=0) for slot in slots], [Segment(0, offset)]
    return Layout(tuple(slots), offset, num_shards, tuple(segments))


def _row(shape: Shape) -> int:
    """Elements in one row."""
    return prod(shape[1:])


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _fit(shapes: Sequence[Shape], uncut_rows: frozenset[int], step: int, num_shards: int, limit: float) -> Layout | None:
    """The layout with the smallest chunk found that cuts no row of these lengths, or None if that exceeds `limit`."""
    total = sum(_round_up(prod(shape), step) for shape in shapes)
    shard_numel = _round_up(max(-(-total // num_shards), 1), step)
    for _ in range(8):
        # a parameter longer than a chunk crosses several boundaries, so the chunk must be a multiple of its row
        spanning = [_row(s) for s in shapes if len(s) > 1 and _row(s) in uncut_rows and prod(s) > shard_numel]
        shard_numel = _round_up(shard_numel, lcm(step, *spanning))
        if shard_numel > limit:
            return None
        slots = _place(shapes, uncut_rows, step, shard_numel)
        end = slots[-1].end if slots else 0
        if end <= shard_numel * num_shards:
            return Layout(slots, shard_numel, num_shards, (Segment(0, shard_numel),))
        shard_numel = _round_up(max(-(-end // num_shards), shard_numel + 1), step)
    return None


def _place(shapes: Sequence[Shape], uncut_rows: frozenset[int], step: int, shard_numel: int) -> tuple[ParamExtent, ...]:
    slots = []
    start = 0
    for shape in shapes:
        numel = prod(shape)
        row = _row(shape) if len(shape) > 1 and numel else 1
        start = _round_up(start, step)
        boundary = _round_up(start + 1, shard_numel)
        if start + numel > boundary and row in uncut_rows:
            start += (boundary - start) % lcm(row, step)
        slots.append(ParamExtent(shape, start, numel))
        start += numel
    return tuple(slots)


def next_bucket_limit(left: int, cap: int, tapers: bool) -> int:
    """The size limit in bytes of the next bucket or bucket group, when `left` bytes are in none yet.

    With `tapers` it takes at most half of `left`, or an eighth of the cap if that is more. The last bucket is then small,
    so that little is in flight when no computation is left to hide it.
    """
    return min(cap, max(left // 2, cap // 8)) if tapers else cap
