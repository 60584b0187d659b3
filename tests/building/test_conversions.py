"""`half()`, `to(...)` and the like of a module whose shards are DTensors: refused before anything changes, or nothing to do."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fsdp
from tests.support.ranks import on_ranks


def wrapped() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    fsdp.fully_shard(model[1], dtensors=True)
    return fsdp.fully_shard(model, dtensors=True)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda model: model.to(torch.float64)])
@on_ranks(2)
def test_another_dtype_is_refused_before_anything_changes(rank: int, convert: Callable[[nn.Module], object]) -> None:
    model = wrapped()
    for part, unit in ((model, "Sequential"), (model[1], "1"), (copy.deepcopy(model), "Sequential")):
        with pytest.raises(fsdp.ShardingError, match=rf"unit '{unit}', which are torch.float32 on cpu, .* before wrapping it"):
            convert(part)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}


@on_ranks(2)
def test_what_changes_no_dtype_applies_to_values_and_buffers(rank: int) -> None:
    model = wrapped()
    parameters, before = [*model.parameters()], [fsdp.full_tensor(p) for p in model.parameters()]
    model.to("cpu").float()
    torch.testing.assert_close([fsdp.full_tensor(p) for p in model.parameters()], before)
    model._apply(lambda tensor: tensor * 2)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close([fsdp.full_tensor(p) for p in parameters], [tensor * 2 for tensor in before])
    assert model[1][1].running_var.tolist() == [2.0] * 4
    model(torch.randn(8, 4)).square().sum().backward()
    assert all(p.grad is not None for p in parameters)


@on_ranks(2)
def test_an_unwrapped_module_is_converted(rank: int) -> None:
    model = fsdp.unwrap(wrapped())
    assert {p.dtype for p in model.half().parameters()} == {torch.float16}
