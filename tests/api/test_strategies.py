"""Strategies: the numbers of one process whatever is sharded, what is held, and what goes over the wire."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.comm.simulated import current_rank
from tests.support.models import (
    CASES,
    Block,
    Net,
    assert_close,
    assert_trained_alike,
    gradients_of,
    is_at_rest,
    join_all,
    joined,
    loss_of,
    own_batches,
    promised,
    reference,
    train,
    wrap,
)
from tests.support.ranks import on_ranks

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "FULL_SHARD": (4, {}),
    "SHARD_GRAD_OP": (4, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "SHARD_GRADIENTS": (3, {"sharding_strategy": "SHARD_GRADIENTS"}),
    "SHARD_OPTIMIZER": (2, {"sharding_strategy": "SHARD_OPTIMIZER"}),
    "NO_SHARD": (3, {"sharding_strategy": "NO_SHARD"}),
    "HYBRID_SHARD, 2 replicas": (4, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
    "HYBRID_SHARD, 3 replicas": (6, {"sharding_strategy": "HYBRID_SHARD", "mesh": (3, 2)}),
    "HYBRID_SHARD, kept after forward": (
        4,
        {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2), "reshard_after_forward": False},
    ),
    "HYBRID_SHARD, 1 replica": (2, {"sharding_strategy": "HYBRID_SHARD", "mesh": (1, 2)}),
    "HYBRID_SHARD, 1 shard": (2, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 1)}),
}
EVERY = pytest.mark.parametrize(("size", "options"), STRATEGIES.values(), ids=STRATEGIES)


def checkpointed(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def frozen(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)
    model.enter.bias.requires_grad_(False)


def as_it_is(model: nn.Module) -> None:
    """A plain model."""


@EVERY
@pytest.mark.parametrize(
    ("change", "no_sync"),
    [(as_it_is, True), (checkpointed, False), (frozen, False)],
    ids=["no_sync", "checkpointed", "frozen"],
)
def test_training_is_that_of_one_process(
    size: int, options: dict[str, Any], change: Callable[[nn.Module], None], no_sync: bool
) -> None:
    micro = 3 if no_sync else 1

    def make() -> nn.Module:
        net = CASES["net"].model()
        change(net)
        return net

    def one_rank(rank: int) -> Any:
        model = fsdp.fully_shard(make(), auto_wrap_policy={Block}, **options)
        more: dict[str, Any] = {"accumulate": partial(fsdp.no_sync, model)} if no_sync else {}
        return train(model, own_batches(CASES["net"], rank, 3, micro), SGD, **more)

    batches = [[CASES["net"].batch(rank, step * micro + m) for rank in range(size) for m in range(micro)] for step in range(3)]
    assert_trained_alike(joined(fsdp.simulate(size, one_rank), make()), train(make(), batches, SGD))


@EVERY
@pytest.mark.parametrize("case", ["tied", "recurrent", "odd", "net as one unit"])
def test_other_models_too(size: int, options: dict[str, Any], case: str) -> None:
    found = fsdp.simulate(size, lambda rank: train(wrap(CASES[case], **options), own_batches(CASES[case], rank), SGD))
    assert_trained_alike(joined(found, CASES[case].model()), reference(CASES[case], size, optimizer=SGD))


@EVERY
def test_mixed_precision_stays_near_fp32(size: int, options: dict[str, Any]) -> None:
    """Near: 40 roundings of 2^-9, as derived in test_precision; in the first step, before weights differ."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    case = CASES["net"]
    found = fsdp.simulate(size, lambda rank: train(wrap(case, mp_policy=policy, **options), own_batches(case, rank, 1), SGD))
    wanted = reference(case, size, 1, optimizer=SGD)
    assert_close(joined(found, case.model()).gradients[0], wanted.gradients[0], within=40 * 2**-9)


