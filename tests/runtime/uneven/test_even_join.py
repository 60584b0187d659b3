"""fsdp.join: ranks with different numbers of batches."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.shards.shard_tensor import plain
from tests.support.models import CASES, Block, Net, assert_close, is_at_rest, join_all, loss_of, weights_of
from tests.support.ranks import on_ranks

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "FULL_SHARD, shared buckets": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=1, first_bucket_mb=1)},
    "SHARD_GRADIENTS": {"sharding_strategy": "SHARD_GRADIENTS"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
}
COUNTS = (3, 1, 4, 2)
OTHER_COUNTS = (0, 2, 2, 3), (2, 2, 2, 2), (1, 0, 0, 0)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def batch(rank: int, number: int) -> Tensor:
    return CASES["net"].batch(rank, number)


@cache
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

    inputs = None if options.get("uneven_paths") else (batch(0, 0),)
    with fsdp.join(model, step, inputs) as joined:
        for number in range(0, counts[rank], micro):
            with fsdp.no_sync(model):
                for m in range(micro - 1):
                    loss_of(model(batch(rank, number + m))).backward()
            loss_of(model(batch(rank, number + micro - 1))).backward()
            joined.step()
    assert is_at_rest(model)
    return weights_of(model)


def unsharded(found: list[dict[str, Tensor]], options: dict[str, Any]) -> dict[str, Tensor]:
    parameters = dict(CASES["net"].model().named_parameters())
    shards = options.get("mesh", (1, 1 if options.get("sharding_strategy") == "NO_SHARD" else len(found)))[1]
    for other in range(shards, len(found)):
        assert all(torch.equal(found[other][name], found[other % shards][name]) for name in parameters), "replicas differ"
    return join_all(found[:shards], parameters)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "counts", "uneven"),
    [
        *((name, COUNTS, False) for name in STRATEGIES),
        *(("FULL_SHARD", counts, False) for counts in OTHER_COUNTS),
        *((name, counts, True) for name in STRATEGIES for counts in (COUNTS, *OTHER_COUNTS)),
    ],
    ids=str,
)
def test_gradients_are_averaged_over_the_ranks_that_have_data_left(name: str, counts: tuple[int, ...], uneven: bool) -> None:
    options = STRATEGIES[name] | ({"uneven_paths": True} if uneven else {})
    found = fsdp.simulate(4, lambda rank: trained(rank, counts, **options))
    assert_close(unsharded(found, options), alone(counts))


@pytest.mark.parametrize("options", [*STRATEGIES.values(), {"uneven_paths": True}], ids=[*STRATEGIES, "uneven paths"])
def test_accumulation_under_no_sync_too(options: dict[str, Any]) -> None:
    counts = (6, 2, 4, 2)
    found = fsdp.simulate(4, lambda rank: trained(rank, counts, micro=2, **options))
    assert_close(unsharded(found, options), alone(counts, micro=2))


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


def test_a_rank_without_any_batch_gets_the_inputs_of_another() -> None:
    def fn(rank: int, wrapped: bool) -> list[Tensor]:
        class Unwrap(nn.Module):
            """Takes inputs that cannot be pickled, and others."""

            def __init__(self) -> None:
                super().__init__()
                self.net = Net(1)

            def forward(self, *inputs: Any, scale: Tensor) -> Tensor:
                return self.net(inputs[0]() if wrapped else inputs[0]) * scale

        torch.manual_seed(0)
        model = fsdp.fully_shard(Unwrap())
        with fsdp.join(model, lambda: None) as joined:
            for _ in range(rank):
                x = partial(batch, 0, 0) if wrapped else batch(0, 0)
                loss_of(model((lambda x=x: x()) if wrapped else x, scale=torch.ones(()))).backward()
                joined.step()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    shards = fsdp.simulate(2, partial(fn, wrapped=False))
    torch.manual_seed(0)
    net = Net(1)
    loss_of(net(batch(0, 0))).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    assert_close({"squares": sum(plain(g).square().sum() for one in shards for g in one)}, {"squares": expected.square().sum()})
    with pytest.raises((fsdp.ShardingError, fsdp.WorldError), match="the inputs of the others cannot be pickled"):
        fsdp.simulate(2, partial(fn, wrapped=True))


REPLICATED: dict[str, Any] = {"sharding_strategy": "NO_SHARD"}


def replicated(rank: int, counts: tuple[int, ...], **rules: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An ordinary loop, without the step of `join`."""
    model = fsdp.fully_shard(CASES["net"].model(), auto_wrap_policy={Block}, plain_shards=True, **REPLICATED)
    optimizer = SGD(model.parameters())
    with fsdp.join(model, **rules):
        for number in range(counts[rank]):
            loss_of(model(batch(rank, number))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert is_at_rest(model)
    return weights_of(model), optimizer.state_dict()["state"]


@pytest.mark.parametrize("counts", [COUNTS, (0, 2, 2, 3)], ids=str)
def test_without_a_step_all_ranks_take_over_weights_and_optimizer_state(counts: tuple[int, ...]) -> None:
    found = fsdp.simulate(4, lambda rank: replicated(rank, counts))
    for weights, states in found:
        assert_close(weights, alone(counts))
        for number, state in found[-1][1].items():
            assert torch.equal(state["momentum_buffer"], states[number]["momentum_buffer"])


def test_gradients_may_be_divided_by_all_ranks() -> None:
    def fn(rank: int) -> float:
        model = fsdp.fully_shard(nn.Linear(1, 1), sync_module_states=True, plain_shards=True, **REPLICATED)
        gradients = []
        with fsdp.join(model, lambda: None, divides_by_all_ranks=True) as joined:
            for _ in range(rank + 1):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                gradients.append(float(model.bias.grad.sum()))
                joined.step()
        return gradients[-1]

    assert fsdp.simulate(2, fn) == [1.0, 0.5]


@on_ranks(2)
def test_a_communication_hook_divides_by_all_ranks_too(rank: int) -> None:
    with fsdp.join(hooked_model(), print, divides_by_all_ranks=True):
        pass


@pytest.mark.parametrize("options", [{}, REPLICATED, {"uneven_paths": True}], ids=["FULL_SHARD", "NO_SHARD", "uneven paths"])
@on_ranks(2)
def test_all_ranks_may_stop_with_the_first(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(Net(1), sync_module_states=True, **options)
    taken = 0
    stops = pytest.raises(fsdp.InputsExhausted, match="rank 0 had no further batch while others had; all ranks stop")
    with stops, fsdp.join(model, lambda: None, stops_at_first=True) as joined:
        for _ in range(2 + rank):
            loss_of(model(batch(rank, 0))).backward()
            joined.step()
            taken += 1
    loss_of(model(batch(rank, 0))).backward()
    assert is_at_rest(model)
    assert taken == 2


@pytest.mark.parametrize("options", [{}, REPLICATED], ids=["FULL_SHARD", "NO_SHARD"])
def test_buffers_are_broadcast_from_a_rank_that_has_data_left(options: dict[str, Any]) -> None:
    def fn(rank: int) -> tuple[float, int]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        model = fsdp.fully_shard(net, sync_module_states=True, broadcast_buffers=True, **options)
        with fsdp.join(model, lambda: None) as joined:
            for _ in range(1 + 2 * rank):
                model(torch.tensor([[0.0, 1.0], [1.0, float(rank)]])).sum().backward()
                joined.step()
        return float(net[0].running_mean[1]), int(net[0].num_batches_tracked)

    (mean, count), other = fsdp.simulate(2, fn)
    # rank 0 has finished before the second forward, so the statistics of rank 1's three batches go on
    assert count == 3 and (mean, count) == other
    assert mean == pytest.approx(1 - 0.9**3)


@pytest.mark.parametrize("differs", ["learning rate", "optimizers"])
def test_optimizers_that_differ_at_the_end_are_refused(differs: str) -> None:
    def fn(rank: int) -> None:
        model = fsdp.fully_shard(nn.Linear(2, 1), sync_module_states=True, **REPLICATED)
        optimizers = [SGD([p]) for p in model.parameters()]
        with fsdp.join(model):
            for _ in range(1 + rank):
                model(torch.ones(1, 2)).sum().backward()
                optimizers[0].step()
                if rank:
                    optimizers[0].param_groups[0]["lr"] *= 0.5 if differs == "learning rate" else 1.0
                    optimizers[1 if differs == "optimizers" else 0].step()

    text = "lr: 0.05.* on rank 0 and lr: 0.0125.* on rank 1" if differs == "learning rate" else "rank 1 has stepped 2 optimizers"
    with pytest.raises((fsdp.ShardingError, fsdp.WorldError), match=text):
        fsdp.simulate(2, fn)


@on_ranks(1)
def test_a_step_that_was_not_given_cannot_be_taken(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(2, 1), **REPLICATED)
    with fsdp.join(model) as joined, pytest.raises(fsdp.ShardingError, match="takes the step that was given"):
        joined.step()


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
@on_ranks(1)
def test_what_does_not_fit_is_refused(rank: int, model: Any, step: Any, text: str) -> None:
    with pytest.raises(fsdp.ShardingError, match=text), fsdp.join(model(), step):
        pass


def hooked_model() -> nn.Module:
    model = fsdp.fully_shard(nn.Linear(2, 2))
    fsdp.register_comm_hook(model, None, lambda state, bucket: torch.futures.Future())
    return model


@on_ranks(2)
def test_what_a_finished_rank_cannot_serve_is_refused(rank: int) -> None:
    with pytest.raises(fsdp.ShardingError, match="averages over all ranks"), fsdp.join(hooked_model(), print):
        pass
    model = fsdp.fully_shard(nn.Linear(2, 2), reduction=fsdp.ReductionPolicy(static_graph=True))
    with pytest.raises(fsdp.ShardingError, match="leave out reduction"), fsdp.join(model, print):
        pass


@on_ranks(2)
def test_after_it_everything_is_as_before(rank: int) -> None:
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
