"""Weights that are read or changed outside a forward, or inside their own."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, sgd, sgd_steps, steps, train


@pattern(
    "a penalty on the norm of whole weights",
    "outside its unit a parameter is a shard, and the norm of shards is no norm",
    gathers=2 * (5 + 12),
    reductions=2 * 3,
    cost="2 ordinary steps, and one for each of 12 parameters",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        penalty = torch.stack([run.full(parameter).norm() for parameter in model.parameters()]).sum()
        run.note("penalty", penalty)
        (loss + 0.1 * penalty).backward()
        yield
        optimizer.step()


@pattern(
    "a penalty on one whole weight, in a backward of its own",
    "no unit takes part in that backward",
    gathers=5 + 1 + 1,
    reductions=3 + 1,
    cost="an ordinary step; the weight, whose unit alone is reduced; and one in vain ahead of its backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    train(model, run.data(0, 2, WIDTH))
    yield
    run.full(model.blocks[0].linear.weight).norm().backward()
    yield


@pattern("a penalty on every element of the weights", "each rank adds the part of its own shard", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        penalty = torch.stack([run.local(parameter).square().sum() for parameter in model.parameters()]).sum()
        (loss + 0.1 * penalty).backward()
        yield


@pattern(
    "the norm of a shard as a penalty",
    "its value is that of a part, and so is its gradient",
    refused="outside its unit",
    gathers=6,
    reductions=3,
    cost="the step after the refusal",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    run.refused(lambda: model.blocks[0].linear.weight.norm().backward())
    train(model, run.data(0, 2, WIDTH))
    yield


@pattern("clamping weights between steps", "an edit of the shards, seen by the next forward", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)


@pattern("clamping weights between steps, through .data", "an edit that no version counter sees", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


@pattern(
    "weights changed between forward and backward",
    "as plain torch refuses it",
    refused="changed in place between",
    gathers=3 + 5,
    reductions=3,
    cost="a forward, and an ordinary step",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    loss = loss_of(model(run.data(0, 2, WIDTH)))
    if run.sharded:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)
    run.refused(loss.backward)
    train(model, run.data(1, 2, WIDTH))
    yield


class Clamps(Block):
    """Keeps its weights in range, in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@pattern("weights changed in their own forward", "the change is made to unsharded parameters that are freed", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Clamps), {Clamps})
    yield from sgd_steps(run, model, 2)


class Replaces(Block):
    """Puts other data under a parameter, in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


@pattern(
    "weights replaced through .data in their own forward",
    "the new data is no part of what is gathered, nor of what is freed; the next edit of the shard must be seen",
    **steps(3),
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Replaces), {Replaces})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        optimizer.step()
        with torch.no_grad():
            model.blocks[0].linear.weight.mul_(0.5)


class Adjoint(torch.autograd.Function):
    """One step of an ODE solver. Its backward computes the step again, and the gradients of the parameters it was given."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        ctx.field = field
        ctx.save_for_backward(x, *parameters)
        return x + field(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            after = x + ctx.field(x)
        return None, *torch.autograd.grad(after, (x, *parameters), gradient)


class Solver(nn.Module):
    """Gives the parameters of its field to the adjoint."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Adjoint.apply(self.field, x, *self.field.parameters())  # type: ignore[no-untyped-call, no-any-return]


def _solver() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Solver(), nn.Linear(WIDTH, 3))


@pattern(
    "an ODE solver with an adjoint, as one unit with its field",
    "an autograd.Function is given the parameters, and computes with the module in its backward",
    gathers=2 * (2 + 1),
    reductions=2 * 2,
    cost="2 steps: the solver forward and backward, the root's own once",
)
def _(run: Run) -> Yields:
    model = run.shard(_solver(), {Solver})
    yield from sgd_steps(run, model, 2)


@pattern(
    "an ODE solver with an adjoint around units",
    "the Function is given shards, which get no gradient",
    refused="a module around the unit gave the unit's parameters to an operation, .* make that module the unit",
)
def _(run: Run) -> Yields:
    model = run.shard(_solver(), {nn.Linear})
    run.refused(lambda: model(run.data(0, 2, WIDTH)))
    if not run.sharded:
        train(model, run.data(0, 2, WIDTH))
        model.zero_grad()
    yield
