"""A whole parameter that a forward kept: whoever looks at it later is told so by name, and inside the forward nothing changes."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import Block, X, loss_of, make_net
from tests.support.ranks import on_ranks

READERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "print": repr,
    "format": lambda kept: f"{kept}",
    "a list": lambda kept: kept.tolist(),
    "an alias": lambda kept: kept.detach(),
    "a sum": lambda kept: kept.sum(),
    "a norm": lambda kept: kept.norm(),
    "a copy": lambda kept: kept.clone(),
    "a deep copy": copy.deepcopy,
    "a file": lambda kept: torch.save(kept, io.BytesIO()),
}


def keep(net: nn.Module, seen: list[Any], look: Callable[[nn.Parameter], Any]) -> list[nn.Parameter]:
    """In every forward, keep a weight and note what it looks like there."""
    kept: list[nn.Parameter] = []

    def hook(module: Any, args: Any, output: Tensor) -> None:
        kept[:] = [module.weight]
        seen.append(look(module.weight))

    net.blocks[1].up.register_forward_hook(hook)
    return kept


@pytest.mark.parametrize("look", READERS.values(), ids=READERS)
@on_ranks(2)
def test_looking_at_what_was_kept_is_refused_by_name(rank: int, look: Callable[[nn.Parameter], Any]) -> None:
    net, seen = make_net(), list[Any]()
    kept = keep(net, seen, look)
    plain, alike = make_net(), list[Any]()
    keep(plain, alike, look)
    model = fsdp.FullyShardedDataParallel(net, auto_wrap_policy={Block})
    for _ in range(2):
        loss_of(model(X)).backward()
        with pytest.raises(fsdp.ShardingError, match=r"of unit 'blocks.1', of shape \(16, 8\), was kept from inside a forward"):
            look(kept[0])
    plain(X)
    if not isinstance(alike[0], Tensor):
        assert str(seen[0]) == str(alike[0])
    elif look is not READERS["an alias"]:  # which has no memory either
        assert torch.equal(seen[0], alike[0])


@on_ranks(2)
def test_what_keeps_its_memory_may_be_looked_at(rank: int) -> None:
    net, seen = make_net(), list[Any]()
    kept = keep(net, seen, repr)
    loss_of(fsdp.FullyShardedDataParallel(net, auto_wrap_policy={Block}, sharding_strategy="NO_SHARD")(X)).backward()
    assert repr(kept[0]) == seen[0]


def test_a_compiled_forward_may_use_these_methods() -> None:
    """In one graph, as it does with a parameter that has none of them on it."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight
            product = x @ weight.to(torch.float64).float() + weight.reshape(-1)[:6] + sum(p.mean() for p in self.parameters())
            return product + weight.sum() + weight.clone().norm() + weight.detach().mean()

    def fn(rank: int) -> Tensor:
        module = fsdp.fully_shard(nn.Sequential(Uses()), auto_wrap_policy={Uses})
        module[0].compile(backend="eager", fullgraph=True)
        return module(X)

    torch.testing.assert_close(fsdp.simulate(1, fn)[0], Uses()(X))


@on_ranks(2)
def test_an_array_made_of_an_unsharded_parameter_is_refused_by_name(rank: int) -> None:
    """It shares the memory, which can never be given back then: a copy can be made."""
    net = make_net()
    seen: list[Any] = []
    net.blocks[1].up.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone().numpy()))
    fsdp.fully_shard(net, auto_wrap_policy={Block})
    loss_of(net(X)).backward()
    assert seen[0].shape == tuple(make_net().blocks[1].up.weight.shape)
    net.blocks[1].up.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().numpy()))
    with pytest.raises(fsdp.ShardingError, match=r"make it of a copy, weight.detach\(\).clone\(\).numpy\(\)") as told:
        net(X)
    assert any("in unit 'blocks.1'" in note for note in told.value.__notes__)
