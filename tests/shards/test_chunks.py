"""Ranges of a flattened tensor as boxes."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.shards.cut import chunks_of

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_property_chunks_tile_the_range_in_order_and_are_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - first))
    full = torch.arange(total).view(shape)
    found = []
    chunks = chunks_of(shape, first, numel)
    for chunk in chunks:
        assert chunk.start == len(found)
        inside = full[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
        found += inside.reshape(-1).tolist()
    assert found == list(range(first, first + numel))
    assert len(chunks) <= max(2 * len(shape) - 1, 1)


def test_the_bound_is_reached() -> None:
    assert len(chunks_of((3, 3, 3), 1, 25)) == 5


def test_complete_rows_are_one_chunk() -> None:
    assert chunks_of((4, 6), 6, 12) == (((1, 0), (2, 6), 0),)
