"""Divide factors of units: what they do, and what is refused."""

import pytest
import torch
from torch import nn

import fsdp
from fsdp.compat.shared.instances import divide_by
from fsdp.runtime.registry import unit_ref_of
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (2.0, 4.0), (0.5, 1.0)])
@on_ranks(3)
def test_the_sum_is_divided_by_both_factors(rank: int, strategy: str, before: float, after: float) -> None:
    torch.manual_seed(0)
    model = fsdp.fully_shard(nn.Linear(4, 4), sharding_strategy=strategy)
    divide_by("here", unit_ref_of(model), before, after)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
    # every element of the sum is 1 + 2 + 3
    for name, p in model.named_parameters():
        if not p.numel():
            continue
        total = torch.full_like(p, 6.0 if name == "weight" else 3.0)
        torch.testing.assert_close(p.grad, total / (before * after))


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4))
    ref = unit_ref_of(model)
    for before, after in ((0, 1), (1, float("inf"))):
        with pytest.raises(fsdp.ShardingError, match=r"here: a factor must be a positive number, not (0|inf)"):
            divide_by("here", ref, before, after)
    fsdp.register_comm_hook(model, None, lambda state, bucket: None)
    with pytest.raises(fsdp.ShardingError, match="a communication hook reduces the gradients, and it alone divides them"):
        divide_by("here", ref, 1, 1)
