"""Memory comes and goes under living tensors, and the books are exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.device.storage import MemoryTracker, ResizableStorage, ReusableBuffer, storage_key
from tests.support.models import is_at_rest
from tests.support.ranks import on_ranks


def test_released_memory_comes_back_under_the_same_tensors() -> None:
    tracker = MemoryTracker()
    buffer = torch.arange(6.0)
    view = buffer[2:4]
    memory = ResizableStorage(buffer, "whole")
    assert buffer.untyped_storage().size() == 0
    memory.allocate(tracker)
    buffer.copy_(torch.arange(6.0) * 2)
    assert view.tolist() == [4.0, 6.0]
    memory.release(tracker)
    assert buffer.untyped_storage().size() == 0


def test_both_do_nothing_the_second_time() -> None:
    tracker = MemoryTracker()
    memory = ResizableStorage(torch.empty(6), "whole")
    for _ in range(2):
        memory.allocate(tracker)
        assert tracker.held == {"whole": 24}
    for _ in range(2):
        memory.release(tracker)
        assert tracker.now == 0


def test_the_peak_is_the_most_ever_held_of_all_kinds_together() -> None:
    tracker = MemoryTracker()
    a, b = ResizableStorage(torch.empty(4), "a"), ResizableStorage(torch.empty(8, dtype=torch.bfloat16), "b")
    a.allocate(tracker)
    a.release(tracker)
    b.allocate(tracker)
    assert (tracker.now, tracker.peak) == (16, 16)
    a.allocate(tracker)
    assert (tracker.now, tracker.peak) == (32, 32)
    a.release(tracker)
    b.release(tracker)
    assert (tracker.now, tracker.peak) == (0, 32)


def test_an_empty_buffer_costs_nothing() -> None:
    tracker = MemoryTracker()
    ResizableStorage(torch.empty(0), "whole").allocate(tracker)
    assert tracker.peak == 0


def test_tensors_of_one_memory_have_one_key_also_while_it_is_released() -> None:
    one, other = torch.empty(6), torch.empty(6)
    assert storage_key(one[1:3]) == storage_key(one.view(2, 3).t()) == storage_key(one)
    assert storage_key(one) != storage_key(other)
    ResizableStorage(one, "whole")
    ResizableStorage(other, "whole")
    assert storage_key(one) != storage_key(other)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@on_ranks(2)
def test_tensors_without_a_storage_go_through_units_and_are_attributes_of_them(rank: int, layout: torch.layout) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.adjacency = nn.Linear(2, 2), torch.eye(2).to_sparse(layout=layout)
            self.register_buffer("edges", self.adjacency)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.adjacency @ self.linear(x), self.adjacency

    model = fsdp.fully_shard(nn.Sequential(Graph()), auto_wrap_policy={Graph})
    output, adjacency = model(torch.ones(2, 2))
    output.sum().backward()
    assert adjacency.layout is layout and "0.edges" in model.state_dict()


@on_ranks(2)
def test_a_forward_whose_output_cannot_be_searched_leaves_the_model_as_it_was(rank: int) -> None:
    class Broken(dict[str, Tensor]):
        def values(self) -> Any:
            raise RuntimeError("no values")

    model = fsdp.fully_shard(nn.Linear(2, 2))
    handle = model.register_forward_hook(lambda *_: Broken(), prepend=True)
    with pytest.raises(RuntimeError, match="no values"):
        model(torch.ones(1, 2))
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert is_at_rest(model)


def test_spare_memory_is_given_out_again_when_nobody_has_any_of_it() -> None:
    spare, like = ReusableBuffer(), torch.empty(1)
    first = spare.take(8, like)
    place = first.data_ptr()
    part = first[2:4]
    del first
    assert spare.take(8, like).data_ptr() != place
    array = part.numpy()
    del part
    assert spare.take(8, like).data_ptr() != place
    del array
    assert spare.take(8, like).data_ptr() == place


@on_ranks(2)
def test_gradients_that_are_kept_are_not_written_by_the_next_backward(rank: int) -> None:
    """Under NO_SHARD on the host their memory is used again, unless somebody has them."""
    model = fsdp.fully_shard(nn.Linear(4, 4, bias=False), sharding_strategy="NO_SHARD")
    places, kept = [], None
    for step in range(4):
        model(torch.full((1, 4), float(step))).sum().backward()
        gradient = model.weight.grad
        places.append(gradient.data_ptr())
        kept = gradient if step == 1 else kept
        del gradient
        model.zero_grad()
    assert kept is not None and kept.tolist() == [[1.0] * 4] * 4
    assert [places[0] == places[1], places[2] == places[1], places[3] == places[1]] == [True, False, False]
