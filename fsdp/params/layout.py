"""Where each parameter lives in the flat buffer of its unit. Pure arithmetic, no torch.

Rule 1: a pure function of (shapes, itemsize, world size); any process can compute any rank's part.
Rule 2: costs O(parameters), whatever the world size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Final

ALIGNMENT: Final = 16
"""Bytes. NCCL falls back to element-sized packets for chunks that are not multiples of this."""
PADDING_BUDGET: Final = 0.03
"""How much larger a chunk may become so that rows stay whole."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in the whole flat buffer, in elements."""

    shape: Shape
    start: int
    numel: int
    cut_by_element: bool
    """Some chunk boundary falls inside a row of this parameter."""

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one parameter, in elements."""

    shape: Shape
    offset: int
    """From the beginning of the rank's chunk."""
    first: int
    """From the beginning of the flattened parameter."""
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters laid end to end and cut into equal chunks, one a rank.

    Example: shapes (3, 2) and (1,) of 8-byte elements over 2 ranks. Chunks are multiples of 16
    bytes, so of 2 elements; 7 elements are padded to 8; the boundary falls between rows:

        whole     a a a a a a b .
        rank 0    a a a a            shape (2, 2), and (0,) of b
        rank 1            a a b .    shape (1, 2), and (1,) of b
    """

    slots: tuple[Slot, ...]
    chunk: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.chunk * self.world_size

    def part(self, index: int, rank: int) -> Part:
        """What `rank` holds of parameter `index`.

        Rows: shape (k, *rest), k may be 0. Cut by element: (1, ..., 1, n). Without dimensions:
        () on the rank that holds it, (0,) on the others.
        """
        slot = self.slots[index]
        begin = rank * self.chunk
        low = min(max(begin, slot.start), slot.end)
        high = max(min(begin + self.chunk, slot.end), low)
        return Part(_part_shape(slot, high - low), max(low - begin, 0) if high > low else 0, low - slot.start, high - low)


def _part_shape(slot: Slot, numel: int) -> Shape:
    shape = slot.shape
    if numel == slot.numel:
        return shape
    if not shape:
        return (0,)
    if slot.cut_by_element:
        return (*(1,) * (len(shape) - 1), numel)
    return (numel // (slot.numel // shape[0]), *shape[1:])


@lru_cache(maxsize=4096)
def make_layout(shapes: tuple[Shape, ...], itemsize: int, world_size: int) -> Layout:
    """Lay parameters of `shapes` (elements of `itemsize` bytes) over `world_size` chunks.

    Boundaries fall between rows (dim 0) wherever that keeps the chunk within `PADDING_BUDGET` of
    the smallest possible one; the parameters with the longest rows are cut by element first.
    """
    step = max(ALIGNMENT // itemsize, 1)
    # candidates for whole rows, shortest rows first
    rows = sorted({_row(shape) for shape in shapes if len(shape) > 1 and prod(shape) > 0})
    smallest = _fit(shapes, frozenset(), step, world_size, limit=None)
    assert smallest is not None, "an unlimited chunk always fits"
    limit = max(smallest.chunk, int(smallest.chunk * (1 + PADDING_BUDGET)))
    for kept in range(len(rows), 0, -1):
        found = _fit(shapes, frozenset(rows[:kept]), step, world_size, limit)
        if found is not None:
            return found
    return smallest


def _row(shape: Shape) -> int:
    """Elements in one row."""
    return prod(shape[1:])


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _fit(shapes: Sequence[Shape], whole_rows: frozenset[int], step: int, world_size: int, limit: int | None) -> Layout | None:
    """The layout with the smallest chunk found that keeps these row lengths whole, or None beyond `limit`."""
    total = sum(_round_up(prod(shape), step) for shape in shapes)
    chunk = _round_up(max(-(-total // world_size), 1), step)
    for _ in range(8):
        # a parameter longer than a chunk crosses several boundaries: the chunk itself must be whole rows
        crossing = [_row(s) for s in shapes if len(s) > 1 and _row(s) in whole_rows and prod(s) > chunk]
        chunk = _round_up(chunk, lcm(step, *crossing))
        if limit is not None and chunk > limit:
            return None
        slots = _place(shapes, whole_rows, step, chunk)
        end = slots[-1].end if slots else 0
        if end <= chunk * world_size:
            return Layout(slots, chunk, world_size)
        chunk = _round_up(max(-(-end // world_size), chunk + 1), step)
    return None


def _place(shapes: Sequence[Shape], whole_rows: frozenset[int], step: int, chunk: int) -> tuple[Slot, ...]:
    slots = []
    at = 0
    for shape in shapes:
        numel = prod(shape)
        row = _row(shape) if len(shape) > 1 and numel else 1
        at = _round_up(at, step)
        boundary = _round_up(at + 1, chunk)
        crosses = at + numel > boundary
        if crosses and row in whole_rows:
            at += (boundary - at) % lcm(row, step)
            if at >= boundary:
                boundary = _round_up(at + 1, chunk)
            crosses = at + numel > boundary
        crosses_twice = at + numel > boundary + chunk
        cut = crosses and ((boundary - at) % row != 0 or (crosses_twice and chunk % row != 0))
        slots.append(Slot(shape, at, numel, cut))
        at += numel
    return tuple(slots)


def limit_of(left: int, cap: int, tapers: bool) -> int:
    """Bytes of the next bucket or parcel, of `left` that have none. If it `tapers` at most half of them, so that little is on
    its way when nothing is left to compute; but an eighth of the cap is little enough."""
    return min(cap, max(left // 2, cap // 8)) if tapers else cap
