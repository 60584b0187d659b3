"""Forwards and backwards in any order."""

import torch
from torch import Tensor, nn

from tests.patterns.harness import AVERAGE_ONLY, Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd, train

# a Net of two blocks is three units: its own, which is kept from forward to backward, and two that are gathered for each


@pattern("a training step", "the least there is", gathers=15, reductions=9, cost="3 steps: 3 forward, 2 backward")
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        loss.backward()
        yield
        run.note("loss", loss)
        optimizer.step()


@pattern(
    "two forwards, one backward of both",
    "an engine with one flag a forward frees the parameters after the first of the two",
    gathers=8,
    reductions=3,
    cost="2 forwards of 3, one backward of 2: the blocks stay until both calls are left",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    (loss_of(model(run.data(0, 2, WIDTH))) + loss_of(model(run.data(1, 2, WIDTH)))).backward()
    yield


@pattern(
    "three forwards, then their backwards first in first out",
    "the schedule of a pipeline; a forward must not disturb the graph of another",
    gathers=17,
    reductions=9,
    cost="3 forwards of 3; 3 backwards of 2, the second and third also of the root's own, which the first freed",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    losses = [loss_of(model(run.data(number, 2, WIDTH))) for number in range(3)]
    while losses:
        losses.pop(0).backward()
        yield


@pattern(
    "three forwards, then their backwards last in first out",
    "as above, the other way round",
    gathers=17,
    reductions=9,
    cost="3 forwards of 3; 3 backwards of 2, two of them also of the root's own",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    losses = [loss_of(model(run.data(number, 2, WIDTH))) for number in range(3)]
    while losses:
        losses.pop().backward()
        yield


@pattern(
    "one forward one backward, two in flight",
    "1F1B of a pipeline stage: forwards and backwards alternate, out of step",
    gathers=2 * (4 * 3 + 2 * 2 + 2 * 3),
    reductions=2 * 4 * 3,
    cost="a step: 4 forwards of 3; 2 backwards right after a forward, which kept the root's own, and 2 that gather them",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        waiting: list[Tensor] = []
        for number in range(4):
            waiting.append(loss_of(model(run.data(10 * step + number, 2, WIDTH))))
            if len(waiting) > 2:
                waiting.pop(0).backward()
                yield
        for loss in waiting:
            loss.backward()
            yield
        optimizer.step()
        optimizer.zero_grad()


@pattern(
    "a pipeline of two stages",
    "each stage a root; its inputs and their gradients travel by hand",
    gathers=2 * (3 * 2 + 1 + 2 + 2),
    reductions=2 * 3 * 2,
    cost="2 stages of 2 units: 3 forwards; the first backward finds the root's own, the others do not",
)
def _(run: Run) -> Yields:
    first, second = run.shard(Net(1), {Block}), run.shard(nn.Sequential(nn.Linear(3, 3), Block(3)), {Block})
    sent, received, losses = [], [], []
    for number in range(3):
        sent.append(first(run.data(number, 2, WIDTH)))
        received.append(sent[-1].detach().requires_grad_())
        losses.append(loss_of(second(received[-1])))
    for number in range(3):
        losses[number].backward()
        yield
        sent[number].backward(received[number].grad)
        yield
        run.note("passed", received[number].grad)


class Repeats(nn.Module):
    """Calls its blocks in the order it is told."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


@pattern(
    "a unit called three times in a row",
    "gradients of the first call come after others said the unit is complete",
    gathers=12,
    reductions=4,
    cost="2 steps: 4 calls forward, each gathers; the backward gathers either unit once",
)
def _(run: Run) -> Yields:
    model = run.shard(Repeats("aaab"), {Block})
    yield from passes(run, model, 2)


@pattern(
    "two units called in turns, a b a b",
    "a recurrent or weight-shared stack",
    gathers=2 * (4 + 2),
    reductions=2 * 2,
    cost="2 steps: every call forward, either unit once backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Repeats("abab"), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(run.data(step, 2, WIDTH))).backward()
        yield
        optimizer.step()


class Headless(Net):
    """Its forward ends before the head, which is called by the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _block_or_head(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block) or name == "head"


@pattern(
    "a loss in chunks through the head, after the root",
    "the head is a unit that is called and trained on its own, chunk by chunk",
    gathers=2 * (3 + 3 * 2 + 3 + 1),
    reductions=2 * (3 * 1 + 3),
    cost="a step: 3 forward, the head 2 in each of 3 chunks, 3 backward; one in vain ahead of the last backward, which is not "
    "like the one before (ahead of the first chunk it is the root, which is kept). Each chunk reduces the head, the last "
    "backward the 3 other units",
)
def _(run: Run) -> Yields:
    model = run.shard(Headless(), _block_or_head)
    for step in range(2):
        hidden = model(run.data(step, 6, WIDTH))
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(3):
            loss_of(model.head(chunk)).backward()
            yield
        hidden.backward(leaf.grad)
        yield
        run.note("gradient of hidden", leaf.grad)


@pattern(
    "a loss in chunks that is summed, one backward",
    "the head is called three times outside the root, once left by autograd",
    gathers=2 * (3 + 3 + 3),
    reductions=2 * 4,
    cost="2 steps: 3 forward, the head for each of 3 chunks, 3 backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Headless(), _block_or_head)
    for step in range(2):
        hidden = model(run.data(step, 6, WIDTH))
        torch.stack([loss_of(model.head(chunk)) for chunk in hidden.chunk(3)]).sum().backward()
        yield


class Chunked(Net):
    """Computes its loss, and the gradients of it, in its own forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(3):
            loss_of(self.head(chunk)).backward()
        return hidden, leaf.grad


@pattern(
    "a loss in chunks inside the root's forward",
    "backwards of a unit while the forward of the root is running",
    gathers=2 * (3 + 3 * 2 + 2) + 3,
    reductions=2 * (3 * 1 + 3),
    cost="a step: 3 forward, the head 2 in each of 3 chunks, 2 backward; one in vain ahead of each of 3 backwards that is not "
    "like the one before. Each chunk reduces the head, the last backward the 3 other units",
)
def _(run: Run) -> Yields:
    model = run.shard(Chunked(), _block_or_head)
    for step in range(2):
        hidden, gradient = model(run.data(step, 6, WIDTH))
        yield
        hidden.backward(gradient)
        yield


class TrainsItself(nn.Module):
    """Manual optimisation: the whole training step is the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.optimizer: torch.optim.Optimizer

    def begin(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        return train(self.net, x)

    def end(self) -> None:
        self.optimizer.step()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.begin(x)
        self.end()
        return loss


@pattern(
    "a whole training step inside the root's forward",
    "manual optimisation: engines refuse a backward, or step on stale copies, while their root is in its forward",
    gathers=18,
    reductions=9,
    cost="3 steps: 3 forward, 3 backward; the root of all has no parameters, so nothing is kept",
)
def _(run: Run) -> Yields:
    model = run.shard(TrainsItself(), {Block, Net})
    model.optimizer = sgd(model)
    for step in range(3):
        if run.sharded:
            loss = model(run.data(step, 2, WIDTH))
            yield
        else:
            loss = model.begin(run.data(step, 2, WIDTH))
            yield
            model.end()
        run.note("loss", loss)


class TwoSteps(TrainsItself):
    """Two of them, on the halves of its batch."""

    def forward(self, x: Tensor) -> None:
        for half in x.chunk(2):
            self.begin(half)
            self.end()


@pattern(
    "two training steps inside one forward",
    "what was gathered ahead must not be from before the optimizer's step",
    gathers=3 * 2 * 6,
    reductions=3 * 2 * 3,
    cost="6 steps: 3 forward, 3 backward; what is gathered ahead of the second step is used by the backward of the first",
)
def _(run: Run) -> Yields:
    model = run.shard(TwoSteps(), {Block, Net})
    model.optimizer = sgd(model)
    for step in range(3):
        x = run.data(step, 4, WIDTH)
        if run.sharded:
            model(x)
        else:
            for half in x.chunk(2):
                model.begin(half)
                yield AVERAGE_ONLY
                model.end()
        yield


@pattern(
    "a forward whose loss is dropped",
    "the next step must not find it half-way",
    gathers=8,
    reductions=3,
    cost="2 forwards of 3, one backward of 2",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    run.note("dropped", loss_of(model(run.data(0, 2, WIDTH))))
    train(model, run.data(1, 2, WIDTH))
    yield


@pattern(
    "a forward whose backward never comes, then an evaluation",
    "what a forward keeps for its backward must not stay for ever: it goes with the next forward",
    gathers=11,
    reductions=3,
    cost="3 + 2, then 3 + 3",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    train(model, run.data(1, 2, WIDTH))
    yield
    run.note("dropped", loss_of(model(run.data(0, 2, WIDTH))))
    with torch.no_grad():
        run.note("evaluated", model(run.data(2, 2, WIDTH)))


class Momentum(nn.Module):
    """Its key follows its query in the forward, before the key runs (momentum contrast)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Block(), Block()
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            key = self.key(x)
        return query * key


@pattern(
    "a momentum update of another unit inside the root's forward",
    "what was gathered ahead is from before the update",
    gathers=(2 + 1) + 2 * (2 + 1 + 1),
    reductions=3 * 1,
    cost="3 steps: 2 forward, 1 backward; from the second step on one in vain, ahead of the update",
)
def _(run: Run) -> Yields:
    model = run.shard(Momentum(), {Block})
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        output = model(run.data(step, 2, WIDTH))
        loss_of(output).backward()
        yield
        run.note("output", output)
        optimizer.step()


class CallsEditsCalls(nn.Module):
    """Its block is edited between two calls of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.block(x).detach()
        with torch.no_grad():
            for parameter in self.block.parameters():
                parameter.mul_(0.5)
        return before, self.block(x)


@pattern(
    "a unit that is called, edited and called again in one forward",
    "a copy that was kept for the backward is from before the edit",
    gathers=2 * (2 + 1),
    reductions=2 * 1,
    cost="2 steps: 2 calls, 1 backward",
)
def _(run: Run) -> Yields:
    model = run.shard(CallsEditsCalls(), {Block})
    for step in range(2):
        before, after = model(run.data(step, 2, WIDTH))
        loss_of(after).backward()
        yield
        run.note("before", before)
        run.note("after", after)


class EditsAndReads(nn.Module):
    """Changes a parameter of its own, runs a backward through its block, and reads the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        loss_of(self.block(x)).backward()
        return self.block(x) * self.scale


@pattern(
    "a forward that changes a parameter of its own, runs a backward and reads it",
    "that backward frees the copy which has the change",
    gathers=2 * (2 + 2 * 2),
    reductions=2 * (1 + 2),
    cost="2 steps: root when it begins and when it reads, block forward and backward, twice; the second backward reaches root",
)
def _(run: Run) -> Yields:
    model = run.shard(EditsAndReads(), {Block})
    for step in range(2):
        output = model(run.data(step, 2, WIDTH))
        loss_of(output).backward()
        yield
        run.note("output", output)


class StepsAndReads(nn.Module):
    """After an optimizer's step in its forward, computes with a parameter of its own that some ranks hold nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.optimizer: torch.optim.Optimizer

    def begin(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.block(x) * self.scale).backward()

    def end(self, x: Tensor) -> Tensor:
        self.optimizer.step()
        with torch.no_grad():
            return self.block(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        self.begin(x)
        return self.end(x)


@pattern(
    "reads of own parameters after an optimizer's step inside the forward",
    "a rank that holds nothing of the parameter does not see it change, and must gather it all the same",
    gathers=2 * (2 + 1 + 2),
    reductions=2 * 2,
    cost="2 steps: 2 forward, 1 backward; then the block, and the root's own parameter for its read",
)
def _(run: Run) -> Yields:
    model = run.shard(StepsAndReads(), {Block})
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = run.data(step, 2, WIDTH)
        if run.sharded:
            after = model(x)
            yield
        else:
            model.begin(x)
            yield
            after = model.end(x)
        run.note("after", after)
