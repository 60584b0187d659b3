"""The norm is that of all gradients of all ranks together."""

import gc
import math
import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import fsdp
from fsdp.compat import fairscale
from tests.support.models import CASES, Case, assert_close, join_all, local, loss_of, world_log, wrap
from tests.support.ranks import on_ranks

POWERS = [1.0, 2.0, 3.0, math.inf]


def backward(model: nn.Module, case: Case, ranks: list[int], without: str | None = None) -> None:
    for rank in ranks:
        (loss_of(model(case.batch(rank, 0))) / len(ranks)).backward()
    for name, p in model.named_parameters():
        if without is not None and name.startswith(without):
            p.grad = None


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize(("name", "size", "without"), [*product(("net", "tied", "odd"), (1, 3), (None,)), ("net", 2, "blocks.1")])
def test_norm_and_clipped_gradients_are_those_of_one_process(name: str, power: float, size: int, without: str | None) -> None:
    """Missing gradients count as zero."""
    case = CASES[name]
    plain = case.model()
    backward(plain, case, list(range(size)), without)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, power)
    assert norm > 0.1, "nothing to clip"

    def fn(rank: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        model = wrap(case)
        backward(model, case, [rank], without)
        return fsdp.clip_grad_norm_(model, 0.1, power), {n: p.grad for n, p in model.named_parameters()}

    results = fsdp.simulate(size, fn)
    assert all(torch.equal(found, results[0][0]) for found, _ in results)
    assert torch.allclose(results[0][0], norm.float(), rtol=1e-6)
    parameters = dict(plain.named_parameters())
    together = join_all([gradients for _, gradients in results], parameters)
    assert_close(together, {n: p.grad for n, p in parameters.items()}, within=2e-6)


@on_ranks(2)
def test_a_small_norm_changes_nothing(rank: int) -> None:
    model = wrap(CASES["net"])
    backward(model, CASES["net"], [rank])
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    fsdp.clip_grad_norm_(model, 1e6)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, before, rtol=0, atol=0)


def test_no_gradient_at_all_has_no_norm() -> None:
    assert [float(norm) for norm in fsdp.simulate(2, lambda rank: fsdp.clip_grad_norm_(wrap(CASES["net"]), 1.0))] == [0.0, 0.0]


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (101, torch.float16), (101, torch.bfloat16)])
@on_ranks(4)
def test_ranks_that_hold_no_part_take_part_and_half_precision_does_not_overflow(rank: int, size: int, dtype: torch.dtype) -> None:
    model = fsdp.fully_shard(nn.Linear(size, size, bias=False, dtype=dtype))
    model(torch.full((1, size), 3072.0, dtype=dtype)).sum().backward()
    assert float(fsdp.clip_grad_norm_(model, 1.0)) == pytest.approx(3072.0 * size, rel=1e-6)


@on_ranks(2)
def test_the_method_of_the_wrapper_is_the_function_and_communicates_once(rank: int) -> None:
    model = wrap(CASES["net"])
    backward(model, CASES["net"], [rank])
    before = len(world_log())
    model.clip_grad_norm_(1.0)
    assert [call.kind for call in world_log()[before:]] == ["all_reduce"]


@pytest.mark.parametrize("power", [2.0, math.inf])
@on_ranks(3)
def test_a_gradient_that_is_not_a_number_says_so_on_every_rank(rank: int, power: float) -> None:
    model = wrap(CASES["net"])
    backward(model, CASES["net"], [rank])
    if rank == 1:
        local(next(p.grad for p in model.parameters() if p.grad is not None))[0] = math.nan
    assert bool(fsdp.clip_grad_norm_(model, 1.0, power).isnan()) is True


