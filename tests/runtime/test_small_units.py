"""Small units that follow each other share all-gathers and reductions."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.runtime.prefetch import PrefetchSchedule
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import Block, Net, X, is_at_rest, loss_of, world_log
from tests.support.ranks import on_ranks

BLOCKS, WIDTH = 6, 8
BLOCK_BYTES = sum(p.nbytes for p in Block(WIDTH).parameters())


class Recomputed(Net):
    """Computes each block again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.forward = _recomputed(type(block).forward.__get__(block))  # type: ignore[method-assign]
        return super().forward(x)


def _recomputed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def train(
    cap: float, steps: int = 4, kind: type[Net] = Net, frozen: bool = False, **options: Any
) -> tuple[list[Counter[str]], list[Tensor], int]:
    """The calls of each step, the parameters afterwards, and the peak of the bytes held."""
    torch.manual_seed(0)
    net = kind(BLOCKS, WIDTH)
    if frozen:
        for block in net.blocks[::2]:
            next(block.parameters()).requires_grad_(False)
    policy = fsdp.ReductionPolicy(coalesce_cap_mb=cap)
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, reduction=policy, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    counts = []
    for number in range(steps):
        before = len(world_log())
        loss_of(model(X + number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(Counter(call.kind for call in world_log()[before:]))
    ref = unit_ref_of(model)
    assert is_at_rest(model)
    return counts, [p.clone() for p in fsdp.full_state_dict(model).values()], ref.engine.tracker.peak


@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        ({}, 2),
        ({"prefetch": 0}, 2),
        ({"prefetch": 3}, 2),
        ({"reshard_after_forward": False}, 1),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 1),
        ({"reshard_after_forward": True}, 2),
    ],
    ids=str,
)
def test_from_the_second_step_on_small_units_share_one_gather_a_pass(options: dict[str, Any], gathers: int) -> None:
    counts = fsdp.simulate(2, lambda rank: train(1.0, **options)[0])[0]
    assert counts[0]["all_gather"] > BLOCKS
    for of_step in counts[1:]:
        assert (of_step["all_gather"], of_step["reduce_scatter"]) == (gathers, 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frozen": True},
        {"kind": Recomputed},
        {"sharding_strategy": "SHARD_GRADIENTS"},
        {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"prefetch": 2},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@on_ranks("size")
def test_the_numbers_are_those_of_units_that_share_nothing(rank: int, options: dict[str, Any], size: int) -> None:
    alone, shared = train(0, **options), train(1.0, **options)
    assert all(torch.equal(one, other) for one, other in zip(alone[1], shared[1], strict=True))
    assert shared[0][-1].total() < alone[0][-1].total()


@on_ranks(4)
def test_replicas_of_a_mesh_share_as_well(rank: int) -> None:
    options = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    alone, shared = train(0, **options), train(1.0, **options)
    assert all(torch.equal(one, other) for one, other in zip(alone[1], shared[1], strict=True))
    assert shared[0][-1]["all_gather"] == 2


@on_ranks(2)
def test_no_gather_is_larger_than_the_cap(rank: int) -> None:
    cap = 2.5 * BLOCK_BYTES / 2**20
    train(cap, steps=1)
    before = len(world_log("all_gather"))
    counts, _, peak = train(cap)
    sizes = [call.received * 2 for call in world_log("all_gather")[before:]]
    assert max(sizes) <= 2.5 * BLOCK_BYTES
    assert counts[-1]["all_gather"] < counts[0]["all_gather"]
    # one group computes, one is gathered ahead, and each of the two has a copy until it is waited for; gradients wait for
    # their group, in buckets that are joined
    assert peak <= train(0)[2] + 6 * 2.5 * BLOCK_BYTES


@pytest.mark.parametrize("wrong", [-1, "1", float("inf"), True, False])
def test_a_wrong_cap_is_refused(wrong: Any) -> None:
    with pytest.raises(fsdp.ShardingError, match="coalesce_cap_mb must be a number, 0 or more"):
        fsdp.ReductionPolicy(coalesce_cap_mb=wrong)


@on_ranks(2)
def test_a_step_that_fails_between_members_of_a_group_leaves_nothing_in_flight(rank: int) -> None:
    torch.manual_seed(0)
    shared = fsdp.ReductionPolicy(coalesce_cap_mb=1)
    model = fsdp.fully_shard(Net(BLOCKS, WIDTH), auto_wrap_policy={Block}, reduction=shared)
    for _ in range(2):
        loss_of(model(X)).backward()

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(X)
    handle.remove()
    assert is_at_rest(model)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss_of(model(X)).backward()
    loss_of(model(X)).backward()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def run(schedule: PrefetchSchedule, *units: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """One pass: for each unit, the units that share its gather, and those gathered ahead."""
    schedule.begin()
    return [(tuple(schedule.gathered_with(unit)), tuple(schedule.needed(unit))) for unit in units]


def test_a_schedule_gathers_groups_ahead() -> None:
    schedule = PrefetchSchedule(1, sizes=[4, 4, 4, 20, 4], cap=10)
    run(schedule, 0, 1, 2, 3, 4)
    schedule.on_step_completed()
    assert run(schedule, 0, 1, 2, 3, 4) == [((0, 1), (2,)), ((), ()), ((), (3,)), ((), (4,)), ((), ())]
    assert schedule.begin() == (0, 1)


def test_a_unit_is_in_a_group_once() -> None:
    schedule = PrefetchSchedule(1, sizes=[1, 1], cap=10)
    run(schedule, 0, 1, 0, 1)
    schedule.on_step_completed()
    assert run(schedule, 0, 1, 0, 1) == [((0, 1), (0, 1)), ((), ()), ((0, 1), ()), ((), ())]


def test_a_pass_that_leaves_the_record_shares_no_further() -> None:
    schedule = PrefetchSchedule(1, sizes=[1, 1, 1], cap=2)
    run(schedule, 0, 1, 2)
    schedule.on_step_completed()
    assert run(schedule, 1, 0, 2) == [((), ()), ((), ()), ((), ())]


def test_a_record_of_shared_gathers_changes_only_when_all_ranks_have_completed_a_step() -> None:
    schedule = PrefetchSchedule(1, sizes=[1, 1, 1], cap=3)
    assert [run(schedule, 0, 1, 2)] * 2 == [[((), ())] * 3, run(schedule, 0, 1, 2)], "no step was completed"
    schedule.on_step_completed()
    shared = [((0, 1, 2), ()), ((), ()), ((), ())]
    assert run(schedule, 0, 1, 2) == shared
    schedule.forget()
    assert run(schedule, 0, 1, 2) == shared
    assert run(schedule, 2, 1, 0) == [((), ())] * 3
    assert run(schedule, 0, 1, 2) == shared


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_rank_that_fails_alone_gathers_what_the_others_gather(steps: int) -> None:
    def fn(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(
            Net(BLOCKS, WIDTH),
            auto_wrap_policy={Block},
            sharding_strategy="SHARD_GRAD_OP",
            reduction=fsdp.ReductionPolicy(coalesce_cap_mb=1),
        )
        for _ in range(steps):
            loss_of(model(X)).backward()
            model.zero_grad()
        with fsdp.no_sync(model):
            loss = loss_of(model(X))
            if rank == 0:  # the other one gives this micro-batch up, and nothing of it is communicated
                loss.backward()
                model.zero_grad()
        for number in range(3):
            loss_of(model(X + number)).backward()
        assert is_at_rest(model)
        return [fsdp.to_local(p.grad).clone() for p in model.parameters() if p.grad is not None]

    def alone(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(Net(BLOCKS, WIDTH), auto_wrap_policy={Block}, sharding_strategy="SHARD_GRAD_OP")
        for number in range(3):
            loss_of(model(X + number)).backward()
        return [fsdp.to_local(p.grad).clone() for p in model.parameters() if p.grad is not None]

    for one, other in zip(fsdp.simulate(2, fn), fsdp.simulate(2, alone), strict=True):
        assert len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("failing_step", [0, 1, 2])
def test_both_ranks_learn_that_a_hook_failed_on_one_when_all_gradients_were_reduced(failing_step: int) -> None:
    """As over processes: one rank has what the other has not."""

    def fn(rank: int) -> list[str]:
        torch.manual_seed(0)
        policy = fsdp.ReductionPolicy(coalesce_cap_mb=1)
        model = fsdp.fully_shard(Net(BLOCKS, WIDTH), auto_wrap_policy={Block}, reduction=policy)
        outcomes = list[str]()

        def fail(gradient: Tensor) -> None:
            if rank == 1 and len(outcomes) == failing_step:
                raise ZeroDivisionError("in a hook of the user")

        next(model.parameters()).register_hook(fail)
        while "WorldError" not in outcomes:
            try:
                loss_of(model(X)).backward()
                outcomes.append("done")
            except (ZeroDivisionError, fsdp.WorldError) as failure:
                outcomes.append(type(failure).__name__)
                assert outcomes[-1] != "WorldError" or "rank 0 has completed a backward that rank 1 has abandoned" in str(failure)
            model.zero_grad()
        return outcomes

    first, second = fsdp.simulate(2, fn)
    assert second == ["done"] * failing_step + ["ZeroDivisionError", "WorldError"]
    assert first == ["done"] * (failing_step + 1) + ["PeerFailed", "WorldError"]
