"""Backwards of every kind, and several roots."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, sgd, steps, train


@pattern(
    "two losses of one forward, retain_graph",
    "the second backward comes after the first one freed everything",
    gathers=3 + 2 + 3,
    reductions=6,
    cost="3 forward, 2 in the first backward, 3 in the second",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    output = model(run.data(0, 2, WIDTH))
    loss_of(output).backward(retain_graph=True)
    yield
    output.square().sum().backward()
    yield


@pattern(
    "two losses of one forward, zero_grad between", "the second gradient is not the sum", gathers=8, reductions=6, cost="as above"
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    output = model(run.data(0, 2, WIDTH))
    loss_of(output).backward(retain_graph=True)
    yield
    model.zero_grad()
    output.square().sum().backward()
    yield


@pattern("the same backward twice", "hooks that fire once a graph leave the second one on freed memory", gathers=8, reductions=6)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    loss = loss_of(model(run.data(0, 2, WIDTH)))
    loss.backward(retain_graph=True)
    yield
    loss.backward()
    yield


class Tells(Net):
    """Returns what it computed on the way as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.tanh(self.enter(x))
        second = self.blocks[0](first)
        return first, second, self.head(self.blocks[1](second))


@pattern(
    "backward(inputs=...) of an activation",
    "no gradient of any parameter comes, and the units are gathered all the same",
    gathers=3 + 2 + 3 + 3,
    reductions=1 + 2 + 3,
    cost="forward 3; down to the node behind the second activation 2, then everything twice. A unit that autograd passes through "
    "is reduced, as its peers may have a gradient of it: one unit, two, three",
)
def _(run: Run) -> Yields:
    model = run.shard(Tells(), {Block})
    first, second, output = model(run.data(0, 2, WIDTH))
    second.retain_grad()
    loss_of(output).backward(inputs=[second], retain_graph=True)
    run.note("second", second.grad)
    loss_of(output).backward(inputs=[first], retain_graph=True)
    run.note("first", first.grad)
    loss_of(output).backward()
    yield


@pattern(
    "torch.autograd.grad of activations and inputs",
    "pipelines split the backward in two; the final callback may never come",
    gathers=3 + 1 + 3 + 3 + 3,
    reductions=3,
    cost="forward 3; down to the second activation 1, then everything three times. Only backward() accumulates, and reduces",
)
def _(run: Run) -> Yields:
    model = run.shard(Tells(), {Block})
    x = run.data(0, 2, WIDTH).requires_grad_()
    first, second, output = model(x)
    for name, of in (("second", second), ("first", first), ("x", x)):
        run.note(name, torch.autograd.grad(loss_of(output), of, retain_graph=True)[0])
    loss_of(output).backward()
    yield
    run.note("gradient of x", x.grad)


class Force(nn.Module):
    """Energy and the force it exerts, as potentials of molecules return them."""

    has_graph = False

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x).square().sum()
        return energy, torch.autograd.grad(energy, x, retain_graph=True, create_graph=self.has_graph)[0]


def forces(run: Run, module: Force) -> Yields:
    model = run.shard(module, {Block, Net})
    for step in range(2):
        energy, force = model(run.data(step, 2, WIDTH))
        run.note("force", force)
        (energy + loss_of(force) if module.has_graph else energy).backward()
        yield


@pattern(
    "torch.autograd.grad inside a forward",
    "a backward through units while the root's forward runs, then the training one",
    gathers=2 * (3 + 3 + 3),
    reductions=2 * 3,
    cost="2 steps: 3 forward, 3 for the force, which reduces nothing, 3 backward; the root has no own",
)
def _(run: Run) -> Yields:
    yield from forces(run, Force())


