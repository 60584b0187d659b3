"""The little models of the patterns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.patterns.harness import Run, Yields

WIDTH = 4


class Block(nn.Module):
    """Residual; parameters of one and of two dimensions."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks between two layers of the root's own."""

    def __init__(self, blocks: int = 2, width: int = WIDTH, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def loss_of(output: Tensor) -> Tensor:
    """Not linear, and no element's gradient is that of another."""
    return (output.square() * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).mean() + output.sum() * 0.01


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def train(model: nn.Module, x: Tensor) -> Tensor:
    """One ordinary forward and backward; the loss."""
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach()


def passes(run: Run, model: nn.Module, number: int) -> Yields:
    """So many forwards and backwards, whose gradients add up. They are compared after each one."""
    for step in range(number):
        train(model, run.data(step, 2, WIDTH))
        yield


def sgd_steps(run: Run, model: nn.Module, number: int) -> Yields:
    """So many ordinary steps with momentum. What every rank has is compared before each update."""
    optimizer, dtype = sgd(model), next(model.parameters()).dtype
    for step in range(number):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH).to(dtype))
        yield
        optimizer.step()


def steps(number: int) -> dict[str, Any]:
    """What ordinary steps of a `Net` cost: its own unit is kept for the backward, its two blocks are gathered again."""
    return {"gathers": number * (3 + 2), "reductions": number * 3, "cost": f"{number} ordinary steps: 3 forward, 2 backward"}


def steps_of_two(number: int) -> dict[str, Any]:
    """What steps of a root cost that has no parameters of its own, but two units."""
    return {"gathers": number * (2 + 2), "reductions": number * 2, "cost": f"{number} steps: 2 units, forward and backward"}
