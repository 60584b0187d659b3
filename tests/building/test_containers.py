"""Lists and dicts of modules as units: those that have a forward."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp
from fsdp.compat import fully_shard as fsdp2
from fsdp.compat import torch_fsdp as fsdp1
from fsdp.runtime.registry import unit_ref_of
from tests.support.ranks import on_ranks


class Chunk(nn.ModuleList):
    """As in DINOv2: a part of the blocks, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + torch.tanh(block(x))
        return x


class Named(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self["second"](self["first"](x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    named = Named({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    return nn.Sequential(Chunk([nn.Linear(8, 8), nn.Linear(8, 8)]), named, nn.Linear(8, 1))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.linspace(-1, 1, 16).view(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_fsdp1(model: nn.Module) -> Any:
    return fsdp1.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Chunk, Named}), use_orig_params=True)


def by_fsdp2(model: Any) -> Any:
    for one in (model[0], model[1], model):
        fsdp2.fully_shard(one)
    return model


def by_policy(model: nn.Module) -> Any:
    return fsdp.fully_shard(model, auto_wrap_policy={Chunk, Named})


def by_hand(model: Any) -> Any:
    return fsdp.fully_shard(model, auto_wrap_policy=lambda name, module: name in ("0", "1"))


@pytest.mark.parametrize("wrap", [by_fsdp1, by_fsdp2, by_policy, by_hand])
@on_ranks(2)
def test_a_list_or_dict_with_a_forward_is_a_unit_and_trains_as_in_a_single_process(rank: int, wrap: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The passed-in `module` is on CPU")
        model, alone = wrap(net()), net()
    train(model)
    train(alone)
    assert sum(unit_ref_of(module) is not None for module in model.modules()) == 3
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(fsdp.full_tensor(mine).detach(), expected.detach())
