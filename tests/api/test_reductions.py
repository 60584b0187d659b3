"""set_divide_factors: what gradients are divided by, and what it refuses."""

import pytest
import torch
from torch import nn

import fsdp
from fsdp.api.reductions import set_divide_factors
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (2.0, 4.0), (0.5, 1.0)])
@on_ranks(3)
def test_the_sum_is_divided_by_both_factors(rank: int, strategy: str, before: float, after: float) -> None:
    torch.manual_seed(0)
    model = fsdp.fully_shard(nn.Linear(4, 4), sharding_strategy=strategy)
    set_divide_factors(model, before, after)
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
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
    with pytest.raises(fsdp.ShardingError, match="set_divide_factors: a factor must be a positive number, not 0"):
        set_divide_factors(model, 0, 1)
    with pytest.raises(fsdp.ShardingError, match="set_divide_factors: a factor must be a positive number, not inf"):
        set_divide_factors(model, 1, float("inf"))
    with pytest.raises(
        fsdp.ShardingError, match="set_divide_factors: Linear is a part of root 'Sequential'; call it on the root"
    ):
        set_divide_factors(model[0], 1, 1)
    fsdp.register_comm_hook(model, None, lambda state, bucket: None)
    with pytest.raises(fsdp.ShardingError, match="a communication hook reduces the gradients, and it alone divides them"):
        set_divide_factors(model, 1, 1)


@on_ranks(2)
def test_a_hook_does_not_replace_a_divisor_in_silence(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(2, 2))
    set_divide_factors(model, 1, 4)
    with pytest.raises(fsdp.ShardingError, match="the hook does the sums, so a divide factor means nothing"):
        fsdp.register_comm_hook(model, None, print)
