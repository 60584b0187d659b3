"""Parameters that are frozen, shared, or of odd kinds."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd, sgd_steps, steps, train


class Adapter(nn.Module):
    """A frozen layer and a trainable correction of low rank."""

    def __init__(self, width: int = WIDTH, base: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=base).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x)))


def _frozen(net: nn.Module, *names: str) -> nn.Module:
    for name in names:
        net.get_submodule(name).requires_grad_(False)
    return net


@pattern(
    "a frozen unit between trainable ones",
    "a gradient passes through it, and none arrives",
    reductions=2 * 3,
    cost="3 of 4 units",
    gathers=2 * (4 + 3),
)
def _(run: Run) -> Yields:
    model = run.shard(_frozen(Net(3), "blocks.1"), {Block})
    yield from sgd_steps(run, model, 2)


@pattern(
    "a frozen backbone and a trainable head",
    "units in front of the first trainable one have no backward",
    gathers=2 * (2 + 2),
    reductions=2 * 1,
    cost="2 steps: 2 buffers of the root's own and 2 blocks forward; none backward, where only the root's own are needed",
)
def _(run: Run) -> Yields:
    model = run.shard(_frozen(Net(), "enter", "blocks"), {Block})
    yield from passes(run, model, 2)


@pattern(
    "everything frozen but the first layer",
    "a gradient passes through every unit to the last of the backward",
    gathers=2 * (2 + 2 + 2),
    reductions=2 * 1,
    cost="2 steps: 2 buffers of the root's own, 2 blocks, twice",
)
def _(run: Run) -> Yields:
    model = run.shard(_frozen(Net(), "blocks", "head"), {Block})
    yield from passes(run, model, 2)


@pattern(
    "frozen and trainable parameters in one unit",
    "flat engines want all of a unit alike",
    gathers=2 * (3 * 2 + 2 + 1),
    reductions=2 * 3,
    cost="2 steps: forward 2 buffers of each adapter, 1 of the root's; backward the adapters again",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Adapter), {Adapter})
    yield from sgd_steps(run, model, 2)


@pattern(
    "only adapters are trained",
    "the rest of the model is frozen around them, and its inputs need no gradient",
    gathers=2 * (1 + 2 * 2 + 2 * 2),
    reductions=2 * 2,
    cost="2 steps: the root's own once, 2 units of 2 buffers twice",
)
def _(run: Run) -> Yields:
    model = run.shard(_frozen(Net(block=Adapter), "enter", "head"), {Adapter})
    yield from passes(run, model, 2)


def _toggles(first: bool) -> None:
    @pattern(
        f"a unit that is {'frozen' if first else 'thawed'} midway",
        "what is trainable is not settled at wrapping",
        gathers=4 * 5,
        reductions=2 * 3 + 2 * 2,
        cost="4 ordinary steps, in two of which a unit is frozen",
    )
    def _(run: Run) -> Yields:
        net = Net()
        net.blocks[0].requires_grad_(first)
        model = run.shard(net, {Block})
        for step, trainable in enumerate((first, not first, not first, first)):
            model.blocks[0].requires_grad_(trainable)
            model.zero_grad()
            train(model, run.data(step, 2, WIDTH))
            yield

    # one that is frozen at wrapping has a buffer of its own
    buffers = 1 if first else 2

    @pattern(
        f"one parameter that is {'frozen' if first else 'thawed'} midway",
        "as above, inside a unit, between accumulating steps",
        gathers=3 * (1 + 2 * (buffers + 1)),
        reductions=3 + (2 + buffers),
        cost="3 steps: the root's own once, the blocks twice, one of 2 buffers if the parameter was frozen at wrapping; 2 steps "
        "reduce what is trainable or was kept",
    )
    def _(run: Run) -> Yields:
        net = Net()
        net.blocks[0].linear.weight.requires_grad_(first)
        model = run.shard(net, {Block})
        for step, trainable in enumerate((first, not first, first)):
            model.blocks[0].linear.weight.requires_grad_(trainable)
            with run.no_sync(model) if step == 1 else nullcontext():
                train(model, run.data(step, 2, WIDTH))
            if step != 1:
                yield


for _first in (True, False):
    _toggles(_first)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()
        self.other.linear.weight = self.one.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


def _tied(where: str, policy: set[type], units: int, kept: int) -> None:
    @pattern(
        f"a weight tied {where}",
        "a parameter must be owned once, and its gradient is the sum of both uses",
        gathers=2 * (2 * units - kept),
        reductions=2 * units,
        cost="2 steps: every unit twice, but for the root's own",
    )
    def _(run: Run) -> Yields:
        model = run.shard(nn.Sequential(Tied(), Block()), policy)
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            train(model, run.data(step, 2, WIDTH))
            yield
            optimizer.step()


_tied("inside a unit", {Tied}, units=2, kept=1)
_tied("across two units of one unit", {Tied, Block}, units=4, kept=0)
_tied("across two units of the root", {Block}, units=4, kept=1)


class Language(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(7, WIDTH), Block(), nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


def _language(where: str, policy: set[type], units: int) -> None:
    @pattern(
        f"an embedding tied to the head, {where}",
        "as above; the first use is the first of the forward, the last its last",
        gathers=2 * (2 * units - 1),
        reductions=2 * units,
        cost="2 steps: every unit with parameters twice, but for the root's own, which is the tied one",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Language(), policy)
        for step in range(2):
            loss_of(model(run.tokens(step, 2, 3, vocabulary=7))).backward()
            yield


_language("both of the root", {Block}, units=2)
_language("one a unit, one of the root", {Block, nn.Embedding}, units=2)
_language("each a unit", {Block, nn.Embedding, nn.Linear}, units=3)


class TwoNames(Net):
    """One of its blocks is there under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(super().forward(x)[:, :1] + x)


