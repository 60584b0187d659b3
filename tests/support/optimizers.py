"""Optimizers, models that were trained with them, and how their states are compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Case, local, own_batches, train, wrap

Make = Callable[[Any], torch.optim.Optimizer]


class RowStatistics(torch.optim.Optimizer):
    """Keeps the mean square of each row, and of each vector in full."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                square = p.grad.square()
                square = square.mean(dim=tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else square
                state = self.state[p]
                state["square"] = square if "square" not in state else (state["square"] + square) / 2
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad / (state["square"].sqrt() + 1), alpha=0.01)


def in_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.dim() < 2]},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW in groups": in_groups,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
    "RMSprop centered": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
}


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """Nested dicts and lists, every bit of the tensors in them."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}.{i}")
    elif isinstance(wanted, Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(local(found), local(wanted)), where
    else:
        assert found == wanted, where


def wrapped(case: Case, make: Make, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(case, **options)
    return model, make(model.parameters())


def trained(case: Case, rank: int, make: Make, steps: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = wrapped(case, make, **options)
    train(model, own_batches(case, rank, steps), lambda _: optimizer)
    return model, optimizer


ROWS = Case(lambda: nn.Sequential(nn.Linear(6, 12, bias=False), nn.Linear(12, 24, bias=False)), {nn.Linear})
"""Cut between rows on 1, 2 and 3 ranks."""
