"""Steps of torch's element-wise optimizers over DTensors compute on local tensors, and leave DTensors."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp
from fsdp.compat.fully_shard import fully_shard
from fsdp.shards.optimizer_state import ELEMENT_WISE_OPTIMIZERS, NUMBERS
from tests.support.everything import some
from tests.support.ranks import on_ranks

STEPS = 3
HOWS = [
    (kind, how)
    for kind in ELEMENT_WISE_OPTIMIZERS
    for how in ("", "foreach", "fused")
    if not how or how in inspect.signature(kind.__init__).parameters
]
"""Each optimizer with the implementations that it has."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(model: nn.Module, kind: Any, how: str) -> torch.optim.Optimizer:
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, **momentum, **({how: True} if how else {}))
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).sum().backward()
        optimizer.step()
    return optimizer  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", some(3, 1, 2))
@pytest.mark.parametrize(("kind", "how"), HOWS)
def test_a_step_is_right_and_its_state_is_of_dtensors(kind: Any, how: str, size: int) -> None:
    plain = net()
    wanted = train(plain, kind, how)

    def on_rank(rank: int) -> None:
        model: Any = net()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        optimizer = train(fully_shard(model), kind, how)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-7)
            kept, same = optimizer.state[ours], wanted.state[theirs]
            assert kept.keys() == same.keys()
            for key, value in kept.items():
                if key in NUMBERS or not isinstance(value, Tensor):
                    assert value == same[key] or (value is None and same[key] is None)
                else:
                    assert isinstance(value, DTensor)
                    assert value.placements == ours.placements
                    assert torch.allclose(value.full_tensor(), same[key], rtol=1e-5, atol=1e-7)
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        assert set(optimizer.state) <= set(model.parameters())

    fsdp.simulate(size, on_rank)


@on_ranks(2)
def test_state_keeps_its_objects_and_a_closure_is_called(rank: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    calls: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    optimizer.step(closure)
    kept = {key: value for key, value in optimizer.state[model.weight].items() if key not in NUMBERS}
    version = model.weight._version
    optimizer.step()
    assert calls and model.weight._version > version
    assert all(optimizer.state[model.weight][key] is value for key, value in kept.items())


class DTensorsSeen(TorchDispatchMode):
    """Counts the operators that are called with DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(one, DTensor) for one in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("foreach", [False, True])
def test_no_operator_of_a_step_is_called_with_a_dtensor(foreach: bool) -> None:
    def on_rank(rank: int) -> tuple[int, int]:
        model: Any = fully_shard(nn.Linear(4, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=foreach)
        model(torch.ones(2, 4)).sum().backward()
        with DTensorsSeen() as first:
            optimizer.step()
        model(torch.ones(2, 4)).sum().backward()
        with DTensorsSeen() as later:
            optimizer.step()
        return first.count, later.count

    assert fsdp.simulate(2, on_rank) == [(0, 0), (0, 0)]


@on_ranks(2)
def test_a_step_may_be_compiled(rank: int) -> None:
    plain, model = net(), net()
    fully_shard(model)
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        step = torch.compile(optimizer.step, backend="eager") if one is model else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            one(torch.ones(2, 4)).sum().backward()
            step()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(fsdp.full_tensor(found), wanted)
