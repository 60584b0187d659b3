"""Parameters that are cut along their last dimension."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp
from fsdp.runtime.registry import unit_ref_of
from tests.api.test_comm_hooks import average
from tests.support.processes import results_of
from tests.support.ranks import on_ranks, refused_everywhere

BOTH = [0, 1]
"""The ranks whose batches a model that is not sharded trains on."""


class Net(nn.Module):
    """The parent reads the weight of a layer, which another unit may have; a buffer counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x)))
        return out + x @ self.inner.weight.t() @ self.inner.weight * 0.1


class Clamped(nn.Linear):
    """Changes its weight in place in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


def columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(model: Any, **options: Any) -> Any:
    for child in list(model.children()):
        fsdp.fully_shard(child, dtensors=True, shard_placement_fn=columns, **options)
    return fsdp.fully_shard(model, dtensors=True, shard_placement_fn=columns, **options)


def batch(step: int, rank: int, width: int = 5) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(2 * step + rank))


def train(model: Any, ranks: list[int], accumulates: bool = False) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    wrapped = unit_ref_of(model) is not None
    for step in range(4):
        if wrapped and accumulates:
            fsdp.set_requires_gradient_sync(model, step % 2 == 1)
        torch.stack([model(batch(step, rank)).square().mean() for rank in ranks]).mean().backward()
        if not accumulates or step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def hooked(model: Any, ranks: list[int]) -> dict[str, Tensor]:
    """Hooks on parameters double the gradient."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return train(model, ranks)


def by_comm_hook(model: Any, rank: int) -> dict[str, Tensor]:
    """A communication hook sees gradients in the shapes of the full parameters."""

    def hook(shards: int, bucket: Any) -> Any:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        assert shapes == [tuple(p.shape) for p in bucket.parameters()], shapes
        return average(shards, bucket)

    fsdp.register_comm_hook(model, 2, hook)
    return train(model, [rank])


def in_place(model: Any, ranks: list[int]) -> dict[str, Tensor]:
    model(batch(0, ranks[0]))
    return {name: full(p) for name, p in model.named_parameters()}


def clamped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Clamped(5, 4))


WAYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[..., dict[str, Tensor]]]] = {
    "guard": (net, {"guard": True}, train),
    "uneven paths": (net, {"uneven_paths": True}, train),
    "coalesced": (net, {"reduction": fsdp.ReductionPolicy(coalesce_cap_mb=1)}, train),
    "kept": (net, {"reshard_after_forward": False}, train),
    "accumulated": (net, {}, partial(train, accumulates=True)),
    "hooks": (net, {}, hooked),
    "changed in place": (clamped, {}, in_place),
}
"""A model, the options it is wrapped with, and what is done with it."""


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_one_process(way: str) -> None:
    make, options, use = WAYS[way]
    expected = use(make(), BOTH)
    for found in fsdp.simulate(2, lambda rank: use(sharded(make(), **options), [rank])):
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_a_communication_hook_reduces_them(rank: int) -> None:
    torch.testing.assert_close(by_comm_hook(sharded(net()), rank), train(net(), BOTH))


def states_and_averages(rank: int, *_: object) -> None:
    """Train, and look at all that has the values."""
    expected, model, other = train(net(), BOTH), sharded(net()), sharded(net())
    kept = [p.full_tensor() for p in model.parameters()]  # as code that has looked at the weights does
    assert str(model.inner.weight.placements) == "(Shard(dim=1),)"
    assert tuple(model.inner.weight.to_local().shape) == (7, 3 - rank)

    def holds(one: nn.Module, added: float) -> None:
        torch.testing.assert_close({n: full(p) - added for n, p in one.named_parameters()}, expected)

    torch.testing.assert_close(train(model, [rank]), expected)
    other.load_state_dict(model.state_dict())
    holds(other, 0.0)
    other.load_state_dict({name: value + 1 for name, value in expected.items()})
    holds(other, 1.0)
    assert torch.equal(fsdp.full_tensor(model.inner.weight), full(model.inner.weight))
    torch.testing.assert_close(fsdp.full_state_dict(model, rank0_only=False), expected)
    average = fsdp.EMA(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    average.update()
    with average.averaged_weights():
        holds(model, 0.5)
    assert all(one.requires_grad for one in kept)


def test_states_and_averages_of_a_trained_model() -> None:
    fsdp.simulate(2, states_and_averages)


@pytest.mark.gloo
def test_states_and_averages_over_gloo(tmp_path: Path) -> None:
    results_of(states_and_averages, 2, tmp_path)


REFUSED: dict[str, Callable[[int], dict[str, Any]]] = {
    "shard_placement_fn chooses the placements of DTensors; give dtensors=True": lambda rank: {
        "shard_placement_fn": columns,
        "dtensors": False,
    },
    "shard_placement_fn must be a function of a parameter, not 7": lambda rank: {"shard_placement_fn": 7},
    "shard_placement_fn must return Shard(dim) or None; for 'weight' it returned 1": lambda rank: {
        "shard_placement_fn": lambda p: 1
    },
    "shard_placement_fn: Shard dim 1 is invalid for 1D tensor 'bias'": lambda rank: {"shard_placement_fn": lambda p: Shard(1)},
    "the model is built differently on different ranks": lambda rank: {
        "shard_placement_fn": lambda p: Shard(0 if p.dim() < 2 else rank)
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_placements_that_cannot_be_are_refused(text: str) -> None:
    refused_everywhere(2, lambda rank: fsdp.fully_shard(nn.Linear(2, 2), **{"dtensors": True, **REFUSED[text](rank)}), text)
