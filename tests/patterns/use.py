"""What is used of a model: by some steps, by some ranks, by some losses."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd, steps, train


class Skips(Net):
    """Goes through the blocks it is told to."""

    def forward(self, x: Tensor, *through: int) -> Tensor:
        x = torch.tanh(self.enter(x))
        for number in through:
            x = self.blocks[number](x)
        return self.head(x)


@pattern(
    "a unit that is skipped in some steps",
    "engines wait for a gradient that never comes, or prefetch a unit that is never called",
    gathers=(3 + 2) + (2 + 1) + (3 + 2) + (1 + 0) + 4,
    reductions=3 + 2 + 3 + 1,
    cost="units called, and again but for the root's own; one in vain ahead of each forward and backward that leaves a unit "
    "out; units that were called are reduced",
)
def _(run: Run) -> Yields:
    model = run.shard(Skips(), {Block})
    optimizer = sgd(model)
    for step, through in enumerate([(0, 1), (1,), (0, 1), ()]):
        optimizer.zero_grad()
        loss_of(model(run.data(step, 2, WIDTH), *through)).backward()
        yield
        optimizer.step()


@pattern(
    "units in another order in every step",
    "prefetch follows a record that is no longer true",
    gathers=7 + 7 + (3 + 1) + (3 + 2) + 7 + 4,
    reductions=4 + 4 + 2 + 3 + 4,
    cost="units called, and again backward; one in vain ahead of each pass in which the next one recorded does not come; "
    "units that were called are reduced, also twice called ones once",
)
def _(run: Run) -> Yields:
    model = run.shard(Skips(3), {Block})
    for step, through in enumerate([(0, 1, 2), (2, 1, 0), (1, 1), (0, 2), (0, 1, 2)]):
        loss_of(model(run.data(step, 2, WIDTH), *through)).backward()
        yield


class Optional(nn.Module):
    """Uses its second parameter when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor, told: bool) -> Tensor:
        return torch.tanh(self.always(x)) + (self.sometimes if told else 0)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Optional(), Block()

    def forward(self, x: Tensor, told: bool) -> Tensor:
        return self.last(self.middle(self.first(x), told))


@pattern(
    "a parameter that only some ranks use",
    "ranks that count gradients wait for each other for ever",
    gathers=2 * 6,
    reductions=2 * 3,
    cost="2 steps: 3 units, twice each",
)
def _(run: Run) -> Yields:
    model = run.shard(Chain(), {Block, Optional})
    for step in range(2):
        loss_of(model(run.data(step, 2, WIDTH), (run.rank + step) % 2 == 0)).backward()
        yield


@pattern(
    "a parameter that only some ranks use, while the graphs of several forwards are alive",
    "what a backward does not go through must not hold a unit back, nor may counting decide on some ranks only",
    gathers=3 * 3 + 3 * 3,
    reductions=3 * 3,
    cost="3 forwards of 3 units; each backward gathers them again",
)
def _(run: Run) -> Yields:
    model = run.shard(Chain(), {Block, Optional})
    losses = [loss_of(model(run.data(number, 2, WIDTH), (run.rank + number) % 2 == 0)) for number in range(3)]
    for number in (1, 2, 0):
        losses[number].backward()
        yield


@pattern(
    "a parameter that only some ranks use, in reentrant checkpoints",
    "each checkpoint is a backward of its own, in which a gradient comes on some ranks only",
    gathers=2 * 6,
    reductions=2 * 3,
    cost="2 steps: 3 units, twice each",
)
def _(run: Run) -> Yields:
    model = run.shard(Chain(), {Block, Optional})
    for step in range(2):
        x, told = run.data(step, 2, WIDTH), (run.rank + step) % 2 == 0
        x = checkpoint(model.first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(lambda y, told=told: model.last(model.middle(y, told)), x, use_reentrant=True)
        loss_of(x).backward()
        yield


@pattern(
    "a parameter that no rank uses in some steps",
    "its gradient is None where plain torch leaves None, not zero",
    gathers=3 * 6,
    reductions=3 * 3,
    cost="3 steps: 3 units, twice each",
)
def _(run: Run) -> Yields:
    model = run.shard(Chain(), {Block, Optional})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(run.data(step, 2, WIDTH), step == 1)).backward()
        yield
        optimizer.step()


class HasSpares(Net):
    """A unit that is never called, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.scale = Block(), nn.Parameter(torch.ones(WIDTH))


@pattern(
    "units and parameters that are never used",
    "left over from pretraining",
    gathers=3 + 2,
    reductions=3,
    cost="an ordinary step; the fourth unit is neither gathered nor reduced",
)
def _(run: Run) -> Yields:
    model = run.shard(HasSpares(), {Block})
    train(model, run.data(0, 2, WIDTH))
    yield


class Both(Net):
    """Returns what its blocks made, one by one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(self.enter(x))
        return tuple(self.head(block(x)) for block in self.blocks)


@pattern(
    "outputs of units that only some ranks put in the loss",
    "the backward does not come through the same units everywhere",
    disagrees=True,
)
def _(run: Run) -> Yields:
    model = run.shard(Both(), {Block})
    for step in range(2):
        outputs = model(run.data(step, 2, WIDTH))
        loss_of(outputs[(run.rank + step) % 2]).backward()
        yield


@pattern("a rank whose loss depends on nothing", "it has a backward, but of no parameter", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        output = model(run.data(step, 2, WIDTH))
        (loss_of(output) * (run.rank != 0)).backward()
        yield


class Exits(Net):
    """A classifier behind every block, as for early exits."""

    def __init__(self) -> None:
        super().__init__(3)
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in self.blocks)

    def forward(self, x: Tensor, until: int) -> list[Tensor]:
        x = torch.tanh(self.enter(x))
        found = []
        for block, leave in zip(self.blocks[:until], self.exits, strict=False):
            x = block(x)
            found.append(leave(x))
        return found


