"""Where parameters lie: every element once, aligned, rows whole, little padding. Pure arithmetic."""

import sys
from collections.abc import Callable
from itertools import product
from math import prod
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.device.storage import Cutter
from fsdp.params.layout import Layout, ParamExtent, ShardExtent, make_layout, make_row_layout
from fsdp.params.placement import Placement
from fsdp.params.wire import WireOfSegments

Shape = tuple[int, ...]

ALIGNMENT = 16
PADDING_BUDGET = 0.03

SMALL: list[Shape] = [(), (0,), (1,), (5,), (0, 3), (3, 0), (1, 1), (2, 3), (3, 2), (7, 5), (2, 3, 2), (1, 9)]
SETS: list[tuple[Shape, ...]] = [
    (),
    *((one,) for one in SMALL),
    *product(SMALL, SMALL),
    *product(SMALL[3:], SMALL[:6], SMALL[6:]),
]


def step_of(itemsize: int) -> int:
    return max(ALIGNMENT // itemsize, 1)


def parts_of(layout: Layout, index: int) -> list[ShardExtent]:
    return [layout.part(index, rank) for rank in range(layout.num_shards)]


def smallest_chunk(shapes: tuple[Shape, ...], itemsize: int, num_shards: int) -> int:
    """What an aligned layout without a thought for rows needs."""
    step = step_of(itemsize)
    total = sum(-(-prod(shape) // step) * step for shape in shapes)
    return -(-max(-(-total // num_shards), 1) // step) * step


def check(shapes: tuple[Shape, ...], itemsize: int, num_shards: int) -> Layout:
    """Everything that is promised of any layout."""
    layout = make_layout(shapes, itemsize, num_shards)
    assert layout.shard_numel * itemsize % ALIGNMENT == 0
    assert layout.shard_numel > 0
    assert layout.numel == layout.shard_numel * num_shards
    assert layout.shard_numel <= max(smallest_chunk(shapes, itemsize, num_shards) * (1 + PADDING_BUDGET), step_of(itemsize))
    assert [slot.shape for slot in layout.slots] == list(shapes)
    end = 0
    for index, slot in enumerate(layout.slots):
        assert slot.start >= end, "parameters overlap"
        assert slot.start * itemsize % ALIGNMENT == 0
        assert slot.numel == prod(slot.shape)
        end = slot.end
        check_parts(layout, index)
    assert end <= layout.numel
    return layout


def check_parts(layout: Layout, index: int) -> None:
    """The parts of one parameter tile it once, in rank order, where the flat buffer has it."""
    slot, parts = layout.slots[index], parts_of(layout, index)
    covered = 0
    for rank, part in enumerate(parts):
        assert prod(part.shape) == part.numel
        if part.numel:
            assert part.first == covered
            assert rank * layout.shard_numel + part.offset == slot.start + part.first
            assert part.offset + part.numel <= layout.shard_numel
        covered += part.numel
        check_shape(slot, part, layout.cut(index).by_element)
    assert covered == slot.numel


def check_shape(slot: ParamExtent, part: ShardExtent, by_element: bool) -> None:
    if part.numel == slot.numel and (part.numel or not slot.shape):
        assert part.shape == slot.shape
        return
    if not slot.shape:
        assert part.shape == (0,)
        return
    assert len(part.shape) == len(slot.shape)
    if by_element:
        assert part.shape[:-1] == (1,) * (len(slot.shape) - 1)
    else:
        assert part.shape[1:] == slot.shape[1:]
        row = prod(slot.shape[1:])
        assert row == 0 or part.first % row == 0


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_small_shapes_are_tiled_aligned_and_within_budget(itemsize: int, num_shards: int) -> None:
    for shapes in SETS:
        check(shapes, itemsize, num_shards)


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4).map(tuple), max_size=12).map(tuple),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 64),
)
def test_any_shapes_are_tiled_aligned_and_within_budget(shapes: tuple[Shape, ...], itemsize: int, num_shards: int) -> None:
    check(shapes, itemsize, num_shards)


def test_the_example_of_the_docstring() -> None:
    layout = check(((3, 2), (1,)), 8, 2)
    assert layout.numel == 8
    assert [part.shape for part in parts_of(layout, 0)] == [(2, 2), (1, 2)]
    assert [part.shape for part in parts_of(layout, 1)] == [(0,), (1,)]


def test_rows_of_a_transformer_block_are_not_cut() -> None:
    d = 256
    shapes = ((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,))
    for num_shards in (1, 2, 3, 4, 8):
        layout = check(shapes, 4, num_shards)
        assert not any(layout.cut(index).by_element for index, shape in enumerate(shapes) if len(shape) > 1)


def test_rows_too_long_for_the_budget_are_cut_by_element_and_only_those() -> None:
    layout = check(((3, 10_000), (64, 8)), 4, 4)
    assert [layout.cut(index).by_element for index in range(2)] == [True, False]
    assert layout.part(0, 0).shape == (1, layout.shard_numel)


def test_a_scalar_lives_on_one_rank_and_is_empty_elsewhere() -> None:
    assert sorted(part.shape for part in parts_of(check(((),), 4, 4), 0)) == [(), (0,), (0,), (0,)]


def test_an_empty_parameter_keeps_its_shape_on_every_rank() -> None:
    assert [part.shape for part in parts_of(check(((0, 3), (4, 4)), 4, 3), 0)] == [(0, 3)] * 3


def test_no_parameters_still_make_a_chunk() -> None:
    assert check((), 4, 3).slots == ()


def test_one_rank_holds_everything_in_its_own_shape() -> None:
    shapes: tuple[Shape, ...] = ((3, 2), (), (5,), (2, 3, 4))
    assert tuple(part.shape for index in range(4) for part in parts_of(check(shapes, 4, 1), index)) == shapes


def test_the_layout_is_a_pure_function() -> None:
    make_layout.cache_clear()
    first = make_layout(((7, 5), (3,)), 4, 3)
    make_layout.cache_clear()
    assert make_layout(((7, 5), (3,)), 4, 3) == first


def test_a_thousand_ranks_cost_what_two_cost() -> None:
    shapes: tuple[Shape, ...] = ((512,), (1536, 512), (512, 512), (2048, 512), (512, 2048)) * 4

    def lines_run(num_shards: int) -> int:
        make_layout.cache_clear()
        count, before = 0, sys.gettrace()

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            layout = make_layout(shapes, 2, num_shards)
            for index in range(len(shapes)):
                layout.part(index, num_shards - 1)
        finally:
            sys.settrace(before)
        return count

    check(shapes, 2, 1024)
    assert lines_run(1024) < 2 * lines_run(2)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_without_alignment_a_vector_that_divides_is_cut_evenly(num_shards: int) -> None:
    layout = make_layout(((3 * num_shards,),), 4, num_shards, aligned=False)
    assert layout.shard_numel == 3 and layout.numel == 3 * num_shards
    assert [part.shape for part in parts_of(layout, 0)] == [(3,)] * num_shards
    check_parts(layout, 0)


def test_without_alignment_parameters_follow_each_other_without_gaps() -> None:
    layout = make_layout(((3,), (), (5,)), 2, 2, aligned=False)
    assert [slot.start for slot in layout.slots] == [0, 3, 4] and layout.numel == 10


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=["vector", "matrix", "cube"])
def test_a_row_layout_cuts_as_chunk_does(rows: int, shape: tuple[int, ...]) -> None:
    layout = make_row_layout(((rows, *shape),), 4, 4)
    assert layout.is_gathered_in_place
    check_rows(layout, 0, (rows, *shape))


def check_rows(layout: Layout, index: int, shape: tuple[int, ...]) -> None:
    full = torch.arange(prod(shape)).view(shape)
    chunks = torch.chunk(full, layout.num_shards) if shape[0] else ()
    for rank in range(layout.num_shards):
        part = layout.part(index, rank)
        mine = full.reshape(-1)[part.first : part.first + part.numel].view(part.shape)
        expected = chunks[rank] if rank < len(chunks) else full[:0]
        assert torch.equal(mine, expected)
        assert layout.cut(index).numels()[rank] == expected.numel()


SEVERAL = ((5, 3), (2,), (0, 4), (8, 2), (1,), (7, 1, 3))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 16])
def test_in_a_row_layout_of_several_parameters_each_is_cut_as_chunk_does(itemsize: int, num_shards: int) -> None:
    layout = make_row_layout(SEVERAL, itemsize, num_shards)
    assert layout.shard_numel * itemsize % 16 == 0 and layout.is_gathered_in_place == (num_shards == 1)
    assert layout.segments[0].offset == 0 and sum(one.numel for one in layout.segments) == layout.shard_numel
    for index, shape in enumerate(SEVERAL):
        check_rows(layout, index, shape)
        for rank in range(num_shards):
            assert layout.part(index, rank).offset * itemsize % 16 == 0


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("make", [make_row_layout, make_layout])
def test_spans_say_who_holds_which_elements(make: Callable[..., Layout], num_shards: int) -> None:
    layout = make(SEVERAL, 4, num_shards)
    for index, slot in enumerate(layout.slots):
        spans = [span for span in layout.cut(index).spans() if span[2]]
        parts = {rank: layout.part(index, rank) for rank in range(num_shards)}
        assert [rank for rank, _, _ in spans] == [rank for rank, part in parts.items() if part.numel]
        assert [(first, numel) for _, first, numel in spans] == [(one.first, one.numel) for one in parts.values() if one.numel]
        ends = [first + numel for _, first, numel in spans]
        assert [first for _, first, _ in spans] == [0, *ends][: len(spans)] and ends[-1:] == [slot.numel][: len(spans)]
        for rank, first, numel in spans:  # each lies in one segment, at its offset
            begin = slot.start + first
            segment = [one for one in layout.segments if one.offset * num_shards <= begin][-1]
            assert begin + numel <= segment.offset * num_shards + (rank + 1) * segment.numel
            assert parts[rank].offset == segment.offset + begin - segment.offset * num_shards - rank * segment.numel


