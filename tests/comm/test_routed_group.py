"""A routed group does for torch's functions what the group does that it stands for: in two processes over gloo."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_flatten

import fsdp
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def of(rank: int, *shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 10 * rank


def into(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def filled(outputs: list[Tensor], call: Callable[..., Any], *args: Any, **named: Any) -> list[Tensor]:
    call(*args, **named)
    return outputs


def reduced(group: Any, rank: int, **named: Any) -> Tensor:
    dist.all_reduce(tensor := of(rank, 3), group=group, **named)
    return tensor


def awaited(group: Any, rank: int) -> Any:
    work = dist.all_reduce(tensor := of(rank, 3), group=group, async_op=True)
    work.wait(timedelta(seconds=20))
    return tensor, work.is_completed(), work.get_future().value()


def messages(group: Any, rank: int) -> Any:
    (got,) = into((3,))
    works = [dist.isend(of(rank, 3), group=group, group_dst=1 - rank), dist.irecv(got, group=group, group_src=1 - rank)]
    for work in works:
        work.wait()
    (any_source,) = into((2,))
    source = dist.recv(any_source, group=group) if rank else dist.send(of(5, 2), group=group, group_dst=1)
    (batched,) = into((3,))
    peer = dist.get_global_rank(group, 1 - rank)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, of(rank, 3), peer, group), dist.P2POp(dist.irecv, batched, peer, group)]
    ):
        work.wait()
    return got, source, any_source, batched


def objects(group: Any, rank: int) -> Any:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    sent = [("from", rank)]
    dist.broadcast_object_list(sent, group=group, group_src=1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, group=group, group_src=0)
    return gathered, sent, scattered


def functionally(group: Any, rank: int) -> Any:
    name = group.group_name
    return [
        functional.all_reduce(of(rank, 3), "sum", name) * 1,
        functional.all_gather_tensor(of(rank, 2, 2), 0, name) * 1,
        functional.reduce_scatter_tensor(of(rank, 4), "sum", 0, name) * 1,
        functional.all_to_all_single(of(rank, 3 + rank), [1 + rank, 1 + 2 * rank], [1, 2 + rank], name) * 1,
        functional.broadcast(of(rank, 2), 1, name) * 1,
        [one * 1 for one in functional.all_reduce_coalesced([of(rank, 2), of(rank, 3)], "sum", name)],
        [one * 1 for one in functional.all_gather_into_tensor_coalesced([of(rank, 2), of(rank, 3)], name)],
    ]


def coalesced(group: Any, rank: int) -> Any:
    tensors = [of(rank, 2), of(rank, 3)]
    with dist._coalescing_manager(group=group):
        for one in tensors:
            dist.all_reduce(one, group=group)
    return tensors


def facts(group: Any, rank: int) -> Any:
    return (
        (dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group), dist.get_process_group_ranks(group)),
        (group.group_name, group.group_desc, group.size(), group.rank(), [str(one) for one in group._device_types]),
    )


def refused(group: Any, rank: int) -> str:
    try:
        dist.all_reduce(of(rank, 2), dist.ReduceOp.BAND, group=group)
    except (RuntimeError, ValueError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "nothing"


CALLS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "all_reduce": reduced,
    "max": lambda group, rank: reduced(group, rank, op=dist.ReduceOp.MAX),
    "async": awaited,
    "broadcast": lambda group, rank: filled([t := of(rank, 3)], dist.broadcast, t, group=group, group_src=1),
    "reduce": lambda group, rank: filled([t := of(rank, 3)], dist.reduce, t, group=group, group_dst=0)[rank:],
    "all_gather": lambda group, rank: filled(o := into((3,), (3,)), dist.all_gather, o, of(rank, 3), group=group),
    "into_tensor": lambda group, rank: filled(o := into((6,)), dist.all_gather_into_tensor, o[0], of(rank, 3), group=group),
    "gather": lambda group, rank: filled(
        o := into((3,), (3,)), dist.gather, of(rank, 3), o if rank == 0 else None, group=group, group_dst=0
    ),
    "scatter": lambda group, rank: filled(
        o := into((3,)), dist.scatter, o[0], [of(3, 3), of(4, 3)] if rank == 0 else None, group=group, group_src=0
    ),
    "reduce_scatter": lambda group, rank: filled(o := into((3,)), dist.reduce_scatter_tensor, o[0], of(rank, 6), group=group),
    "all_to_all": lambda group, rank: filled(
        o := into((2 + 3 * rank,)),
        dist.all_to_all_single,
        o[0],
        of(rank, 3 + rank),
        [1 + rank, 1 + 2 * rank],
        [1, 2 + rank],
        group=group,
    ),
    "barrier": lambda group, rank: dist.barrier(group=group),
    "messages": messages,
    "objects": objects,
    "functional": functionally,
    "coalesced": coalesced,
    "facts": facts,
    "refused": refused,
}


def shard_is_refused(model: nn.Module, group: Any) -> str:
    try:
        dist.all_reduce(model.weight, group=group)
    except fsdp.ShardingError as refusal:
        return str(refusal)
    return "nothing"


def one_life(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    before = mesh["tp"].get_group()
    calls = {"before": {name: call(before, rank) for name, call in CALLS.items()}}
    parallelize_module(block := nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    fsdp.fully_shard(block, mesh=mesh["dp"])
    routed = mesh["tp"].get_group()
    calls["routed"] = {name: call(routed, rank) for name, call in CALLS.items()}
    calls["held"] = {name: call(before, rank) for name, call in CALLS.items()}
    model = fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh["tp"])  # a group may serve two models in two ways
    model(torch.ones(2, 4)).sum().backward()
    calls["routed"]["shard"] = shard_is_refused(model, routed)
    calls["before"]["shard"] = calls["held"]["shard"] = shard_is_refused(model, before)
    return {"calls": calls, "routed": type(routed).__name__, "same": routed == before and hash(routed) == hash(before)}


def run(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    first = one_life(rank)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size)
    return [first, one_life(rank)]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("routed")
    return [life for rank in results_of(run, 2, folder) for life in rank]


def test_it_is_found_by_the_name_of_the_group_and_equals_it(lives: list[dict[str, Any]]) -> None:
    assert [(life["routed"], life["same"]) for life in lives] == [("RoutedGroup", True)] * 4


@pytest.mark.parametrize("name", [*CALLS, "shard"])
@pytest.mark.parametrize("which", ["routed", "held"])
def test_what_torch_calls_on_it_does_the_same(which: str, name: str, lives: list[dict[str, Any]]) -> None:
    for life in lives:
        mine, theirs = (tree_flatten(life["calls"][one][name]) for one in (which, "before"))
        assert mine[1] == theirs[1]
        for one, other in zip(mine[0], theirs[0], strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
