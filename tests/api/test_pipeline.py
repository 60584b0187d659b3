"""Stages whose parameters are released between the two halves of a backward: the gradients of inputs, then those of weights."""

import sys
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

import fsdp
from fsdp.api import pipeline
from fsdp.comm.simulated import current_rank
from fsdp.compat.fully_shard import fully_shard
from fsdp.runtime.engine import Engine
from tests.comm.failure.dimension_programs import Mine, cause_of
from tests.support.ranks import on_ranks


def stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 4)) for _ in range(4)]


def batch(group: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(group))


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "FSDP2"])
def test_zero_bubble_trains_as_one_process(strategy: str, frozen: int) -> None:
    """Also if the first stages are frozen: the inputs of the next one then require no gradient."""
    wanted = nn.Sequential(*stages())
    wanted[:frozen].requires_grad_(False)
    for group in range(2):
        (nn.functional.mse_loss(wanted(batch(group)), batch(group)) / 2).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        place, data, every, mine = mesh["pp"].get_local_rank(), batch(mesh["dp"].get_local_rank()), stages(), []
        for number in (place, place + 2):
            every[number].requires_grad_(number >= frozen)
            if strategy == "FSDP2":
                fully_shard(every[number], mesh=mesh["dp"])
            else:
                fsdp.fully_shard(every[number], mesh=mesh["dp"], sharding_strategy=strategy)
            mine.append(fsdp.PipelineStage(every[number], number, 4, torch.device("cpu"), group=mesh.get_group("pp")))
        schedule = ScheduleInterleavedZeroBubble(mine, 4, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
        schedule.step(*[data] * (place == 0), **({"target": data, "losses": []} if place else {}))  # type: ignore[arg-type]
        for number in (place, place + 2):
            for name, p in every[number].named_parameters():
                gradient = wanted[number].get_parameter(name).grad
                torch.testing.assert_close(None if p.grad is None else fsdp.full_tensor(p.grad), gradient)

    fsdp.simulate(4, program)


@pytest.mark.parametrize("strategy", ["SHARD_GRADIENTS", "NO_SHARD"])
@pytest.mark.parametrize(("keeps", "scales"), [(False, True), (True, False), (True, True)])
def test_two_steps_are_accumulated_and_an_evaluation_changes_no_gradient(keeps: bool, scales: bool, strategy: str) -> None:
    """Each step divides what it adds, also to gradients of ignored modules. `keeps`: the first one is under no_sync."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(y, target) / (1 if scales else 4)

    wanted = nn.Sequential(*stages())
    for step in range(2):
        nn.functional.mse_loss(wanted(batch(step)), batch(step)).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        place, every, mine = mesh["pp"].get_local_rank(), stages(), []
        numbers = (place, place + 2)
        for number in numbers:
            more: Any = {"sharding_strategy": strategy, "auto_wrap_policy": {nn.Linear}, "ignored_modules": [every[number][0]]}
            fsdp.fully_shard(every[number], mesh=mesh["dp"], **more)
            mine.append(fsdp.PipelineStage(every[number], number, 4, torch.device("cpu"), group=mesh.get_group("pp")))
        schedule = ScheduleInterleavedZeroBubble(mine, 4, loss_fn=loss, scale_grads=scales)  # type: ignore[arg-type]
        for step in range(2):
            data = batch(step)
            given: Any = [data] * (place == 0), {"target": data, "losses": []} if place else {}
            with ExitStack() as stack:
                for number in numbers if keeps and not step else ():
                    stack.enter_context(fsdp.no_sync(every[number]))
                schedule.step(*given[0], **given[1])
        schedule.eval(*given[0], **given[1])
        for number in numbers:
            for name, p in every[number].named_parameters():
                assert p.grad is not None
                is_full = name.startswith("0.") or strategy == "NO_SHARD"
                torch.testing.assert_close(
                    p.grad if is_full else fsdp.full_tensor(p.grad), wanted[number].get_parameter(name).grad
                )

    fsdp.simulate(4, program)


@pytest.mark.parametrize("asks_stages", [True, False])
def test_all_stages_skip_a_step_together_or_the_scaler_is_refused(asks_stages: bool) -> None:
    """A gradient of stage 0 overflows. Stage 1 would step, and go on with another scale."""

    def program(rank: int) -> tuple[float, bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        place = mesh["pp"].get_local_rank()
        module = fsdp.fully_shard(stages()[place], mesh=mesh["dp"], sharding_strategy="SHARD_GRADIENTS")
        stage = fsdp.PipelineStage(module, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        more = {"pp_mesh": mesh["pp"]} if asks_stages else {}
        scaler: Any = fsdp.ShardedGradScaler(module, init_scale=4.0, **more)
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, x: scaler.scale(nn.functional.mse_loss(y, x)))
        data = batch(mesh["dp"].get_local_rank())
        schedule.step(*[data] * (place == 0), **({"target": data, "losses": []} if place else {}))  # type: ignore[arg-type]
        before = [fsdp.to_local(p).clone() for p in module.parameters()]
        if rank == 0:
            fsdp.to_local(module[2].weight.grad).fill_(float("inf"))
        refused = pytest.raises(fsdp.ShardingError, match="GradScaler: the optimizer steps a stage of a pipeline")
        for one in [scaler] if asks_stages else [scaler, torch.amp.GradScaler("cpu", init_scale=4.0)]:
            if not asks_stages:
                one.scale(torch.zeros(()))
            with nullcontext() if asks_stages else refused:
                one.step(optimizer)
                one.update()
        after = [fsdp.to_local(p) for p in module.parameters()]
        return scaler.get_scale(), all(map(torch.equal, after, before))

    assert fsdp.simulate(4, program) == [(2.0 if asks_stages else 4.0, True)] * 4


@on_ranks(4)
def test_a_mesh_whose_ranks_train_one_stage_is_no_mesh_of_stages(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    module = fsdp.fully_shard(stages()[rank // 2], mesh=mesh["dp"])
    for use in (partial(fsdp.ShardedGradScaler, module), partial(fsdp.clip_grad_norm_, module, 1.0)):
        with pytest.raises(fsdp.ShardingError, match=r"ranks \[\d, \d\] of pp_mesh train one stage; give the mesh of stages"):
            use(pp_mesh=mesh["dp"])


def test_zero_bubble_trains_a_stage_whose_inputs_are_integers() -> None:
    class Signs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) > 0).long()

    class OfIntegers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Signs(4, 4).requires_grad_(False), OfIntegers(4, 4)]

    wanted = nn.Sequential(*made())
    nn.functional.mse_loss(wanted(batch(0)), batch(0)).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        module = fsdp.fully_shard(made()[rank], mesh=mesh["dp"])
        stage = fsdp.PipelineStage(module, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleInterleavedZeroBubble([stage], 4, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
        schedule.step(*[batch(0)] * (rank == 0), **({"target": batch(0), "losses": []} if rank else {}))  # type: ignore[arg-type]
        if rank:
            torch.testing.assert_close(module.weight.grad, wanted[1].weight.grad)

    fsdp.simulate(2, program)


@pytest.mark.parametrize(
    ("direction", "zeroed", "calls"),
    [
        *(("forward", True, (4, 14)), ("backward", True, (4, 14)), ("backward", False, (4, 14))),
        *(("backward", True, (0, 6)), ("loss", True, (2, 9))),
    ],
)
def test_a_step_of_several_stages_a_rank_that_failed_is_done_again_without_what_was_reduced(
    direction: str, zeroed: bool, calls: tuple[int, int]
) -> None:
    """Twice. The last micro-batch fails in stage 1. Before its backward, stages 2 and 3 have reduced their gradients.

    Or the call of stage 1 for the shapes fails, when stage 0 is done with it on another rank. Or the loss, where no hook sees it.
    Without zeros, an evaluation and steps of another pipeline of the same ranks come between.
    """
    wanted = nn.Sequential(*stages())
    for group in range(2):
        (nn.functional.mse_loss(wanted(batch(group)), batch(group)) / 2).backward()

    def program(rank: int) -> None:
        mesh, every = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), stages()
        place, data = mesh["pp"].get_local_rank(), batch(mesh["dp"].get_local_rank())
        more: Any = {"sharding_strategy": "SHARD_GRADIENTS"}
        mine, others = (
            nn.ModuleList([fsdp.fully_shard(some[number], mesh=mesh["dp"], **more) for number in (place, place + 2)])
            for some in (every, stages())
        )
        micro_batch = count(0)  # in each step, torch calls a stage once before, for the shapes

        def fail(*_: object) -> None:
            if rank == 3 and next(micro_batch) in calls:
                raise Mine

        layer: Any = every[1][0]
        if direction != "loss":
            (layer.register_forward_pre_hook if direction == "forward" else layer.register_full_backward_hook)(fail)

        def loss(y: Tensor, target: Tensor) -> Tensor:
            if direction == "loss":
                fail()
            return nn.functional.mse_loss(y, target)

        def step(modules: nn.ModuleList = mine, method: str = "step") -> None:
            place_of = partial(fsdp.PipelineStage, num_stages=4, device=torch.device("cpu"), group=mesh.get_group("pp"))
            staged = [place_of(module, number) for module, number in zip(modules, (place, place + 2), strict=True)]
            schedule = ScheduleInterleaved1F1B(staged, 4, loss_fn=loss)  # type: ignore[arg-type]
            getattr(schedule, method)(*[data] * (place == 0), **({"target": data, "losses": []} if place else {}))

        for _ in range(2):
            with pytest.raises(Exception) as failure:  # torch wraps errors of forwards
                step()
            assert isinstance(cause_of(failure.value), Mine if rank == 3 else fsdp.PeerFailed)
            if not zeroed:
                step(mine, "eval"), step(others), step(others)
                with pytest.raises(fsdp.ShardingError, match=f"stage {place + 2} has reduced the gradients of a step that"):
                    step()
            mine.zero_grad(set_to_none=zeroed)
            step()
            for number in (place, place + 2):
                for name, p in every[number].named_parameters():
                    assert p.grad is not None
                    torch.testing.assert_close(fsdp.full_tensor(p.grad), wanted[number].get_parameter(name).grad)
            mine.zero_grad()

    fsdp.simulate(4, program)


@pytest.mark.parametrize("fails", ["request", "stage_backward_weight"])
def test_a_rank_that_fails_in_the_gradients_of_weights_is_named_and_the_step_is_done_again(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hook of the engine sees that half of a backward: a gather before it fails, or an operator inside."""
    wanted, due = nn.Sequential(*stages()), [True]
    for group in range(2):
        (nn.functional.mse_loss(wanted(batch(group)), batch(group)) / 2).backward()
    place = pipeline if fails == "stage_backward_weight" else Engine
    real: Any = getattr(place, fails)

    def fail(*args: Any, **named: Any) -> Any:
        rank = current_rank()
        is_half = fails != "request" or sys._getframe(1).f_code.co_name == "_unsharded"
        if rank is not None and rank.rank == 3 and is_half and due:
            due.clear()
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **named)

    monkeypatch.setattr(place, fails, fail)

    def program(rank: int) -> None:
        mesh, every = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), stages()
        place, data = mesh["pp"].get_local_rank(), batch(mesh["dp"].get_local_rank())
        numbers = (place, place + 2)
        for number in numbers:
            fsdp.fully_shard(every[number], mesh=mesh["dp"])

        def step() -> None:
            stage = partial(fsdp.PipelineStage, num_stages=4, device=torch.device("cpu"), group=mesh.get_group("pp"))
            mine: Any = [stage(every[number], number) for number in numbers]
            schedule = ScheduleInterleavedZeroBubble(mine, 4, loss_fn=nn.functional.mse_loss)
            schedule.step(*[data] * (place == 0), **({"target": data, "losses": []} if place else {}))  # type: ignore[arg-type]

        with pytest.raises(torch.OutOfMemoryError if rank == 3 else Exception) as failure:
            step()
        if rank != 3:
            cause = cause_of(failure.value)
            assert isinstance(cause, fsdp.PeerFailed) and (cause.rank, cause.reason) == (3, "OutOfMemoryError: no memory")
        for number in numbers:
            every[number].zero_grad()
        step()
        for number in numbers:
            for name, p in every[number].named_parameters():
                assert p.grad is not None
                torch.testing.assert_close(fsdp.full_tensor(p.grad), wanted[number].get_parameter(name).grad)

    fsdp.simulate(4, program)