@pattern(
    "a module under two names",
    "it is one unit, called twice",
    gathers=2 * (4 + 2),
    reductions=2 * 3,
    cost="2 steps: 4 calls forward, either block once backward",
)
def _(run: Run) -> Yields:
    model = run.shard(TwoNames(), {Block})
    yield from passes(run, model, 2)


@pattern("units wrapped by hand, inner ones first", "the inner roots become units of the outer one", **steps(2))
def _(run: Run) -> Yields:
    net = Net()
    for block in net.blocks:
        run.shard(block)
    model = run.shard(net)
    yield from passes(run, model, 2)


class Around(nn.Module):
    """A layer around a module that others use as well."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(self.shared(x)))


class Shares(nn.Module):
    """Uses a module inside others and on its own, as TabNet does. `first`: the others come after it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        shared = Block()
        if first:
            self.shared = shared
        self.inner = Around(shared)
        self.outer = Around(self.inner)
        self.shared, self.head = shared, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(self.inner(x)) + self.shared(x))


def _shared(where: str, first: bool, *wrapped: str) -> None:
    @pattern(
        f"a shared module wrapped by hand, found first {where}",
        "it stands at several depths, and is owned once, by itself",
        gathers=2 * (1 + 3 + 2 + len(wrapped) - 2 + len(wrapped)),
        reductions=2 * (len(wrapped) + 1),
        cost="2 steps: forward the root's own, the shared one 3 times, the inner one twice, the outer one if it is a unit; "
        "backward each once, but not the root's own",
    )
    def _(run: Run) -> Yields:
        net = Shares(first)
        for name in wrapped:
            run.shard(net.get_submodule(name))
        model = run.shard(net)
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            train(model, run.data(step, 2, WIDTH))
            yield
            optimizer.step()


_shared("in the root", True, "shared", "inner", "outer")
_shared("in a unit", False, "shared", "inner", "outer")
_shared("in a unit that is not wrapped", False, "shared", "inner")


class Reads(nn.Module):
    """Reads its child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(nn.functional.linear(x, self.child.weight, self.child.bias))


@pattern(
    "a parent that reads the weight of a child that is a unit",
    "the child's forward never runs, so nobody gathers",
    gathers=2 * (2 + 2 + 2),
    reductions=2 * 3,
    cost="2 steps: the child once for its weight and once for its bias; a block and its layer forward and backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Reads(), {nn.Linear, Block})
    yield from passes(run, model, 2)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.block = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.attention(x, x, x, need_weights=False)[0])


@pattern(
    "MultiheadAttention whose out_proj is a unit",
    "as above, in torch's own: out_proj is never called",
    gathers=2 * (1 + 2 + 1 + 1),
    reductions=2 * 3,
    cost="2 steps: the root's own, out_proj once for its weight and once for its bias, the block's layer forward and backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Attends(), {nn.Linear})
    for step in range(2):
        train(model, run.data(step, 2, 3, WIDTH))
        yield


@pattern(
    "MultiheadAttention that is a unit",
    "out_proj belongs to it",
    gathers=2 * 3,
    reductions=2 * 2,
    cost="2 steps: the root's own once, the unit twice",
)
def _(run: Run) -> Yields:
    model = run.shard(Attends(), {nn.MultiheadAttention})
    for step in range(2):
        train(model, run.data(step, 2, 3, WIDTH))
        yield


class Normed(Block):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        nn.utils.parametrizations.weight_norm(self.linear)


class Spectral(Block):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        nn.utils.spectral_norm(self.linear)


@pattern("weight norm", "the weight is computed from other parameters whenever it is read", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Normed), {Normed})
    yield from passes(run, model, 2)


@pattern("spectral norm in the old way", "a pre-hook sets the weight as an attribute and updates a buffer", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Spectral), {Spectral})
    yield from sgd_steps(run, model, 2)
    run.note("u", model.blocks[0].linear.weight_u)
