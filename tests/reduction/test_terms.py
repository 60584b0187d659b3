"""Gradients that autograd leaves as terms of a sum over tensor parallelism: they are added up once a bucket."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp
from fsdp.comm.simulated_group import SimulatedGroup
from tests.building.test_random_dimensions import Block, parallel

WIDTH = 6
Call = tuple[tuple[int, ...], torch.dtype]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The all-reduces of torch that rank 0 calls, by shape and dtype."""
    found: list[Call] = []
    reduce = SimulatedGroup._reduce

    def note(group: SimulatedGroup, tensor: Tensor, opts: Any) -> None:
        if dist.get_rank() == 0:
            found.append((tuple(tensor.shape), tensor.dtype))
        reduce(group, tensor, opts)

    monkeypatch.setattr(SimulatedGroup, "_reduce", note)
    return found


def blocks(tp: DeviceMesh, **options: Any) -> nn.Sequential:
    """Two units. Autograd leaves the gradients of the weight and bias of each norm as terms."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(8), Block(8))
    for block in model:
        parallel(block, "sequence", tp)
    return fsdp.fully_shard(model, auto_wrap_policy={Block}, **options)


def batch(number: int) -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPTIMIZER"])
def test_they_are_added_up_by_one_collective_a_bucket_in_the_reduce_dtype(
    sums: list[Call], strategy: str, reduce_dtype: torch.dtype | None
) -> None:
    def train(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = blocks(mesh["tp"], mesh=mesh["dp"], sharding_strategy=strategy, mp_policy=policy)
        loss = model(batch(rank // 2)).float().square().mean()
        dist.barrier()
        if rank == 0:
            sums.clear()
        loss.backward()

    fsdp.simulate(4, train)
    # the rest is of the styles
    assert [one for one in sums if len(one[0]) == 1] == [((2 * WIDTH,), reduce_dtype or torch.bfloat16)] * 2


def test_under_no_sync_they_are_kept_and_added_up_once(sums: list[Call]) -> None:
    def train(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = blocks(mesh["tp"], mesh=mesh["dp"])
        for number in range(3):
            with fsdp.no_sync(model) if number < 2 else nullcontext():
                model(batch(10 * number + rank // 2)).square().mean().backward()
        count = sum(len(shape) == 1 for shape, _ in sums) if rank == 0 else 0
        return [torch.tensor(count), *(fsdp.full_tensor(p.grad) for p in model.parameters())]

    torch.manual_seed(0)
    alone = nn.Sequential(Block(8), Block(8))
    for number in range(3):
        for coordinate in range(2):
            (alone(batch(10 * number + coordinate)).square().mean() / 2).backward()
    counts, *grads = fsdp.simulate(4, train)[0]
    assert counts == 2
    for p, found in zip(alone.parameters(), grads, strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-6, atol=1e-6)


class Scale(nn.Module):
    """Multiplies rows by a weight. The gradient of the weight is a term of a sum if the rows are cut over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square().sum()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("cut", ["TS", "ST", "TTS", "SST", "TST"], ids=str)
def test_terms_and_sums_in_one_accumulation(cut: str, dp: int) -> None:
    """T: the gradient of a micro-batch is a term of a sum; S: it is the sum."""

    def rows(number: int) -> Tensor:
        return torch.randn(6, 3, generator=torch.Generator().manual_seed(number))

    def train(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (dp, 3), mesh_dim_names=("dp", "tp"))
        model = Scale()
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh["tp"], [Replicate()]))
        fsdp.fully_shard(model, mesh=mesh["dp"])
        for number, kind in enumerate(cut):
            x = distribute_tensor(rows(10 * number + rank // 3), mesh["tp"], [Shard(0) if kind == "T" else Replicate()])
            with fsdp.no_sync(model) if number < len(cut) - 1 else nullcontext():
                loss: Any = model(x)
                loss.backward()
        gradient: Any = model.weight.grad
        assert isinstance(gradient, DTensor)
        return gradient.full_tensor()

    alone = Scale()
    for number in range(len(cut)):
        for coordinate in range(dp):
            (alone(rows(10 * number + coordinate)) / dp).backward()
    results: Sequence[Tensor] = fsdp.simulate(3 * dp, train)
    for found in results:
        torch.testing.assert_close(found, alone.weight.grad, rtol=1e-6, atol=1e-6)