@pattern(
    "early exits, all in the loss",
    "several outputs leave the root at different depths",
    gathers=2 * (10 + 10),
    reductions=2 * 10,
    cost="2 steps: 3 blocks, each with a layer that is a unit and an exit, and the first layer; a head is never called",
)
def _(run: Run) -> Yields:
    model = run.shard(Exits(), {Block, nn.Linear})
    for step in range(2):
        torch.stack([loss_of(one) for one in model(run.data(step, 2, WIDTH), 3)]).sum().backward()
        yield


@pattern(
    "early exits, one in the loss",
    "units behind the exit have run, and have no backward",
    gathers=3 * 10 + (4 + 6 + 8) + 2,
    reductions=4 + 6 + 8,
    cost="3 forwards of all; backwards of one, two and three blocks, each block 2 units, with the exit and the first layer; "
    "one in vain ahead of the second and third",
)
def _(run: Run) -> Yields:
    model = run.shard(Exits(), {Block, nn.Linear})
    for step in range(3):
        loss_of(model(run.data(step, 2, WIDTH), 3)[step]).backward()
        yield


@pattern(
    "early exits, the forward ends there",
    "units behind the exit are not called",
    gathers=(4 + 4) + (10 + 8) + (7 + 6) + 3,
    reductions=4 + 8 + 6,
    cost="forward and backward until the exit, the backward without the exits before it; in vain, ahead of two backwards and "
    "of the end of the third forward",
)
def _(run: Run) -> Yields:
    model = run.shard(Exits(), {Block, nn.Linear})
    for step, until in enumerate((1, 3, 2)):
        loss_of(model(run.data(step, 2, WIDTH), until)[-1]).backward()
        yield


class Balanced(Block):
    """Keeps an auxiliary loss as an attribute, as routers do."""

    balance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.linear(x).softmax(-1).square().sum()
        return super().forward(x)


def _balances(model: nn.Module) -> Tensor:
    return torch.stack([block.balance for block in model.blocks]).sum()


@pattern("an auxiliary loss kept as an attribute, in one backward", "the way in is through nothing the unit returned", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Balanced), {Balanced})
    for step in range(2):
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        (loss + _balances(model)).backward()
        yield


@pattern(
    "an auxiliary loss kept as an attribute, in a backward before",
    "as above, on its own; the main one finds its graph",
    gathers=2 * (3 + 2 + 3),
    reductions=2 * 2 * 3,
    cost="a step: 3 forward, 2 in the first backward, 3 in the second",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Balanced), {Balanced})
    for step in range(2):
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        _balances(model).backward(retain_graph=True)
        yield
        loss.backward()
        yield


@pattern(
    "an auxiliary loss kept as an attribute, in a backward after",
    "as above, when everything was freed",
    gathers=2 * (3 + 2 + 3),
    reductions=2 * 2 * 3,
    cost="a step: 3 forward, 2 in the first backward, 3 in the second",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Balanced), {Balanced})
    for step in range(2):
        loss_of(model(run.data(step, 2, WIDTH))).backward(retain_graph=True)
        yield
        _balances(model).backward()
        yield


class Collects(Block):
    """Appends an auxiliary loss to a list."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(self.linear(x).softmax(-1).square().sum())
        return super().forward(x)


def _collects(alone: bool) -> None:
    @pattern(
        f"auxiliary losses appended to a list{', and nothing else' if alone else ''}",
        "no attribute of the unit is set, so nobody sees that there is another way in",
        **steps(2),
    )
    def _(run: Run) -> Yields:
        model = run.shard(Net(block=Collects), {Collects})
        for step in range(2):
            loss = loss_of(model(run.data(step, 2, WIDTH)))
            collected = torch.stack([block.losses.pop() for block in model.blocks]).sum()
            (collected if alone else loss + collected).backward()
            yield


for _alone in (False, True):
    _collects(_alone)


@pattern(
    "features that a forward hook puts in a list, beside the output",
    "graphs of former steps are alive in the list, and the way in is through nothing the unit returned or keeps",
    **steps(3),
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    features: list[Tensor] = []
    model.blocks[0].norm.register_forward_hook(lambda module, args, output: features.append(output))
    for step in range(3):
        optimizer.zero_grad()
        output = model(run.data(step, 2, WIDTH))
        (loss_of(output) + loss_of(features[-1])).backward()
        yield
        optimizer.step()


@pattern(
    "features that a forward hook puts in a list",
    "the way in is through nothing the unit returned or keeps",
    gathers=2 * (3 + 1),
    reductions=2 * 2,
    cost="2 steps: 3 forward, 1 backward; the root's own and one block are reduced",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    features: list[Tensor] = []
    model.blocks[0].norm.register_forward_hook(lambda module, args, output: features.append(output))
    for step in range(2):
        features.clear()
        model(run.data(step, 2, WIDTH))
        loss_of(features[0]).backward()
        yield


class Detaches(Net):
    """No gradient passes between its blocks, and one of them runs without any."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](torch.tanh(self.enter(x)))
        second = self.blocks[1](first.detach())
        with torch.no_grad():
            third = self.blocks[2](second)
        return self.head(second + third) + first.sum()


@pattern(
    "parts that are detached, or run under no_grad",
    "autograd leaves units early, or never enters them",
    gathers=2 * (4 + 2),
    reductions=2 * 3,
    cost="2 steps: 4 forward; backward of two blocks, and of the root's own, which is kept",
)
def _(run: Run) -> Yields:
    model = run.shard(Detaches(), {Block})
    yield from passes(run, model, 2)
