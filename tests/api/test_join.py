"""fsdp.join: ranks with different numbers of batches."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import CASES, Block, Net, assert_close, is_at_rest, join, loss_of, weights_of

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "FULL_SHARD, shared buckets": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=1, first_bucket_mb=1)},
    "SHARD_GRADIENTS": {"sharding_strategy": "SHARD_GRADIENTS"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
}
EVERY = pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
COUNTS = (3, 1, 4, 2)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def batch(rank: int, number: int) -> Tensor:
    return CASES["net"].batch(rank, number)


def alone(counts: tuple[int, ...], micro: int = 1) -> dict[str, Tensor]:
    """One process: each step averages over the ranks that have data left."""
    net = CASES["net"].model()
    optimizer = SGD(net.parameters())
    for number in range(max(counts) // micro):
        ranks = [rank for rank, count in enumerate(counts) if count // micro > number]
        for rank in ranks:
            for m in range(micro):
                (loss_of(net(batch(rank, number * micro + m))) / len(ranks)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def trained(rank: int, counts: tuple[int, ...], micro: int = 1, **options: Any) -> dict[str, Tensor]:
    model = fsdp.fully_shard(CASES["net"].model(), auto_wrap_policy={Block}, **options)
    optimizer = SGD(model.parameters())

    def step() -> None:
        fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with fsdp.join(model, step, inputs=(batch(0, 0),)) as joined:
        for number in range(0, counts[rank], micro):
            with fsdp.no_sync(model):
                for m in range(micro - 1):
                    loss_of(model(batch(rank, number + m))).backward()
            loss_of(model(batch(rank, number + micro - 1))).backward()
            joined.step()
    assert is_at_rest(model)
    return weights_of(model)


def unsharded(found: list[dict[str, Tensor]], options: dict[str, Any]) -> dict[str, Tensor]:
    shapes = {name: p.shape for name, p in CASES["net"].model().named_parameters()}
    shards = options.get("mesh", (1, 1 if options.get("sharding_strategy") == "NO_SHARD" else len(found)))[1]
    for other in range(shards, len(found)):
        assert all(torch.equal(found[other][name], found[other % shards][name]) for name in shapes), "replicas differ"
    return {name: join([one[name] for one in found[:shards]], shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "counts"),
    [*((name, COUNTS) for name in STRATEGIES), *(("FULL_SHARD", one) for one in ((0, 2, 2, 3), (2, 2, 2, 2), (1, 0, 0, 0)))],
    ids=str,
)
def test_gradients_are_averaged_over_the_ranks_that_have_data_left(name: str, counts: tuple[int, ...]) -> None:
    options = STRATEGIES[name]
    found = fsdp.simulate(4, lambda rank: trained(rank, counts, **options))
    assert_close(unsharded(found, options), alone(counts))


@EVERY
def test_accumulation_under_no_sync_too(options: dict[str, Any]) -> None:
    counts = (6, 2, 4, 2)
    found = fsdp.simulate(4, lambda rank: trained(rank, counts, micro=2, **options))
    assert_close(unsharded(found, options), alone(counts, micro=2))


@pytest.mark.parametrize("counts", [COUNTS, (0, 2, 2, 3)], ids=str)
def test_gradients_may_be_zeroed_outside_the_step(counts: tuple[int, ...]) -> None:
    """Before a batch or after the step, which only ranks with data come by; and not at all, where they add up."""

    def fn(rank: int, where: str) -> dict[str, Tensor]:
        model = fsdp.fully_shard(CASES["net"].model(), auto_wrap_policy={Block})
        optimizer = SGD(model.parameters())
        with fsdp.join(model, optimizer.step, inputs=(batch(0, 0),)) as joined:
            for number in range(counts[rank]):
                if where == "before":
                    optimizer.zero_grad()
                loss_of(model(batch(rank, number))).backward()
                joined.step()
                if where == "after":
                    optimizer.zero_grad()
        return weights_of(model)

    for where in ("before", "after", "never"):
        plain = CASES["net"].model()
        optimizer = SGD(plain.parameters())
        for number in range(max(counts)):
            ranks = [rank for rank, count in enumerate(counts) if count > number]
            for rank in ranks:
                (loss_of(plain(batch(rank, number))) / len(ranks)).backward()
            optimizer.step()
            if where != "never":
                optimizer.zero_grad()
        found = fsdp.simulate(4, partial(fn, where=where))
        assert_close(unsharded(found, {}), {name: p.detach() for name, p in plain.named_parameters()})


def test_evaluations_inside_are_served_and_running_statistics_stay() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.leave = nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.norm(x))

    def fn(rank: int) -> Any:
        torch.manual_seed(0)
        model = fsdp.FullyShardedDataParallel(Normed(), auto_wrap_policy={nn.Linear})
        optimizer = SGD(model.parameters())
        seen = []
        with fsdp.join(model, optimizer.step) as joined:
            for number in range(1 + rank):
                loss_of(model(batch(rank, number)[:, 0])).backward()
                joined.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(batch(rank, number)[:, 0])
                seen.append(int(model.norm.num_batches_tracked))
        return seen[-1], int(model.norm.num_batches_tracked)

    assert fsdp.simulate(3, fn) == [(2, 2), (4, 4), (6, 6)]


def test_a_rank_without_any_batch_needs_inputs() -> None:
    def fn(rank: int) -> None:
        model = fsdp.fully_shard(Net(1))
        with fsdp.join(model, lambda: None) as joined:
            for _ in range(rank):
                loss_of(model(batch(0, 0))).backward()
                joined.step()

    with pytest.raises((fsdp.ShardingError, fsdp.WorldError), match="had no batch at all"):
        fsdp.simulate(2, fn)


def test_ranks_that_do_different_things_get_an_error() -> None:
    def fn(rank: int) -> None:
        model = fsdp.fully_shard(Net(1))
        with fsdp.join(model, lambda: None) as joined:
            loss = loss_of(model(batch(0, 0)))
            if rank:
                loss.backward()
            joined.step()

    with pytest.raises(fsdp.ShardingError, match="of 2 ranks that have data left 1 reduces, 1 steps at the same time"):
        fsdp.simulate(2, fn)


@pytest.mark.parametrize(
    ("model", "step", "text"),
    [
        (lambda: nn.Linear(2, 2), lambda: None, "join"),
        (lambda: nn.Sequential(fsdp.fully_shard(nn.Linear(2, 2))), lambda: None, "join takes one wrapped model"),
        (lambda: fsdp.fully_shard(nn.Linear(2, 2)), None, "join takes a function that steps"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, step: Any, text: str) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match=text), fsdp.join(model(), step):
            pass

    fsdp.simulate(1, fn)


def hooked_model() -> nn.Module:
    model = fsdp.fully_shard(nn.Linear(2, 2))
    fsdp.register_comm_hook(model, None, lambda state, bucket: torch.futures.Future())
    return model


def test_what_a_finished_rank_cannot_serve_is_refused() -> None:
    def fn(rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match="averages over all ranks"), fsdp.join(hooked_model(), print):
            pass
        model = fsdp.fully_shard(nn.Linear(2, 2), reduction=fsdp.ReductionPolicy(static_graph=True))
        with pytest.raises(fsdp.ShardingError, match="leave out reduction"), fsdp.join(model, print):
            pass

    fsdp.simulate(2, fn)


def test_after_it_everything_is_as_before() -> None:
    def fn(rank: int) -> None:
        model = fsdp.fully_shard(Net(1))
        with pytest.raises(ZeroDivisionError), fsdp.join(model, lambda: None):
            raise ZeroDivisionError
        with (
            fsdp.join(model, lambda: None),
            pytest.raises(fsdp.ShardingError, match="inside another join"),
            fsdp.join(model, print),
        ):
            pass
        loss_of(model(batch(0, 0))).backward()
        assert is_at_rest(model)

    fsdp.simulate(2, fn)
