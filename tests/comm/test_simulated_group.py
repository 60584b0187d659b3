"""torch.distributed inside a simulated world: groups, device meshes and DTensors of the simulated ranks."""

import functools
import importlib
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp
from tests.comm.failure.dimension_programs import LATE, STAGES, Retried, stage_retried
from tests.compat.fsdp2 import test_pipelines_gloo as pipeline
from tests.support.everything import EVERYTHING
from tests.support.models import CASES, Trained, X, assert_trained_alike, joined, loss_of, make_net, own_batches, train, wrap
from tests.support.ranks import on_ranks

SEEDS = pytest.mark.parametrize("seed", range(3 if EVERYTHING else 1))


def of(rank: int) -> Tensor:
    return torch.tensor([float(rank), 10.0 - rank])


def test_each_rank_has_the_default_group_of_its_world() -> None:
    assert not dist.is_initialized()
    hook = sys.excepthook
    found = fsdp.simulate(3, lambda rank: (dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.is_initialized()))
    assert found == [(rank, 3, "simulated", True) for rank in range(3)]
    assert not dist.is_initialized() and sys.excepthook is hook


def test_a_module_of_torch_that_is_imported_meanwhile_keeps_no_group_of_a_rank() -> None:
    # its default arguments are `group.WORLD`, which torch reads when it imports the module
    fsdp.simulate(2, lambda rank: importlib.reload(torch.distributed.nn.functional))
    assert inspect.signature(torch.distributed.nn.functional.broadcast).parameters["group"].default is None


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (dist.ReduceOp.SUM, [3.0, 27.0]),
        (dist.ReduceOp.AVG, [1.0, 9.0]),
        (dist.ReduceOp.MAX, [2.0, 10.0]),
        (dist.ReduceOp.MIN, [0.0, 8.0]),
        (dist.ReduceOp.PRODUCT, [0.0, 720.0]),
    ],
)
@on_ranks(3)
def test_tensors_are_reduced(rank: int, kind: Any, wanted: list[float]) -> None:
    dist.all_reduce(tensor := of(rank), kind)
    assert tensor.tolist() == wanted


@on_ranks(3)
def test_tensors_go_to_one_rank_and_in_lists(rank: int) -> None:
    mine = 10.0 * rank + torch.arange(3.0)
    every = [10.0 * one + torch.arange(3.0) for one in range(3)]
    found = [torch.zeros(3) for _ in range(3)]
    dist.gather(mine, found if rank == 1 else None, dst=1)
    assert all(map(torch.equal, found, every)) is (rank == 1)
    dist.reduce(summed := mine.clone(), 2)
    assert torch.equal(summed, sum(every) if rank == 2 else mine)  # type: ignore[arg-type]
    dist.reduce_scatter(part := torch.zeros(1), [*mine.view(3, 1)])
    assert part == sum(one[rank] for one in every)
    dist.all_to_all(parts := [torch.zeros(1) for _ in range(3)], [*mine.view(3, 1)])
    assert torch.cat(parts).tolist() == [float(one[rank]) for one in every]
    dist.gather_object(rank, objects := [None] * 3 if rank == 0 else None)
    assert objects is None or objects == [0, 1, 2]


@on_ranks(4)
def test_torch_keeps_plans_for_each_rank(rank: int) -> None:
    # of 7 rows a rank has two or one, so that each sends and receives other sizes than its peer
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), nn.Linear(1, 7)
    model.weight.data.copy_(wanted := torch.arange(7.0).view(7, 1))
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fsdp.fully_shard(model, mesh=mesh["dp"])
    assert torch.equal(model.weight.full_tensor(), wanted)  # type: ignore[operator]


def test_a_pickled_state_is_loaded_in_another_world() -> None:
    def state(rank: int) -> bytes:
        torch.save(fsdp.fully_shard(nn.Linear(4, 4), dtensors=True).state_dict(), file := io.BytesIO())
        return file.getvalue()

    saved = fsdp.simulate(2, state)

    @on_ranks(2)
    def load(rank: int) -> None:
        model = fsdp.fully_shard(nn.Linear(4, 4), dtensors=True)
        given = torch.load(io.BytesIO(saved[rank]), weights_only=False)
        model.load_state_dict(given)
        assert torch.equal(model.weight.to_local(), given["weight"].to_local())  # type: ignore[operator]

    load()  # type: ignore[call-arg]


