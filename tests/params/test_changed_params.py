"""Parameters that user code replaces or changes, in a slot of a module or in its own forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.compat import fully_shard
from fsdp.shards.shard_parameter import moved_shards
from tests.support.models import two_units
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_parameter_put_in_a_slot_after_wrapping_is_refused(rank: int) -> None:
    model = two_units()
    model.module[1].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(fsdp.ShardingError, match=r"Linear\.weight in unit '1' was replaced by another parameter"):
        model(torch.ones(1, 3))


WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


class Replaces(nn.Module):
    """Puts other data under its parameter, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.w.data = self.w.data * 2
        return x * self.w


@WORLDS
def test_a_state_loaded_after_weights_were_replaced_in_a_forward_is_seen(world_size: int) -> None:
    """The whole parameter still pointed at the data that the forward had made, whatever was gathered."""

    def one_rank(rank: int) -> list[float]:
        model = fsdp.fully_shard(Replaces())
        found = [model(torch.ones(4)).sum().item()]
        fsdp.load_full_state_dict(model, {"w": torch.full((4,), 5.0)})
        found.append(model(torch.ones(4)).sum().item())
        return [*found, fsdp.full_state_dict(model, rank0_only=False)["w"].sum().item()]

    assert simulate(world_size, one_rank) == [[8.0, 40.0, 40.0]] * world_size


class EditsAndFails(nn.Module):
    """Changes a parameter, and runs a backward; one rank fails before or after that."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        loss = self.block(x).sum()
        if self.fails == "before":
            raise ValueError("no")
        loss.backward()
        if self.fails == "after":
            raise ValueError("no")
        return self.block(x) * self.scale


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("failing", [{1}, {0, 1}])
@on_ranks(2)
def test_what_a_forward_changed_before_a_backward_of_its_own_is_forgotten_if_it_fails(
    rank: int, when: str, failing: set[int]
) -> None:
    """On all ranks, or the parameter would be torn: the others had taken the change when they began their backward."""
    model = fsdp.fully_shard(EditsAndFails(), auto_wrap_policy={nn.Linear})
    x = torch.ones(2, 4)
    older = model(x).sum()
    model.fails = when if rank in failing else ""
    with pytest.raises(ValueError if rank in failing else fsdp.PeerFailed):
        model(x)
    model.fails = ""
    older.backward()  # nothing it computed with has changed
    assert fsdp.full_state_dict(model, rank0_only=False)["scale"].tolist() == [0.5] * 4


def test_a_shard_that_another_model_has_let_go_of_is_no_change_of_dtensors() -> None:
    """The shards of all models that `p.data = x` has moved are known in one place, which empties when the last one is freed."""

    def on_rank(rank: int) -> bool:
        other = fsdp.fully_shard(nn.Linear(4, 4))
        other.weight.data = other.weight.data * 2
        model: Any = fully_shard.fully_shard(nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        moved_shards.clear()
        loss.backward()
        return model.weight.grad is not None

    assert fsdp.simulate(2, on_rank) == [True, True]


@on_ranks(2)
def test_data_that_was_kept_from_inside_a_forward_is_not_put_back(rank: int) -> None:
    """Its memory is released, and reading it would end the process."""
    model, kept = fsdp.fully_shard(nn.Linear(4, 4)), list[Tensor]()
    model.register_forward_pre_hook(lambda module, args: kept.append(module.weight.data))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(fsdp.ShardingError, match=r"p\.data = x of 'weight'.*: x has no memory\. It was kept from inside"):
        model.weight.data = kept[0]
    model(torch.ones(2, 4)).sum().backward()
