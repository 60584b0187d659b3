"""What optimizers of other packages do with parameters, kind by kind: the weights of one process, or a refusal on every rank.

docs/reference/optimizers.md lists the packages that were tried. None of them need be installed here.
"""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import fsdp
from tests.shards.optimizer_table import Row
from tests.shards.test_optimizers import assert_refused, assert_right, outcome

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


def row(update: Update, refused: str = "") -> Row:
    return Row(lambda model: Updating(list(model.parameters()), update), refused=refused)


def out_of_its_own(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As AdaBound, AdaMod and others: the denominator becomes the quotient."""
    denominator = grad.abs().add_(0.1)
    assert torch.div(grad, denominator, out=denominator) is denominator
    p.sub_(denominator, alpha=0.1)


def out_of_numbers(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    largest = state.setdefault("largest", torch.zeros_like(p))
    torch.maximum(largest, grad.abs(), out=largest)
    torch.pow(2.0, largest, out=largest)
    torch.clamp(largest, max=4.0, out=largest)
    torch.where(grad > 0, largest, 1.0, out=largest)
    p.sub_(grad * largest, alpha=0.1)


def in_place(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """As Grams and ROSE: in-place forms that torch does not mark as element by element."""
    p.sub_(grad.clone().abs_().mul_(grad.sign()), alpha=0.1)
    p.sub_(grad.clone().copysign_(p).gt_(0.001).xlogy_(2.0), alpha=0.01)


RIGHT: Final[dict[str, Update]] = {
    "in-place forms": in_place,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_what_works_element_by_element_is_right(name: str, size: int) -> None:
    one = row(RIGHT[name])
    assert_right(one, fsdp.simulate(size, lambda rank: outcome(one, rank)), size)


class Wrapper(torch.optim.Optimizer):
    """As Magma and Lookahead of pytorch_optimizer: it never calls Optimizer.__init__, and has the state of the optimizer in it."""

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