class Nonlinear(nn.Module):
    """A discriminator whose second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    """How far the slope of the model at `x` is from 1."""
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return (slope.norm(dim=1) - 1).square().mean()


# a step of one penalty alone on a Nonlinear of three units
PENALTY: dict[str, Any] = {
    "gathers": 2 * (3 + 2 + 3),
    "reductions": 2 * 3,
    "cost": "2 steps: 3 forward; 2 in the first backward, which finds the root's own and reduces nothing; 3 in the second",
}


@pattern("a gradient penalty over a leaf", "the second backward reads parameters that the first one freed", **PENALTY)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    for step in range(2):
        penalty = _penalty(model, run.data(step, 3, WIDTH).requires_grad_())
        run.note("penalty", penalty)
        penalty.backward()
        yield


@pattern(
    "a gradient penalty over an interpolation",
    "as above; the input is no leaf, so the first backward ends inside the graph",
    **PENALTY,
)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    for step in range(2):
        real, fake = run.data(2 * step, 3, WIDTH).requires_grad_(), run.data(2 * step + 1, 3, WIDTH)
        _penalty(model, real * 0.3 + fake * 0.7).backward()
        yield
        run.note("gradient of real", real.grad)


@pattern(
    "a gradient penalty in the step of a discriminator",
    "the graphs of D(real) and D(fake) are alive in all of it",
    gathers=3 * (3 * 3 + 2 + 3),
    reductions=3 * 3,
    cost="3 steps: 3 forwards of 3; 2 in the first backward, which finds the root's own and reduces nothing; 3 in the second",
)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        real, fake = run.data(2 * step, 3, WIDTH), run.data(2 * step + 1, 3, WIDTH)
        loss = model(fake).mean() - model(real).mean()
        loss = loss + 10 * _penalty(model, (real * 0.4 + fake * 0.6).requires_grad_())
        loss.backward()
        yield
        run.note("loss", loss)
        optimizer.step()


@pattern("a gradient penalty with D(real) as its own forward", "R1: one forward is in the loss and in the penalty", **PENALTY)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    for step in range(2):
        real = run.data(step, 3, WIDTH).requires_grad_()
        output = model(real)
        slope = torch.autograd.grad(output.sum(), real, create_graph=True)[0]
        (output.square().mean() + 5 * slope.square().sum(1).mean()).backward()
        yield


@pattern(
    "a gradient penalty every other step",
    "steps with and without a second backward take turns, also under no_sync",
    gathers=4 * 2 * 5 + 2 * (3 + 2 + 3),
    reductions=4 * 3,
    cost="4 steps of 2 ordinary micro-batches, one of which synchronises; in 2 of them a penalty: 3 forward, 2 and 3 backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with run.no_sync(model):
            train(model, run.data(2 * step, 3, WIDTH))
            if step % 2:
                _penalty(model, run.data(2 * step + 1, 3, WIDTH).requires_grad_()).backward()
        train(model, run.data(2 * step + 1, 3, WIDTH))
        yield
        optimizer.step()


class Elementwise(nn.Module):
    """No product of matrices; its parameters have one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = (nn.Parameter(torch.linspace(low, 1.5, WIDTH)) for low in (0.5, 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.inside) * self.outside


def _slope(of: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), at, create_graph=True)[0]


def _heat(model: nn.Module, x: Tensor) -> Tensor:
    """A physics-informed loss: how far the model is from solving u_y = u_xx."""
    slope = _slope(model(x), x)
    return (slope[:, 1] - _slope(slope[:, 0], x)[:, 0]).square().mean()


def _third(model: nn.Module, x: Tensor) -> Tensor:
    """Its gradient is a third derivative also in the weights of the last layer."""
    return _slope(_slope(model(x), x).square(), x).square().mean()


Derivatives = Callable[[nn.Module, Tensor], Tensor]


