"""A parameter is read outside its unit before the unit runs, and the value reaches the loss of some ranks only.

All ranks must reduce the gradient that arrives late on these ranks.
"""

from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp.compat.shared.instances import divide_by
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import assert_close, local
from tests.support.outside import (
    READS,
    STEPS,
    Reading,
    batch,
    in_forward,
    loss_of,
    plain,
    shard_before_forward,
    trained,
    wrapped,
)
from tests.support.ranks import on_ranks

SHARDED: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER")


@pytest.mark.parametrize("users", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("strategy", [*SHARDED, "HYBRID_SHARD", "NO_SHARD"])
def test_the_value_may_reach_the_loss_of_some_ranks_only(strategy: str, read: str, users: tuple[int, ...]) -> None:
    size = 4 if strategy == "HYBRID_SHARD" else 2
    for found in fsdp.simulate(size, lambda rank: trained(rank, size, users, strategy, READS[read])):
        assert_close(found, plain(size, users))


def penalise(model: nn.Module) -> None:
    """A backward of the sum of the squares of this rank's parts."""
    loss = model(torch.ones(1, 6)).sum() * 0 + sum(fsdp.to_local(p).square().sum() for p in model.parameters())
    loss.backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("divides", ["by the ranks", "by nothing", "as set"])
@on_ranks(4)
def test_a_term_of_the_parts_counts_once_whatever_gradients_are_divided_by(rank: int, strategy: str, divides: str) -> None:
    mesh = {"mesh": init_device_mesh("cpu", (2, 2))} if strategy == "HYBRID_SHARD" else {}
    reduction = fsdp.ReductionPolicy(average=divides == "by the ranks")
    model = fsdp.fully_shard(nn.Linear(6, 6), sharding_strategy=strategy, reduction=reduction, **mesh)  # type: ignore[arg-type]
    if divides == "as set":
        divide_by("here", unit_ref_of(model), 1.0, 3.0)
    penalise(model)
    for parameter in model.parameters():
        torch.testing.assert_close(local(parameter.grad), 2 * local(parameter))


@pytest.mark.parametrize("by_all", [True, False])
def test_a_term_of_the_parts_is_refused_once_a_rank_has_finished(by_all: bool) -> None:
    def program(rank: int) -> None:
        model = fsdp.fully_shard(nn.Linear(6, 6))
        with fsdp.join(model, model.zero_grad, divides_by_all_ranks=by_all) as joined:
            for _ in range(2 - rank):
                penalise(model)
                joined.step()

    with pytest.raises(fsdp.ShardingError, match=r"to_local inside fsdp\.join: a rank has finished"):
        fsdp.simulate(2, program)


@pytest.mark.parametrize("sync", [True, False], ids=["two backwards", "no_sync"])
def test_gradients_of_such_values_accumulate(sync: bool) -> None:
    for found in fsdp.simulate(3, lambda rank: trained(rank, 3, (1,), micro=2, sync=sync)):
        assert_close(found, plain(3, (1,), micro=2))


@pytest.mark.parametrize("strategy", SHARDED)
def test_each_backward_after_several_forwards_checks_for_such_values(strategy: str) -> None:
    """Also the second one, whose value was read before the first backward."""
    model = Reading()
    for step in range(2):
        for rank in range(2):
            (loss_of(*in_forward(model, batch(rank, step)), rank == 0) / 2).backward()

    def fn(rank: int) -> None:
        sharded = wrapped(2, strategy)
        for loss in [loss_of(*in_forward(sharded, batch(rank, step)), rank == 0) for step in range(2)]:
            loss.backward()
        for name, parameter in sharded.module.named_parameters():
            whole = model.get_parameter(name).grad
            assert whole is not None
            if parameter.grad is not None:
                numel = local(parameter).numel()
                first = {0: 0, 1: whole.numel() - numel}[rank]
                part = whole.reshape(-1)[first : first + numel].view(local(parameter).shape)
                assert_close({name: local(parameter.grad)}, {name: part})

    fsdp.simulate(2, fn)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_shard_may_reach_the_loss_of_some_ranks_only(strategy: str) -> None:
    def fn(rank: int) -> tuple[int, dict[str, Tensor]]:
        weight = wrapped(2, strategy).module.layer.weight
        return local(weight).numel(), trained(rank, 2, (0,), strategy, shard_before_forward)

    (held, found), (other, again) = fsdp.simulate(2, fn)
    assert held and other
    model = Reading()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(*in_forward(model, batch(rank, step)), False) / 2).backward()
        # each element is penalised once, by the rank that holds it
        (model.layer.weight.reshape(-1)[:held] ** 2).sum().backward()
        optimizer.step()
    wanted = {name: value.detach() for name, value in model.named_parameters()}
    assert_close(found, wanted)
    assert_close(again, wanted)


@on_ranks(2)
def test_a_value_without_a_gradient_marks_nothing(rank: int) -> None:
    """On a device, a rank that checks for remainders must wait for the exchange at the end of each backward."""
    model = wrapped(2, "FULL_SHARD")
    with torch.no_grad():
        fsdp.full_tensor(model.module.layer.weight)
    queue = unit_ref_of(model.module).engine.reducer._queue
    before = [state.name for state in queue._unit_states]
    fsdp.full_tensor(model.module.layer.weight)
    assert [*before, *(state.name for state in queue._unit_states)] == ["OPEN", "OPEN", "OPEN", "OPEN", "OPEN", "OPEN_OUTSIDE"]