def test_a_reduction_that_is_not_simulated_is_refused() -> None:
    with pytest.raises(fsdp.ShardingError, match=r"fsdp.simulate has no reduction by BXOR"):
        fsdp.simulate(2, lambda rank: dist.all_reduce(torch.tensor([rank]), dist.ReduceOp.BXOR))
    with pytest.raises(fsdp.ShardingError, match=r"fsdp.simulate has no reduce-scatter by MAX"):
        fsdp.simulate(2, lambda rank: dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(2), dist.ReduceOp.MAX))


@pytest.mark.parametrize(
    "collective",
    [
        lambda p: dist.all_reduce(p.grad),
        lambda p: dist.broadcast(p.data, 0),
        lambda p: dist.all_gather([torch.empty(4, 4) for _ in range(2)], p.data),
        lambda p: dist.reduce_scatter_tensor(torch.empty(2, 4), p.grad),
    ],
)
@on_ranks(2)
def test_a_collective_of_a_shard_is_refused_as_over_processes(rank: int, collective: Callable[[Any], object]) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(fsdp.ShardingError, match=r"on 'weight'.*a collective would mix the parts of different ranks"):
        collective(model.weight)


def test_the_other_collectives_move_what_they_do_among_processes() -> None:
    def program(rank: int) -> list[Any]:
        gathered = torch.zeros(6)
        dist.all_gather_into_tensor(gathered, of(rank))
        listed = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(listed, of(rank))
        reduced = torch.zeros(1)
        dist.reduce_scatter_tensor(reduced, torch.arange(3.0) + rank)
        average = torch.zeros(1)
        dist.reduce_scatter_tensor(average, torch.arange(3.0) + rank, dist.ReduceOp.AVG)
        dist.broadcast(sent := of(rank), 1)
        dist.broadcast(strided := of(rank).repeat(2).view(2, 2).t(), 2)
        dist.scatter(scattered := torch.zeros(2), [of(3), of(4), of(5)] if rank == 0 else None, 0)
        exchanged = torch.zeros(3)
        dist.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank)
        uneven = torch.zeros(3 * (rank + 1))
        dist.all_to_all_single(uneven, torch.arange(6.0) + 10 * rank, [rank + 1] * 3, [1, 2, 3])
        things: list[Any] = [None] * 3
        dist.all_gather_object(things, {"rank": rank})
        dist.barrier()
        tensors = gathered, torch.cat(listed), reduced, average, sent, strided, scattered, exchanged, uneven
        return [*(tensor.tolist() for tensor in tensors), things]

    everybody = [value for rank in range(3) for value in of(rank).tolist()]
    for rank, found in enumerate(fsdp.simulate(3, program)):
        assert found[:2] == [everybody] * 2
        assert found[2:4] == [[3.0 * rank + 3], [rank + 1.0]]
        assert found[4:6] == [of(1).tolist(), [[2.0, 2.0], [8.0, 8.0]]]
        assert found[6] == of(3 + rank).tolist()
        assert found[7] == [rank + 10.0 * other for other in range(3)]
        first = sum(range(rank + 1))
        assert found[8] == [first + k + 10.0 * other for other in range(3) for k in range(rank + 1)]
        assert found[9] == [{"rank": other} for other in range(3)]


def test_a_group_has_some_of_the_ranks() -> None:
    def program(rank: int) -> list[float]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        dist.all_reduce(tensor := of(rank), group=groups[rank % 2])
        return tensor.tolist()

    assert fsdp.simulate(4, program) == [[2.0, 18.0], [4.0, 16.0]] * 2