def _derives(name: str, loss: Derivatives, make: Callable[[], nn.Module], where: str, policy: Any, units: int) -> None:
    @pattern(
        f"{name}, {where}",
        "a backward with a graph through the nodes of another one",
        gathers=2 * (units + (units - 1) + 2 * units),
        reductions=2 * units,
        cost="2 steps: all units forward, but for the root's own in the first backward, in the second and in the third",
        within=1e-5,
    )
    def _(run: Run) -> Yields:
        model = run.shard(make(), policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            residual = loss(model, run.data(step, 3, WIDTH).requires_grad_())
            residual.backward()
            yield
            run.note("loss", residual)
            optimizer.step()


for _name, _loss in {"a physics-informed loss": _heat, "third derivatives": _third}.items():
    _derives(_name, _loss, Nonlinear, "in units", {Block}, 3)
    _derives(_name, _loss, Nonlinear, "in one unit", None, 1)
_derives("third derivatives", _third, Elementwise, "of elementwise parameters", None, 1)


class Features(nn.Module):
    """Returns a feature, or keeps it as an attribute."""

    feature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.mix = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.feature = torch.tanh(self.first(x))
        return torch.tanh(self.last(torch.tanh(self.feature @ self.mix))), self.feature


class KeepsFeature(Features):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def _asks(where: str, make: Callable[[], Features]) -> None:
    @pattern(
        f"a penalty on the gradient of a feature that is {where}",
        "the first backward ends inside the unit, at a node that is never entered",
        gathers=2 * (3 + 1 + 3),
        reductions=2 * 3,
        cost="2 steps: 3 forward; the last layer in the first backward, which finds the root's own; 3 in the second",
    )
    def _(run: Run) -> Yields:
        model = run.shard(make(), {nn.Linear})
        for step in range(2):
            found = model(run.data(step, 3, WIDTH))
            output, feature = found if isinstance(found, tuple) else (found, model.feature)
            slope = _slope(output, feature)
            run.note("slope", slope)
            (slope.square().sum() + loss_of(output)).backward()
            yield


_asks("returned", Features)
_asks("kept as an attribute", KeepsFeature)


class TrainsOnTheWay(torch.autograd.Function):
    """In its backward, runs a forward and a backward of a model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            loss_of(ctx.model(leaf)).backward()
        return gradient + leaf.grad, None


@pattern("a backward inside a backward of torch.autograd.grad", "the outer one reduces nothing, the inner one must")
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), Block()), {Block})
    for step in range(2):
        x = run.data(step, 2, WIDTH).requires_grad_()
        inner = model(TrainsOnTheWay.apply(x, model))
        found = torch.autograd.grad(loss_of(TrainsOnTheWay.apply(inner, model)), x)[0]
        yield
        run.note("gradient of x", found)


@pattern(
    "is_grads_batched=True with create_graph=True",
    "a graph of batched gradients cannot be followed",
    refused="is_grads_batched=True",
    reductions=3,
    cost="the step after the refusal",
)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    x = run.data(0, 3, WIDTH).requires_grad_()
    output = model(x).flatten()
    run.refused(lambda: torch.autograd.grad(output, x, torch.eye(3), is_grads_batched=True, create_graph=True))
    train(model, run.data(1, 3, WIDTH))
    yield


class TrainedForce(Force):
    """The force has a graph, because it is trained too."""

    has_graph = True


@pattern(
    "forces that are trained: create_graph inside a forward",
    "a backward with a graph inside the root's forward",
    gathers=2 * (3 + 3 + 3),
    reductions=2 * 3,
    cost="2 steps: 3 forward, 3 for the force, which reduces nothing, 3 backward; the root has no own",
)
def _(run: Run) -> Yields:
    yield from forces(run, TrainedForce())


@pattern(
    "backward(create_graph=True)",
    "reduced gradients have no graph",
    refused="create_graph=True",
    gathers=3 + 5,
    reductions=3,
    cost="a forward, whose backward is refused at the first gradient, one of the root's own; and an ordinary step",
)
def _(run: Run) -> Yields:
    model = run.shard(Nonlinear(), {Block})
    run.refused(lambda: loss_of(model(run.data(0, 3, WIDTH))).backward(create_graph=True))
    train(model, run.data(1, 3, WIDTH))
    yield


@pattern(
    "losses of two roots in one backward",
    "each root has its own callback at the end of the backward",
    gathers=10,
    reductions=6,
    cost="2 roots of 5 and 3",
)
def _(run: Run) -> Yields:
    one, other = run.shard(Net(), {Block}), run.shard(Net(), {Block})
    x = run.data(0, 2, WIDTH)
    (loss_of(one(x)) + 0.5 * loss_of(other(x * 2))).backward()
    yield


@pattern(
    "one root's output is another's input",
    "the backward of one ends inside the other's",
    gathers=2 * (5 + 3),
    reductions=2 * (3 + 2),
    cost="2 steps of either root",
)
def _(run: Run) -> Yields:
    one, other = run.shard(Net(), {Block}), run.shard(nn.Sequential(nn.Linear(3, WIDTH), Block()), {Block})
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(other(one(run.data(step, 2, WIDTH)))).backward()
        yield
        optimizer.step()


@pattern(
    "a GAN with toggled requires_grad",
    "the generator's backward passes through a discriminator whose parameters are frozen",
    gathers=2 * (2 + 3 + 3 + 2 + 2 + 3 + 2 + 2),
    reductions=2 * (3 + 2),
    cost="critic's step: generator 2, critic 3 twice, 2 backward; generator's step: 2 and 3, 2 and 2 backward. "
    "Frozen units are not reduced",
)
def _(run: Run) -> Yields:
    generator, critic = run.shard(nn.Sequential(Block(), Block()), {Block}), run.shard(Nonlinear(), {Block})
    of_generator, of_critic = sgd(generator), sgd(critic)
    for step in range(2):
        critic.requires_grad_(True)
        of_critic.zero_grad()
        with torch.no_grad():
            fake = generator(run.data(2 * step, 3, WIDTH))
        (critic(fake).mean() - critic(run.data(2 * step + 1, 3, WIDTH)).square().mean()).backward()
        yield
        of_critic.step()
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (-critic(generator(run.data(2 * step, 3, WIDTH))).mean()).backward()
        yield
        of_generator.step()


@pattern(
    "a GAN without toggling",
    "the generator's backward leaves gradients in the critic, which it zeroes later",
    gathers=2 * (2 + 3 + 2 + 3 + 2 + 2),
    reductions=2 * (3 + 3 + 2),
    cost="a step: generator 2; critic 3 and 2 backward; critic 3, then 2 and 2 backward",
)
def _(run: Run) -> Yields:
    generator, critic = run.shard(nn.Sequential(Block(), Block()), {Block}), run.shard(Nonlinear(), {Block})
    of_generator, of_critic = sgd(generator), sgd(critic)
    for step in range(2):
        fake = generator(run.data(step, 3, WIDTH))
        of_critic.zero_grad()
        critic(fake.detach()).square().mean().backward()
        yield
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        yield
        of_generator.step()


@pattern(
    "a teacher and a student",
    "the teacher is evaluated between the student's forward and backward",
    gathers=8,
    reductions=3,
    cost="teacher 3, student 5",
)
def _(run: Run) -> Yields:
    teacher, student = run.shard(Net().eval().requires_grad_(False), {Block}), run.shard(Net(), {Block})
    x = run.data(0, 2, WIDTH)
    output = student(x)
    with torch.no_grad():
        target = teacher(x)
    nn.functional.mse_loss(output, target).backward()
    yield


@pattern(
    "a teacher that is a moving average of the student",
    "shards are changed in place, root beside root",
    gathers=3 * (3 + 5),
    reductions=3 * 3,
    cost="3 steps: teacher 3, student 5",
)
def _(run: Run) -> Yields:
    student, teacher = run.shard(Net(), {Block}), run.shard(Net(), {Block})
    teacher.requires_grad_(False)
    optimizer = sgd(student)
    for step in range(3):
        x = run.data(step, 2, WIDTH)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(student(x), target).backward()
        yield
        optimizer.step()
        with torch.no_grad():
            for average, value in zip(teacher.parameters(), student.parameters(), strict=True):
                average.mul_(0.9).add_(value, alpha=0.1)


class Predicts(nn.Module):
    """An encoder that has a teacher, and a predictor that has none."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(self.encoder(x))


def _partly_frozen() -> Net:
    """Frozen and trainable parameters in each of its units."""
    net = Net()
    for module in (net.enter, net.blocks[0].norm, net.blocks[1].linear):
        module.requires_grad_(False)
    return net


def _teaches(how: str, reason: str, frozen_at_wrapping: bool) -> None:
    @pattern(f"a teacher of a partly frozen student, {how}", reason)
    def _(run: Run) -> Yields:
        encoder = _partly_frozen()
        teacher_net = copy.deepcopy(encoder)
        if frozen_at_wrapping:
            teacher_net.requires_grad_(False)
        student = run.shard(Predicts(encoder), {Net, Block})
        teacher = run.shard(teacher_net, {Block})
        teacher.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
        for step in range(3):
            x = run.data(step, 2, WIDTH)
            with torch.no_grad():
                target = teacher(x)
            optimizer.zero_grad()
            nn.functional.mse_loss(student(x), target).backward()
            yield
            optimizer.step()
            with ExitStack() as full, torch.no_grad():
                if run.sharded and frozen_at_wrapping:
                    full.enter_context(fsdp.summon_full_params(teacher))
                    full.enter_context(fsdp.summon_full_params(student, writeback=False))
                for average, value in zip(teacher.parameters(), student.encoder.parameters(), strict=True):
                    assert average.shape == value.shape
                    average.mul_(0.9).add_(value, alpha=0.1)


_teaches("frozen after wrapping", "the shards of the twins must be the same parts", frozen_at_wrapping=False)
_teaches("frozen before wrapping", "the twins are cut apart, so the average is of full parameters", frozen_at_wrapping=True)


class StepsInBackward:
    """An optimizer for each parameter, which steps as soon as that parameter's gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        self._of = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(self, parameter: Tensor) -> None:
        self._of[parameter].step()

    def hook(self) -> None:
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(self.step)

    def step_all(self) -> None:
        for parameter in self._of:
            self.step(parameter)


@pattern("the optimizer steps in hooks of the parameters", "the hook sees whole, unreduced gradients, or nothing", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = StepsInBackward(model)
    if run.sharded:
        optimizer.hook()
    for step in range(2):
        model.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        if not run.sharded:  # where the mean is there only now
            optimizer.step_all()


@pattern("the optimizer steps in hooks set before wrapping", "as above: the hook must move to the shards", **steps(2))
def _(run: Run) -> Yields:
    net = Net()
    optimizer = StepsInBackward(net)
    if run.sharded:
        optimizer.hook()
    model = run.shard(net, {Block})
    for step in range(2):
        model.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        if not run.sharded:
            optimizer.step_all()