@pytest.mark.parametrize("num_shards", [2, 3, 4, 7])
def test_the_wire_has_the_chunk_of_each_rank_in_turn(num_shards: int) -> None:
    layout = make_row_layout(SEVERAL, 4, num_shards)
    placements = [Placement("", layout, index, rank=0) for index in range(len(layout.slots))]
    cutter = Cutter([(slot.start, slot.numel, slot.shape, 0) for slot in layout.slots], torch.device("cpu"))
    wire = WireOfSegments(layout, placements, cutter)
    memory = torch.arange(layout.numel)
    starts = [[one.offset * num_shards + rank * one.numel for one in layout.segments] for rank in range(num_shards)]
    chunks = [
        torch.cat([memory[start : start + one.numel] for start, one in zip(of_rank, layout.segments, strict=True)])
        for of_rank in starts
    ]
    gathered = torch.cat(chunks)
    assert torch.equal(torch.cat(wire.segments_of(memory), 1), gathered.view(num_shards, -1))
    assert torch.equal(wire.to_memory(gathered), memory)
    filled = torch.full_like(gathered, -1)
    for index, (slot, places) in enumerate(zip(layout.slots, wire.views_of(filled), strict=True)):
        full = memory[slot.start : slot.end].view(slot.shape)
        for place, part in zip(places, wire.parts_of(index, full), strict=True):
            place.copy_(part)
    assert torch.equal(filled[filled >= 0], gathered[filled >= 0])
    assert int((filled >= 0).sum()) == sum(prod(shape) for shape in SEVERAL)
