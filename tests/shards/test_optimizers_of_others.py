"""What optimizers of other packages do with parameters, kind by kind: the weights of one process, or a refusal on every rank.

docs/reference/optimizers.md lists the packages that were tried. None of them need be installed here.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.shards.optimizer_table import Row
from tests.shards.test_optimizers import assert_refused, assert_right, outcome
from tests.support.models import Case, assert_close, local
from tests.support.ranks import on_ranks

Update = Callable[[Tensor, Tensor, dict[str, Any]], None]
"""Changes a parameter by its gradient and its state."""


class Updating(torch.optim.Optimizer):
    """Calls one function for each parameter."""

    def __init__(self, params: Any, update: Update) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad, self.state[p])


CONVOLUTION: Final = Case(lambda: nn.Sequential(nn.Conv1d(3, 5, 4), nn.Flatten(), nn.Linear(15, 3)), None)
"""Has a parameter of three dimensions."""


def row(update: Update, refused: str = "") -> Row:
    return Row(lambda model: Updating(list(model.parameters()), update), CONVOLUTION, refused)


def out_of_its_own(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As AdaBound, AdaMod, AdaSmooth, EXAdam, SWATS and VSGD: the denominator becomes the quotient."""
    denominator = grad.abs().add_(0.1)
    assert torch.div(grad, denominator, out=denominator) is denominator
    p.sub_(denominator, alpha=0.1)


