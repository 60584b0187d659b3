"""The mark by which transformers asks whether all ranks must run the same layers, on the modules that it asks about."""

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.autograd.pytree import MANAGED
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import Block, make_net
from tests.support.ranks import on_ranks


def must_stay_in_step(module: nn.Module) -> bool:
    """What transformers asks, of the model that generates and of the encoder that drops layers."""
    return getattr(module, "_is_fsdp_managed_module", False)


@pytest.mark.parametrize("door", [fsdp.fully_shard, fsdp.FullyShardedDataParallel])
@on_ranks(2)
def test_every_module_of_a_unit_is_marked_and_no_other(rank: int, door: type[nn.Module]) -> None:
    net = make_net()
    assert not any(map(must_stay_in_step, net.modules()))
    model = door(net, auto_wrap_policy={Block}, ignored_modules={net.blocks[1].up, net.leave})
    assert must_stay_in_step(model)
    marked = {name for name, module in net.named_modules() if must_stay_in_step(module)}
    assert marked == {name for name, _ in net.named_modules()} - {"blocks.1.up", "leave"}


@on_ranks(2)
def test_no_module_is_marked_with_uneven_paths(rank: int) -> None:
    net = make_net()
    fsdp.fully_shard(net.blocks[0])
    assert must_stay_in_step(net.blocks[0])
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, uneven_paths=True)
    assert not any(map(must_stay_in_step, model.modules()))


class Writer(nn.Module):
    """Generates tokens as transformers does: a rank that is done runs the model for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(11, 8), nn.ModuleList([Block(8), Block(8)]), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, number: int, most_of_all_ranks: int) -> Tensor:
        for step in range(most_of_all_ranks if must_stay_in_step(self) else number):
            found = self(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, found], dim=1) if step < number else tokens
        return tokens


def make_writer() -> Writer:
    torch.manual_seed(0)
    return Writer()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(3)
def test_ranks_generate_other_numbers_of_tokens(rank: int, strategy: str) -> None:
    numbers = (2, 5, 3)
    model = fsdp.fully_shard(make_writer(), auto_wrap_policy={Block}, sharding_strategy=strategy)
    tokens = torch.tensor([[1, rank + 2]])
    found = model.generate(tokens, numbers[rank], max(numbers))
    assert found.shape == (1, 2 + numbers[rank])
    assert torch.equal(found, make_writer().generate(tokens, numbers[rank], max(numbers)))


@on_ranks(1)
def test_the_mark_costs_a_forward_nothing(rank: int) -> None:
    """A unit searches the attributes of its modules for tensors after each forward, and not these."""
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2)))
    model(torch.ones(1, 2))
    side_outputs = unit_ref_of(model).hooks[0]._side_outputs
    searched = {name for _, names in side_outputs._names for name in names}
    assert not searched & set(MANAGED)
