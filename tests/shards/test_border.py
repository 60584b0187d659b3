"""What torch's utilities and the scripts of users do with shards: the numbers of one process, or a refusal with the remedy."""

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fsdp
from fsdp.shards.shard_parameter import ShardParameter
from tests.shards.programs import PROGRAMS, Found, backward, make
from tests.support.everything import some
from tests.support.models import assert_close, join_all, local, weights_of
from tests.support.ranks import on_ranks


def assert_of_one_process(found: list[Found], wanted: Found) -> None:
    """The same numbers on all ranks, and both numbers and weights of one process, within 1e-6."""
    for numbers, _ in found:
        assert numbers == pytest.approx(wanted[0], rel=1e-6, abs=1e-7)
        assert numbers == found[0][0], "ranks have different numbers"
    assert_close(join_all([weights for _, weights in found], wanted[1]), {**wanted[1]})


@pytest.mark.parametrize("size", some(3, 2))
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_weights_are_those_of_one_process(name: str, size: int) -> None:
    program = PROGRAMS[name]
    assert_of_one_process(fsdp.simulate(size, lambda rank: program(range(rank, rank + 1), True)), program(range(size), False))


@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_by_clipping_on_all(size: int) -> None:
    def fn(rank: int) -> str:
        model = make(sharded=True)
        backward(model, range(rank, rank + 1), 0)
        if rank == 1:
            held = next(p.grad for p in model.parameters() if local(p).numel())
            local(held).view(-1)[0] = float("nan")
        before = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped") as told:
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        after = [local(p.grad) for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after, strict=True))
        return str(told.value)

    assert len(set(fsdp.simulate(size, fn))) == 1


DRAWS = "each rank would draw other numbers than a single process. Initialise before wrapping, by param_init_fn, or inside "
FULL = (
    "it needs the full tensor. Use fsdp.full_tensor(tensor), or work inside fsdp.full_parameters(model) for a loss, inside "
    "fsdp.summon_full_params(model, writeback=True)"
)
MEMORY = "neither moved to another device nor shared, nor be a parameter of its own. Move the module before wrapping it"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    **{f"init.{name}": (getattr(nn.init, name), DRAWS) for name in ("uniform_", "normal_", "trunc_normal_")},
    **{f"init.{name}": (getattr(nn.init, name), DRAWS) for name in ("xavier_uniform_", "xavier_normal_")},
    **{f"init.{name}": (getattr(nn.init, name), DRAWS) for name in ("kaiming_uniform_", "kaiming_normal_")},
    "init.sparse_": (lambda p: nn.init.sparse_(p, 0.5), DRAWS),
    "init.orthogonal_": (nn.init.orthogonal_, DRAWS),
    "init.eye_": (nn.init.eye_, FULL),
    "data.normal_": (lambda p: p.data.normal_(), DRAWS),
    "histc": (torch.histc, FULL),
    "histogram": (lambda p: torch.histogram(p.detach(), 10), FULL),
    "a histogram of TensorBoard": (lambda p: p.detach().cpu().numpy(), FULL),
    "tolist": (lambda p: p.detach().tolist(), FULL),
    "median": (lambda p: p.median(), FULL),
    "argmax": (lambda p: p.argmax(), FULL),
    "topk": (lambda p: p.detach().abs().topk(1), FULL),
    "svd": (lambda p: torch.linalg.svdvals(p.detach()), FULL),
    "a row": (lambda p: p[0], FULL),
    "transposed": (lambda p: p.t(), FULL),
    "share_memory_": (lambda p: nn.ParameterList([p]).share_memory(), MEMORY),
    "moved": (lambda p: nn.ParameterList([p]).to("meta"), MEMORY),
    "parameters_to_vector": (lambda p: parameters_to_vector([p]), FULL),
}


@pytest.mark.parametrize("size", some(3, 2))
@pytest.mark.parametrize("name", REFUSED)
@on_ranks("size")
def test_what_needs_the_full_tensor_is_refused_with_the_remedy_and_changes_nothing(rank: int, name: str, size: int) -> None:
    function, remedy = REFUSED[name]
    model = fsdp.fully_shard(nn.Linear(8, 12, bias=False))
    parameter, before = model.weight, weights_of(model)
    assert local(parameter).numel()
    with pytest.raises(fsdp.ShardingError) as told:
        function(parameter)
    assert f"on 'weight', of which this rank holds {tuple(local(parameter).shape)} of (12, 8): " in str(told.value)
    assert remedy in str(told.value)
    assert_close(weights_of(model), {**before}, within=0)