@EVERY
def test_the_norm_and_the_full_state_are_those_of_the_plain_model(size: int, options: dict[str, Any]) -> None:
    case = CASES["net"]

    def one_rank(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        model = wrap(case, **options)
        train(model, own_batches(case, rank, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        return float(fsdp.clip_grad_norm_(model, 1e9)), fsdp.full_state_dict(model, rank0_only=False)

    gradients = reference(case, size, 1, optimizer=SGD).gradients[0].values()
    norm = float(torch.stack([g.norm() for g in gradients if g is not None]).norm())
    for found, state in fsdp.simulate(size, one_rank):
        assert found == pytest.approx(norm, rel=1e-6)
        assert_close({**state}, {**case.model().state_dict()}, within=0)


class Uses(nn.Module):
    """A unit called three times, once in a reentrant checkpoint, so that it is reduced in portions; rank 0 uses more of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Inner(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.inner(x, rank)
        x = checkpoint(self.inner, torch.tanh(x), rank, use_reentrant=True)
        return self.head(self.inner(torch.tanh(x), rank))


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.more = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return super().forward(x) + (self.more if rank == 0 else 0)


@EVERY
def test_two_portions_and_uses_that_differ_by_rank(size: int, options: dict[str, Any]) -> None:
    """What was kept under no_sync goes with the first portion only; what one rank used is known to all of them."""

    def batch(rank: int, number: int) -> torch.Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))

    def one_rank(rank: int) -> dict[str, torch.Tensor | None]:
        model = fsdp.fully_shard(Uses(), auto_wrap_policy={Inner}, **options)
        with fsdp.no_sync(model):
            model(batch(rank, 0), rank).square().mean().backward()
        model(batch(rank, 1), rank).square().mean().backward()
        assert is_at_rest(model)
        assert all(p.grad is not None for p in model.parameters() if p.numel()), "some replica has no gradient"
        return gradients_of(model)

    plain = Uses()
    for rank in range(size):
        for number in range(2):
            (plain(batch(rank, number), rank).square().mean() / size).backward()
    assert_close(join_all(fsdp.simulate(size, one_rank), dict(plain.named_parameters())), gradients_of(plain))


@EVERY
def test_buffers_are_those_of_rank_0_if_asked(size: int, options: dict[str, Any]) -> None:
    """At the beginning of each training forward, in one collective for each dtype; an evaluation asks nobody."""

    def one_rank(rank: int) -> tuple[float, int, int]:
        net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
        model = fsdp.fully_shard(net, auto_wrap_policy={nn.Linear}, broadcast_buffers=True, **options)
        model(torch.full((2, 6), float(rank)))
        model(torch.zeros(2, 6))
        here = current_rank()
        asked = [call.label for call in here.log].count("buffers")
        with torch.no_grad():
            model(torch.zeros(2, 6))
        return float(model[0].running_mean.sum()), asked, [call.label for call in here.log].count("buffers")

    # rank 0 saw zeros alone
    assert fsdp.simulate(size, one_rank) == [(0.0, 4, 4)] * size


def bytes_of_a_step(size: int, **options: Any) -> tuple[int, int]:
    """Bytes that rank 0 receives in a second step, and holds after it."""

    def one_rank(rank: int) -> tuple[int, int]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(Net(2, 64), auto_wrap_policy={Block}, **options)
        here = current_rank()
        before = 0
        for _ in range(2):
            before = len(here.log)
            loss_of(model(torch.ones(2, 6))).backward()
        return sum(call.received for call in here.log[before:]), fsdp.memory_bytes(model)

    return fsdp.simulate(size, one_rank)[0]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("strategy", "replicas", "rounds"),
    [
        ("FULL_SHARD", 1, 2),
        ("SHARD_GRAD_OP", 1, 1),
        ("SHARD_GRADIENTS", 1, 1),
        ("SHARD_OPTIMIZER", 1, 1),
        ("HYBRID_SHARD", 2, 2),
        ("NO_SHARD", 0, 0),
    ],
)
def test_bytes_on_the_wire_and_at_rest_are_the_floor(strategy: str, replicas: int, rounds: int, size: int) -> None:
    """With s shards and r replicas of P bytes: (s - 1) / s P a gather and for the reduce-scatter, 2 (r - 1) / r P / s for the
    all-reduce; P / s at rest, and P for whole parameters and for buckets that stay. 3 % for padding and small talk."""
    copies = replicas or size
    shards = size // copies
    parameters = sum(p.nbytes for p in Net(2, 64).parameters())
    mesh = {"mesh": (copies, shards)} if strategy == "HYBRID_SHARD" else {}
    received, held = bytes_of_a_step(size, sharding_strategy=strategy, reshard_after_forward=rounds == 2 or None, **mesh)
    floor = (rounds + 1) * parameters * (shards - 1) / shards + 2 * (copies - 1) / copies * parameters / shards
    assert floor <= received <= 1.03 * floor
    resting = parameters / shards + {"SHARD_GRADIENTS": 1, "SHARD_OPTIMIZER": 2}.get(strategy, 0) * parameters
    assert resting <= held <= 1.03 * resting


def test_replicas_compute_with_the_parameters_themselves() -> None:
    """Without a second copy, unless they compute in another precision."""

    def held(**options: Any) -> int:
        """Bytes after a forward whose backward is to come."""

        def one_rank(rank: int) -> int:
            model = fsdp.fully_shard(Net(4, 64), auto_wrap_policy={Block}, sharding_strategy="NO_SHARD", **options)
            output = model(torch.ones(2, 6))
            assert output.requires_grad
            return fsdp.memory_bytes(model)

        return fsdp.simulate(2, one_rank)[0]

    parameters = sum(p.nbytes for p in Net(4, 64).parameters())
    assert held() <= 1.03 * parameters
    half = held(mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert 1.5 * parameters <= half <= 1.03 * 1.5 * parameters


def test_replicas_that_begin_differently_are_refused() -> None:
    """They would train different models, on gradients averaged over both."""

    def one_rank(rank: int) -> float:
        torch.manual_seed(rank)
        options: dict[str, Any] = (
            {"sharding_strategy": "NO_SHARD"} if size == 2 else {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
        )
        with pytest.raises(
            fsdp.ShardingError, match=r"hold the same shards begin with different parameters .* sync_module_states=True"
        ):
            fsdp.fully_shard(nn.Linear(4, 4), **options)
        model = fsdp.fully_shard(nn.Linear(4, 4), sync_module_states=True, **options)
        return float(fsdp.full_tensor(model.weight).sum())

    for size in (2, 4):
        found = fsdp.simulate(size, one_rank)
        assert found == found[:1] * size


@pytest.mark.parametrize("options", [{"sharding_strategy": "NO_SHARD"}, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 1)}])
@on_ranks(2)
def test_the_scaler_agrees_over_replicas_too(rank: int, options: dict[str, Any]) -> None:
    """Also where a hook leaves the gradients of each rank as they are."""
    torch.manual_seed(0)
    model = fsdp.fully_shard(nn.Linear(4, 4), **options)
    fsdp.register_comm_hook(model, None, lambda state, bucket: promised(bucket.buffer()))
    scaler = fsdp.ShardedGradScaler(model, "cpu", init_scale=16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.full((2, 4), float("inf") if rank else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert float(scaler.get_scale()) == 8.0


@on_ranks(2)
def test_units_with_different_strategies_over_the_ranks_are_refused(rank: int) -> None:
    net = nn.Sequential(fsdp.fully_shard(nn.Linear(4, 4), sharding_strategy="NO_SHARD"), nn.Linear(4, 4))
    with pytest.raises(fsdp.ShardingError, match="with a strategy that shares the work in another way"):
        fsdp.fully_shard(net)
