"""Where unsharded parameters are after unshard, reshard and changes of the reshard policy."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp.compat.fsdp2 import residence
from fsdp.compat.fsdp2.wrap import fully_shard
from fsdp.errors import ShardingError
from fsdp.runtime.registry import UnitRef, unit_ref_of
from state_machine import ReshardPolicy, ResidencyState
from tests.support.ranks import on_ranks


def wrapped() -> tuple[nn.Sequential, list[UnitRef]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    refs = [ref for one in model.modules() if (ref := unit_ref_of(one)) is not None]
    return model, refs


def states_of(ref: UnitRef) -> list[ResidencyState]:
    """Of the two units inside the root."""
    return [unit.residency for unit in ref.engine.snapshot().units[1:]]


@on_ranks(2)
def test_unshard_launches_wait_shows_and_reshard_frees(rank: int) -> None:
    _, refs = wrapped()
    handle = residence.unshard(refs[1], async_op=True)
    assert states_of(refs[1])[0] is ResidencyState.UNSHARDING
    handle.wait()
    assert states_of(refs[1])[0] is ResidencyState.UNSHARDED
    handle.wait()  # a second time does nothing
    residence.reshard(refs[1])
    assert states_of(refs[1])[0] is ResidencyState.SHARDED


@on_ranks(2)
def test_a_unit_that_is_kept_after_its_forward_is_cached_until_the_backward(rank: int) -> None:
    model, refs = wrapped()
    residence.set_policy(refs[1], ReshardPolicy.AFTER_BACKWARD, "set_reshard_after_forward")
    model(torch.ones(1, 4)).sum()
    assert states_of(refs[1]) == [ResidencyState.CACHED, ResidencyState.SHARDED]


@on_ranks(2)
def test_a_unit_that_is_kept_after_its_backward_is_cached(rank: int) -> None:
    model, refs = wrapped()
    residence.set_policy(refs[1], ReshardPolicy.NEVER, "set_reshard_after_backward")
    model(torch.ones(1, 4)).sum().backward()
    assert states_of(refs[1]) == [ResidencyState.CACHED, ResidencyState.SHARDED]


@on_ranks(2)
def test_the_policy_changes_between_steps_only(rank: int) -> None:
    model: Any
    model, refs = wrapped()
    policy = (ReshardPolicy.AFTER_BACKWARD, "set_reshard_after_forward")
    model[1].register_forward_hook(lambda *_: residence.set_policy(refs[1], *policy))
    with pytest.raises(ShardingError, match="set_reshard_after_forward: call it outside any forward"):
        model(torch.ones(1, 4))
