"""`copy.deepcopy` of models that the doors of DDP and FSDP1 have wrapped: the copy trains and saves as the original."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.compat.ddp import DistributedDataParallel as DDP
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from fsdp.compat.torch_fsdp import ShardingStrategy
from tests.support.ranks import on_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def nested(**options: Any) -> Any:
    model = net()
    model[0] = FSDP(model[0], use_orig_params=True, **options)
    return FSDP(model, use_orig_params=True, **options)


MODELS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDP(net()),
    "one instance": lambda: FSDP(net(), use_orig_params=True),
    "nested instances": nested,
    "kept after the forward": lambda: nested(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "not sharded": lambda: nested(sharding_strategy=ShardingStrategy.NO_SHARD),
}


def trained(model: Any, rank: int, steps: range) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_copy_trains_and_saves_as_the_original(rank: int, name: str) -> None:
    model = MODELS[name]()
    before = trained(model, rank, range(2))
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and not {*map(id, model.parameters())} & {*map(id, copied.parameters())}
    torch.testing.assert_close({**copied.state_dict()}, before, rtol=0, atol=0)
    after = trained(copied, rank, range(2, 4))
    torch.testing.assert_close({**model.state_dict()}, before, rtol=0, atol=0)
    torch.testing.assert_close(trained(model, rank, range(2, 4)), after, rtol=0, atol=0)
    copied.load_state_dict(before)
    torch.testing.assert_close({**copied.state_dict()}, before, rtol=0, atol=0)


@on_ranks(2)
def test_an_inner_instance_is_copied_with_the_outermost_one(rank: int) -> None:
    model = nested()
    with pytest.raises(fsdp.ShardingError, match=re.escape("copy.deepcopy: unit '0' is a part of root")):
        copy.deepcopy(model.module[0])