def out_of_others(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    largest = state.setdefault("largest", torch.zeros_like(p))
    torch.maximum(largest, grad.abs(), out=largest)
    torch.pow(2.0, largest, out=largest)
    torch.clamp(largest, max=4.0, out=largest)
    torch.where(grad > 0, largest, torch.ones(()), out=largest)
    torch.mul(largest, torch.full(p.shape, 0.1), out=largest)
    p.sub_(grad * largest)


def in_place(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As Grams and ROSE: in-place forms that torch does not mark as element by element."""
    p.sub_(grad.clone().abs_().mul_(grad.sign()), alpha=0.1)
    p.sub_(grad.clone().copysign_(p).gt_(0.001).xlogy_(2.0), alpha=0.01)


def mask(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As MirrorMADGRAD: a number for all that a mask selects."""
    small = p.abs() < 0.2
    p[small] = 0.01
    grad[grad != grad] = 0.0
    p[torch.arange(p.numel()).view(p.shape) % 3 == 0] = torch.full((1,), 0.02)
    p.sub_(grad, alpha=0.1)


def flat(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As Prodigy and D-Adaptation: the dot product of all elements in a row."""
    sums = state.setdefault("sums", torch.zeros_like(p).flatten()[::1])
    sums.add_(grad.view(-1), alpha=0.5)
    scale = torch.dot(sums, torch.flatten(grad)) / (grad.reshape(-1).dot(grad.flatten(0, -1)) + 1)
    p.sub_(sums.view_as(p) * scale.abs() + sums.view(p.shape), alpha=0.1)
    p.view(-1)[...].mul_(0.99)


def one_row(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As AdamP: norms over the last dimension of a view, here of one row."""
    p.sub_(grad / (grad.view(1, -1).norm(dim=1).view([1] * p.dim()) + 1), alpha=0.1)
    with torch.enable_grad():
        state.setdefault("begun", p.flatten().detach().clone()).add_(p.view(-1).data, alpha=0.1)
    p.sub_(state["begun"].view_as(p), alpha=0.01)
    p[...] = p[None].sub(grad[None, :].sum((0, *range(1, 1 + p.dim())), keepdim=True), alpha=0.01)[0]
    p[:] = p.clone()


RIGHT: Final[dict[str, Update]] = {
    "out= of its own": out_of_its_own,
    "out= of others": out_of_others,
    "in-place forms": in_place,
    "a number for what a mask selects": mask,
    "all elements in a row": flat,
    "one row": one_row,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_what_works_element_by_element_or_over_all_elements_is_right(name: str, size: int) -> None:
    one = row(RIGHT[name])
    assert_right(one, fsdp.simulate(size, lambda rank: outcome(one, rank)), size)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_view_are_right_where_a_row_lies_on_one_rank(size: int) -> None:
    def fn(rank: int | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(2, 12, 3, bias=False)
        if rank is not None:
            fsdp.fully_shard(model)
        with torch.no_grad():
            weight = model.weight.detach()
            channels = weight.view(weight.shape[0], -1)
            assert channels.shape == (12, 18)
            weight.div_(channels.norm(dim=1).view(-1, 1, 1, 1) + 1)
            weight.sub_(channels.sum(1).view(12, 1, 1, 1))
            return weight if rank is None else fsdp.full_tensor(weight)

    for found in fsdp.simulate(size, fn):
        assert_close({"": found}, {"": fn(None)})


class Refused:
    """Calls that need other elements, or would write elsewhere than into a shard with the cut of the result."""

    @staticmethod
    def into_ordinary(p: Tensor) -> None:
        torch.div(p, 2.0, out=torch.zeros(p.shape))

    @staticmethod
    def into_another_shape(p: Tensor) -> None:
        torch.add(p.sum(1), 1.0, out=p)

    @staticmethod
    def into_what_would_be_resized(p: Tensor) -> None:
        torch.mul(torch.ones(()), torch.ones(()), out=p)

    @staticmethod
    def reduction_into(p: Tensor) -> None:
        torch.sum(p, 1, out=p)

    @staticmethod
    def some_rows(p: Tensor) -> None:
        p[: p.shape[0] // 2].zero_()

    @staticmethod
    def rows_that_are_as_many_as_those_of_a_rank(p: Tensor) -> None:
        p[:6] = 0.0

    @staticmethod
    def a_row(p: Tensor) -> None:
        p[0] = torch.zeros(8)

    @staticmethod
    def what_a_mask_selects(p: Tensor) -> None:
        p[p > 0] *= 2

    @staticmethod
    def values_for_what_a_mask_selects(p: Tensor) -> None:
        p[p > 0] = torch.zeros(int((p > 0).sum()))

    @staticmethod
    def rows_by_number(p: Tensor) -> None:
        p[torch.tensor([0, 1])] = 0.0


REFUSED: Final = {name: call for name, call in vars(Refused).items() if isinstance(call, staticmethod)}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_is_refused_names_the_parameter_and_changes_nothing(rank: int, name: str) -> None:
    parameter = fsdp.fully_shard(nn.Linear(8, 12, bias=False)).weight
    before = local(parameter).clone()
    with torch.no_grad(), pytest.raises(fsdp.ShardingError, match=r"'weight'.* (needs the full tensor|with the full values)"):
        REFUSED[name](parameter.detach())
    assert torch.equal(local(parameter), before)


@pytest.mark.parametrize("view", [Tensor.abs, lambda p: p.view(-1), lambda p: p.ravel(), torch.flatten])
@on_ranks(2)
def test_a_loss_of_a_view_is_refused(rank: int, view: Callable[[Tensor], Tensor]) -> None:
    weight = fsdp.fully_shard(nn.Linear(8, 12)).weight
    with pytest.raises(fsdp.ShardingError, match=r"'weight'.*fsdp\.full_parameters\(model\)"):
        view(weight).square().sum().backward()
    assert weight.grad is None


def halve(tensor: Any) -> None:
    tensor.mul_(0.5)


def halve_all(tensor: Any) -> None:
    tensor[...] = tensor * 0.5


def halve_into(tensor: Any) -> None:
    torch.mul(tensor, 0.5, out=tensor)


@pytest.mark.parametrize("change", [halve, halve_all, halve_into])
@pytest.mark.parametrize("view", [lambda p: p.data.view(-1), lambda p: p.data[:], lambda p: p.data, lambda p: p.view(-1)])
@on_ranks(2)
def test_what_is_changed_through_a_view_is_seen_by_a_unit_that_is_gathered_ahead(
    rank: int, view: Callable[[Tensor], Tensor], change: Callable[[Tensor], None]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 12, bias=False))
    fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
    weight = model[1].weight
    with torch.no_grad():
        before = model(torch.ones(2, 8))
        model[0].register_forward_pre_hook(lambda *_: change(view(weight)))
        assert torch.allclose(model(torch.ones(2, 8)), before * 0.5)


@pytest.mark.parametrize("shape", [(13,), (1, 65), (5, 13, 1)])
def test_a_view_that_plain_torch_refuses_is_refused_alike(shape: tuple[int, ...]) -> None:
    def fn(rank: int) -> str:
        weight = fsdp.fully_shard(nn.Linear(8, 12)).weight.detach()
        with pytest.raises(RuntimeError, match="is invalid for input of size 96") as told:
            weight.view(*shape)
        return str(told.value)

    assert len(set(fsdp.simulate(2, fn))) == 1


class Wrapper(torch.optim.Optimizer):
    """As Magma and Lookahead of pytorch_optimizer: it never calls Optimizer.__init__, and has the state of another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()
        self.inner, self.defaults = inner, inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in parameters]
        self.inner.step()
        for p, old in zip(parameters, before, strict=True):
            p.lerp_(old, 0.5)


@pytest.mark.parametrize("size", [2, 3])
def test_a_wrapper_that_is_no_initialised_optimizer_is_right(size: int) -> None:
    one = Row(lambda model: Wrapper(torch.optim.AdamW(model.parameters())))
    assert_right(one, fsdp.simulate(size, lambda rank: outcome(one, rank)), size)


def test_the_state_dict_of_the_optimizer_in_a_wrapper_has_values_that_know_the_full_shape() -> None:
    def fn(rank: int) -> set[tuple[int, ...]]:
        model = fsdp.fully_shard(torch.nn.Linear(6, 5))
        optimizer = Wrapper(torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["inner"]["state"]
        return {tuple(one.shape) for kept in state.values() for key, one in kept.items() if key != "step"}

    for shapes in fsdp.simulate(2, fn):
        assert shapes <= {(5, 6), (5,)} and shapes


def test_an_optimizer_that_calls_functions_compiled_in_full_is_refused_before_it_steps() -> None:
    class Kron(Updating):
        def __init__(self, params: Any) -> None:
            self.compiled = torch.compile(torch.square, fullgraph=True, backend="eager")
            super().__init__(params, lambda p, grad, state: p.sub_(self.compiled(grad)))

    refused = (
        "Kron.step: it calls functions that are compiled with fullgraph=True, and a compiled step does not know shards. Use an "
        "optimizer that computes each element of a parameter by itself, such as torch.optim.AdamW or SGD"
    )
    one = Row(lambda model: Kron(model.parameters()), refused=refused)
    assert_refused(one, fsdp.simulate(2, lambda rank: outcome(one, rank)))


def test_functions_that_are_compiled_and_leave_their_graph_at_shards_are_right() -> None:
    @torch.compile(backend="eager")
    def update(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        p.sub_(grad / (grad.norm() + 1), alpha=0.1)

    one = row(update)
    assert_right(one, fsdp.simulate(2, lambda rank: outcome(one, rank)), 2)


class Summing(torch.optim.Optimizer):
    """Keeps one tensor as the state of a parameter, not a dict."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p] = self.state.get(p, 0) + p.grad
            p.sub_(self.state[p], alpha=0.1)


NO_DICT: Final = "Summing keeps a (Shard)?Tensor as its state of 'weight', not a dict, so it cannot be cut, saved or loaded"
MADE_BEFORE: Final = "Summing was made before the module was wrapped with DTensors"


@pytest.mark.parametrize(
    "keywords", [{}, {"dtensors": True}, {"sharding_strategy": "NO_SHARD"}], ids=["ours", "dtensors", "whole"]
)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_state_that_is_no_dict_trains_as_one_process_or_is_refused(keywords: dict[str, Any], before: bool) -> None:
    def fn(rank: int) -> Any:
        torch.manual_seed(0)
        model, data = nn.Linear(3, 4), torch.rand(3, 5, 3)
        optimizer = Summing(model.parameters(), {})

        def step(x: Tensor) -> None:
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if before:
            step(data[0])
        if rank >= 0:
            fsdp.fully_shard(model, **keywords)
        if not before:
            optimizer = Summing(model.parameters(), {})
            step(data[0])
        try:
            step(data[1])
            optimizer.state_dict()
            if rank >= 0:
                fsdp.fully_shard(nn.Linear(2, 2))  # the state is compared again after any cut
            step(data[2])
        except fsdp.ShardingError as error:
            return str(error)
        return fsdp.full_state_dict(model) if rank >= 0 else dict(model.state_dict())

    results = fsdp.simulate(2, fn)
    if refused := NO_DICT if not keywords else MADE_BEFORE if before and "dtensors" in keywords else "":
        assert all(re.match(refused, result) for result in results), results
    else:
        torch.testing.assert_close(results[0], fn(-1))
