"""torch.distributed inside a simulated world: groups, device meshes and DTensors of the simulated ranks."""

import copy
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from tests.comm.failure.dimension_programs import LATE, STAGES, Mine, Retried, stage_retried
from tests.compat.fsdp2 import test_pipelines_gloo as pipeline
from tests.support.everything import EVERYTHING
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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2))
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(7 * step + rank))


def train(model: nn.Module, ranks: list[int]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(3):
        torch.stack([(model(data(rank, step)) - data(rank, step + 9)).square().sum() for rank in ranks]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@SEEDS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_model_whose_shards_are_dtensors_trains_as_one_process(size: int, seed: int) -> None:
    wanted = train(Net(), [*range(size)])

    def program(rank: int) -> list[Tensor]:
        return train(fsdp.fully_shard(Net(), auto_wrap_policy={nn.Sequential}, dtensors=True), [rank])

    for found in fsdp.simulate(size, program, seed=seed):
        torch.testing.assert_close(found, wanted)


@SEEDS
@pytest.mark.parametrize("ways", [(2, 2), (1, 2), (3, 1), (2, 3)])
def test_tensor_parallel_blocks_train_as_one_process(ways: tuple[int, int], seed: int) -> None:
    wanted = train(Net(), [*range(ways[0])])

    def program(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", ways, mesh_dim_names=("dp", "tp"))
        model = Net()
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fsdp.fully_shard(block, mesh=mesh["dp"], dtensors=True)
        return train(fsdp.fully_shard(model, mesh=mesh["dp"], dtensors=True), [mesh["dp"].get_local_rank()])

    for found in fsdp.simulate(ways[0] * ways[1], program, seed=seed):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_mesh_of_two_dimensions_holds_replicas() -> None:
    wanted = train(Net(), [*range(4)])

    def program(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2))
        plain = fsdp.fully_shard(Net(), auto_wrap_policy={nn.Sequential}, sharding_strategy="HYBRID_SHARD", mesh=mesh)
        spread = fsdp.fully_shard(Net(), sharding_strategy="HYBRID_SHARD", mesh=mesh, dtensors=True)
        train(plain, [rank])
        return list(fsdp.full_state_dict(plain, rank0_only=False).values()), train(spread, [rank])

    for state, found in fsdp.simulate(4, program):
        torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_module_is_sharded_over_some_of_the_ranks() -> None:
    def program(rank: int) -> list[Tensor]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = fsdp.fully_shard(copy.deepcopy(Net()), process_group=groups[rank % 2])
        train(model, [rank])
        return list(fsdp.full_state_dict(model, rank0_only=False).values())

    found = fsdp.simulate(4, program)
    for rank in range(4):
        torch.testing.assert_close(found[rank], train(Net(), [rank % 2, rank % 2 + 2]), rtol=1e-4, atol=1e-5)


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
        model = fsdp.fully_shard(Net(), dtensors=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        model(data(rank, 0)).square().sum().backward()
        before = [p._version for p in model.parameters()]
        optimizer.step()
        return [p._version > version for p, version in zip(model.parameters(), before, strict=True)]

    assert all(map(all, fsdp.simulate(2, program)))


def test_two_steps_in_a_row_fail_and_the_third_goes_on() -> None:
    def fn(rank: int) -> list[str]:
        model, failures = fsdp.fully_shard(nn.Linear(4, 4)), []

        def fail(*_: object) -> None:
            if rank and len(failures) < 2:
                raise Mine

        model.register_forward_pre_hook(fail)
        for _ in range(3):
            try:
                model(torch.ones(2, 4)).sum().backward()
            except (Mine, fsdp.PeerFailed) as error:
                failures.append(type(error).__name__)
        return failures

    assert fsdp.simulate(2, fn) == [["PeerFailed"] * 2, ["Mine"] * 2]