@on_ranks(2)
def test_a_scaler_steps_an_optimizer_of_which_this_rank_holds_nothing(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fsdp.ShardedGradScaler(model, init_scale=4.0)
    scaler.scale(model(torch.full((1, 1), float("inf") if rank == 0 else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    "way", [{}, {"sharding_strategy": "NO_SHARD"}, {"dtensors": True}], ids=["shards", "replicas", "dtensors"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wide_first", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["fsdp's scaler", "torch's scaler"])
@on_ranks(4)
def test_all_ranks_of_two_roots_leave_out_a_step(
    rank: int, own: bool, wide_first: bool, dtype: torch.dtype, way: dict[str, Any]
) -> None:
    """One root is over all ranks, the other one over the rows of a mesh; one rank finds an overflow in the latter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "shard"))
    wide = fsdp.fully_shard(nn.Linear(4, 8), **way)
    narrow = fsdp.fully_shard(nn.Linear(4, 8).to(dtype), mesh=mesh["shard"], **way)
    roots = nn.ModuleList([wide, narrow] if wide_first else [narrow, wide])
    optimizer = torch.optim.SGD(roots.parameters(), lr=0.1)
    scaler = fsdp.ShardedGradScaler(roots, "cpu", init_scale=4.0) if own else torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [local(p).clone() for p in roots.parameters()]
    loss = wide(torch.ones(2, 4)).sum() + narrow(torch.ones(2, 4, dtype=dtype)).sum() * (math.inf if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(local(p), old) for p, old in zip(roots.parameters(), before, strict=True))


class TakesFp16(torch.amp.GradScaler):
    """Names an argument, as scalers of users do."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)


@pytest.mark.parametrize("wide_first", [True, False])
@on_ranks(4)
def test_ranks_whose_optimizers_have_other_roots_leave_out_a_step_together(rank: int, wide_first: bool) -> None:
    """Ranks 0 and 1 train a second root, in which one of them finds an overflow."""
    pair = dist.new_group([0, 1])
    wide = fsdp.fully_shard(nn.Linear(4, 4))
    narrow = [fsdp.fully_shard(nn.Linear(4, 4), process_group=pair)] if rank < 2 else []
    roots = nn.ModuleList([wide, *narrow] if wide_first else [*narrow, wide])
    optimizer, scaler = torch.optim.SGD(roots.parameters(), lr=0.1), TakesFp16("cpu", init_scale=4.0)
    loss = wide(torch.ones(2, 4)).sum() + sum(one(torch.full((2, 4), math.inf if rank else 1.0)).sum() for one in narrow)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


@on_ranks(4)
def test_a_rank_without_gradients_answers_those_that_ask_for_overflows(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    roots = nn.ModuleList([fsdp.fully_shard(nn.Linear(4, 4)), fsdp.fully_shard(nn.Linear(4, 4), process_group=rows[rank // 2])])
    optimizer, scaler = torch.optim.SGD(roots.parameters(), lr=0.1), fairscale.ShardedGradScaler(init_scale=4.0)
    loss = roots[1](torch.ones(1, 4)).sum() if rank < 2 else torch.zeros((), requires_grad=True) * 1
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_scaler_keeps_no_model_and_an_unwrapped_one_asks_nobody() -> None:
    def fn(rank: int) -> bool:
        model = fsdp.fully_shard(nn.Linear(4, 4))
        scaler, reference = fsdp.ShardedGradScaler(model), weakref.ref(model.weight)
        model(torch.ones(1, 4)).sum().backward()
        fsdp.unwrap(model)
        if rank == 0:
            optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
            plain.scale(model(torch.ones(1, 4)).sum()).backward()
            plain.step(optimizer)
            del optimizer, plain
        del model
        gc.collect()
        return reference() is None and scaler.is_enabled()

    assert fsdp.simulate(2, fn) == [True, True]


@on_ranks(4)
def test_dtensors_of_no_unit_leave_out_a_step_together(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    places: list[tuple[DeviceMesh, list[Placement]]] = [(mesh["tp"], [Shard(0)]), (mesh, [Shard(0), Shard(1)])]
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 4), *one)) for one in places]
    for p, one in zip(params, places, strict=True):
        p.grad = DTensor.from_local(torch.full_like(local(p), math.inf if rank == 3 else 1.0), *one)
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_clipping_inside_a_summon_is_refused_and_loses_nothing(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(1, 8, bias=False))
    with fsdp.no_sync(model):
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    with fsdp.summon_full_params(model, writeback=False), pytest.raises(fsdp.ShardingError, match="outside any forward"):
        fsdp.clip_grad_norm_(model, 1.0)
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    assert local(model.weight.grad).flatten().tolist() == [3.0] * 4


@on_ranks(2)
def test_clipping_parameters_that_are_not_sharded_is_refused(rank: int) -> None:
    model = nn.ModuleDict({"sharded": fsdp.fully_shard(nn.Linear(2, 2)), "plain": nn.Linear(2, 2)})
    with pytest.raises(fsdp.ShardingError, match=r"'plain\.weight' is not sharded"):
        fsdp.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((5, 1.0), "takes a model, or a list of those"),
        (("model", "x"), "max_norm must be a number, not 'x'"),
        (("model", torch.ones(2)), "max_norm must be a number, not tensor"),
        (("model", 1.0, "x"), "norm_type must be a number, not 'x'"),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_is_no_model_or_no_number_is_refused_before_the_norm(rank: int, given: Any, text: str) -> None:
    model = fsdp.fully_shard(nn.Linear(2, 2))
    with pytest.raises(fsdp.ShardingError, match=text):
        fsdp.clip_grad_norm_(*(model if one == "model" else one for one in given))
    assert "norm of gradients" not in [call.label for call in world_log()]