@SEEDS
@pytest.mark.parametrize("kind", [*pipeline.SCHEDULES, *pipeline.ZERO_BUBBLE])
def test_schedules_of_pipelines_train_as_one_process(kind: str, seed: int) -> None:
    found = fsdp.simulate(4, lambda rank: pipeline.train(fsdp, kind, rank, 4, 2), seed=seed)
    model = nn.Sequential(*pipeline.layers(len({name for one in found for name in one["params"]}) // 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        generators = [torch.Generator().manual_seed(10 * step + rank) for rank in range(2)]
        data = torch.cat([torch.randn(2, 2 * pipeline.MICRO_BATCHES, pipeline.WIDTH, generator=one) for one in generators], 1)
        nn.functional.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one in found:
        wanted = {name: model.state_dict()[name] for name in one["params"]}
        torch.testing.assert_close(one["params"], wanted, rtol=2e-5, atol=2e-6)


@functools.cache
def pipeline_without_failure() -> list[Retried]:
    return fsdp.simulate(4, lambda rank: stage_retried("", None, 0))


@SEEDS
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_of_a_pipeline_that_fails_is_named_and_the_step_is_done_again(stage: tuple[str, int, int], seed: int) -> None:
    found = fsdp.simulate(4, lambda rank: stage_retried(*stage), seed=seed)
    if stage == LATE:
        assert all([one.told[-1].kind == "WorldError" and "load a checkpoint" in one.told[-1].text for one in found])
        return
    for rank, (one, other) in enumerate(zip(found, pipeline_without_failure(), strict=True)):
        assert [told[0:3:2] for told in one.told] == [("Mine", None) if rank == stage[1] else ("PeerFailed", stage[1])]
        assert one.losses == other.losses and all(map(torch.equal, one.weights, other.weights))


def test_messages_that_nobody_receives_are_found() -> None:
    with pytest.raises(fsdp.WorldError, match=r"Rank 0 waits for broadcast\('message', .*, messages 0 from 1 to 0'"):
        fsdp.simulate(2, lambda rank: dist.recv(torch.zeros(2), 1 - rank))


def test_ranks_that_call_different_collectives_get_an_error() -> None:
    def program(rank: int) -> None:
        if rank:
            dist.barrier()
        else:
            dist.all_reduce(of(rank))

    with pytest.raises(fsdp.WorldError, match="all_reduce"):
        fsdp.simulate(2, program)


def test_dtensors_are_redistributed_over_a_mesh() -> None:
    def program(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.arange(10.0).view(5, 2)
        rows = distribute_tensor(full, mesh["dp"], [Shard(0)])
        both = distribute_tensor(full, mesh, [Shard(1), Shard(0)])
        parts = DTensor.from_local(of(rank), mesh["tp"], [Partial()], run_check=False)
        summed = parts.redistribute(placements=[Replicate()]).to_local()
        return [rows.full_tensor().equal(full), both.full_tensor().equal(full), summed.tolist(), mesh["tp"].get_local_rank()]

    found = fsdp.simulate(4, program)
    assert found == [[True, True, [row, 20.0 - row], rank % 2] for rank, row in zip(range(4), (1.0, 1.0, 5.0, 5.0), strict=True)]


def test_a_module_is_sharded_over_some_of_the_ranks() -> None:
    case = CASES["net"]

    def program(rank: int) -> Trained:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        return train(wrap(case, process_group=groups[rank % 2]), own_batches(case, rank))

    found = fsdp.simulate(4, program)
    for first in range(2):
        wanted = train(case.model(), [[case.batch(rank, step) for rank in (first, first + 2)] for step in range(3)])
        assert_trained_alike(joined(found[first::2], case.model()), wanted)


def test_reading_a_tensor_parallel_parameter_kept_from_a_forward_is_refused() -> None:
    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        block = nn.Sequential(nn.Linear(5, 6))
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel()})
        fsdp.fully_shard(block, mesh=mesh["dp"], dtensors=True)
        kept: list[Any] = []
        block[0].register_forward_hook(lambda module, args, out: kept.append(module.weight))
        block(torch.ones(2, 5)).sum().backward()
        said = []
        for look in (repr, DTensor.sum, DTensor.full_tensor, DTensor.to_local, DTensor.tolist):
            with pytest.raises(fsdp.ShardingError) as refusal:
                (look if look is repr else getattr(kept[0], look.__name__))(*([kept[0]] if look is repr else []))
            said.append(str(refusal.value))
        return said

    for said in fsdp.simulate(4, program):
        assert all("was kept from inside a forward" in one for one in said)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_counts_as_a_change_of_dtensors(foreach: bool) -> None:
    def program(rank: int) -> list[bool]:
        model = fsdp.fully_shard(make_net(), dtensors=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        loss_of(model(X)).backward()
        before = [p._version for p in model.parameters()]
        optimizer.step()
        return [p._version > version for p, version in zip(model.parameters(), before, strict=True)]

    assert all(map(all, fsdp.simulate(2, program)))
