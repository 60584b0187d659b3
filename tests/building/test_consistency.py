"""Ranks that wrap different models: the first difference is named, with its rank, on every rank."""

from collections.abc import Callable

import pytest
from torch import nn

import fsdp
from fsdp.comm.simulated import simulate
from tests.support.models import Block, Net, X, loss_of, make_net, two_layers
from tests.support.ranks import on_ranks, refused_everywhere


class TestRanksThatDiffer:
    @pytest.mark.parametrize(
        ("build", "text"),
        [
            (
                lambda rank: fsdp.fully_shard(Net(width=8 + rank)),
                "parameter 'enter.weight' (8, 6) torch.float32, but rank 1 has parameter 'enter.weight' (9, 6)",
            ),
            (
                lambda rank: fsdp.fully_shard(Net().double() if rank else Net()),
                "but rank 1 has parameter 'enter.weight' (8, 6) torch.float64",
            ),
            (
                lambda rank: fsdp.fully_shard(Net().requires_grad_(not rank)),
                "but rank 1 has parameter 'enter.weight' (8, 6) torch.float32 frozen",
            ),
            (
                lambda rank: fsdp.fully_shard(Net(), auto_wrap_policy={Block} if rank else None),
                "rank 0 has parameter 'blocks.0.norm.weight' (8,) torch.float32, but rank 1 has parameter 'leave.weight'",
            ),
            (
                lambda rank: fsdp.fully_shard(Net(blocks=2 + rank), auto_wrap_policy={Block}),
                "has nothing, but rank 1 has unit 'blocks.2'",
            ),
            (lambda rank: fsdp.fully_shard(Net(), prefetch=rank), "rank 0 has prefetch=0, but rank 1 has prefetch=1"),
            (
                lambda rank: fsdp.fully_shard(nn.Linear(1, 1, bias=not rank)),
                "parameter 'bias' (1,) torch.float32, but rank 1 has nothing",
            ),
        ],
        ids=["shape", "dtype", "frozen", "policy", "number of units", "options", "one parameter less"],
    )
    def test_the_first_difference_is_named_with_its_rank(self, build: Callable[[int], object], text: str) -> None:
        refused_everywhere(2, build, text)

    @on_ranks(3, "rank 0 has parameter 'a.weight' (2, 2) torch.float32, but rank 2 has parameter 'b.weight'")
    def test_the_order_of_modules_matters(self, rank: int) -> None:
        model = nn.Module()
        for name in "ba" if rank == 2 else "ab":
            model.add_module(name, nn.Linear(2, 2))
        fsdp.fully_shard(model)

    @on_ranks(3, "prefetch must be a number of units, 0 or more, not -1")
    def test_a_refusal_on_one_rank_reaches_all(self, rank: int) -> None:
        fsdp.fully_shard(make_net(), prefetch=-1 if rank == 1 else 1)

    @on_ranks(2)
    def test_after_a_refusal_the_ranks_can_wrap_again(self, rank: int) -> None:
        net = make_net()
        with pytest.raises(fsdp.ShardingError):
            fsdp.fully_shard(net, prefetch=rank)
        loss_of(fsdp.fully_shard(net)(X)).backward()


def test_a_policy_that_raises_on_one_rank_reaches_all() -> None:
    def one_rank(rank: int) -> str:
        def policy(name: str, module: nn.Module) -> bool:
            return bool({0: True}[rank])

        with pytest.raises((KeyError, fsdp.ShardingError)) as raised:
            fsdp.fully_shard(two_layers(), auto_wrap_policy=policy)
        return str(raised.value)

    texts = simulate(2, one_rank)
    assert texts[1] == "1" and "rank 1 could not wrap its module: KeyError(1)" in texts[0]