@pytest.mark.parametrize("function", [fsdp.full_tensor, fsdp.to_local])
def test_a_gradient_that_is_not_there_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(fsdp.ShardingError, match="a parameter has no gradient before a backward"):
        function(nn.Linear(2, 2).weight.grad)


class Twin(nn.Module):
    """Cut behind row 2 of `first`, unless `embedding` lies in a buffer of its own: then each rank has a row of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embedding = nn.Linear(4, 4, bias=False), nn.Embedding(2, 4)


AVERAGES: dict[str, Callable[[Any, Any], object]] = {
    "add_": lambda teacher, student: teacher.add_(student, alpha=0.1),
    "lerp_": lambda teacher, student: teacher.lerp_(student, 0.1),
    "_foreach_lerp_": lambda teacher, student: torch._foreach_lerp_([teacher], [student], 0.1),
    "copy_": lambda teacher, student: teacher.copy_(student),
    "swa": lambda teacher, student: get_ema_multi_avg_fn(0.9)([teacher], [student], 1),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_twins_that_are_cut_apart_are_refused_on_every_rank_also_where_their_parts_would_broadcast(name: str) -> None:
    def fn(rank: int) -> tuple[int, int]:
        student, teacher = Twin(), Twin().requires_grad_(False)
        student.first.requires_grad_(False)
        kept, followed = (fsdp.fully_shard(one).embedding.weight for one in (teacher, student))
        before = local(kept).clone()
        with torch.no_grad(), pytest.raises(fsdp.ShardingError, match="are cut over the ranks in different ways"):
            AVERAGES[name](kept, followed)
        assert torch.equal(local(kept), before)
        return local(kept).shape[0], local(followed).shape[0]

    assert fsdp.simulate(2, fn) == [(0, 1), (2, 1)]


@pytest.mark.parametrize("name", ["ones_", "zeros_"])
def test_an_initialisation_that_draws_nothing_is_right(name: str) -> None:
    def fn(rank: int) -> torch.Tensor:
        model = make(sharded=True)
        getattr(nn.init, name)(model.enter.weight)
        model.blocks[0].norm.reset_parameters()
        return fsdp.full_tensor(model.enter.weight).detach().clone()

    for full in fsdp.simulate(2, fn):
        assert torch.equal(full, getattr(torch, name.removesuffix("_"))(8, 6))


@on_ranks(2)
def test_a_deep_copy_of_a_parameter_is_a_shard_of_its_own(rank: int) -> None:
    parameter = make(sharded=True).enter.weight
    copied = copy.deepcopy(parameter)
    assert isinstance(copied, ShardParameter)
    assert copied.requires_grad
    assert copied.shard_info == parameter.shard_info
    assert torch.equal(copied, parameter)
    with torch.no_grad():
        copied.add_(1)
    assert not torch.equal(copied, parameter)


COMPOSITE: Final[list[Callable[[Tensor], Tensor]]] = [
    *(lambda p: p.view(-1), lambda p: p.flatten(), lambda p: p.view(p.shape), lambda p: p[:], lambda p: p.expand_as(p)),
    *(lambda p: p.double(), lambda p: p.to("cpu"), lambda p: p.type_as(p), lambda p: p.multiply(2), lambda p: p.subtract(p)),
    *(lambda p: p.absolute(), lambda p: torch.isclose(p, p), lambda p: p.nanmean()),
]


@pytest.mark.parametrize("act", COMPOSITE)
@on_ranks(3)
def test_in_inference_mode_operators_that_torch_makes_of_others_are_computed(rank: int, act: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode():
        for mine, theirs in zip(make(sharded=True).float().parameters(), make(sharded=False).parameters(), strict=True):
            found = act(mine)
            found = fsdp.full_tensor(found) if found.dim() else found
            torch.testing.assert_close(found, act(theirs).detach())


@pytest.mark.parametrize("act", [torch.diff, torch.trapezoid, torch.quantile, torch.where, nn.functional.dropout])
@on_ranks(3)
def test_in_inference_mode_those_that_depend_on_the_size_of_a_part_are_refused_on_every_rank(rank: int, act: Any) -> None:
    with torch.inference_mode(), pytest.raises(fsdp.ShardingError, match="of which this rank holds"):
        act(make(sharded=True).enter.bias, *([0.5] if act is torch.quantile else []))
