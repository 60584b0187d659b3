"""What goes into a unit, what comes out, and what is done to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd, sgd_steps, steps, steps_of_two, train


class Pair(NamedTuple):
    value: Tensor
    other: Tensor


@dataclass
class Data:
    value: Tensor
    other: Tensor


class Plain:
    def __init__(self, value: Tensor, other: Tensor) -> None:
        self.value, self.other = value, other


class Slotted:
    __slots__ = ("other", "value")

    def __init__(self, value: Tensor, other: Tensor) -> None:
        self.value, self.other = value, other


class Cache:
    """Grows from call to call, like the keys and values of a generation."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


Pack = Callable[[Tensor, Tensor], Any]
CONTAINERS: dict[str, tuple[Pack, Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "a dict": (lambda a, b: {"value": a, "other": b}, lambda packed: (packed["value"], packed["other"])),
    "a named tuple": (Pair, lambda packed: (packed.value, packed.other)),
    "a dataclass": (Data, lambda packed: (packed.value, packed.other)),
    "a plain object": (Plain, lambda packed: (packed.value, packed.other)),
    "an object with slots": (Slotted, lambda packed: (packed.value, packed.other)),
    "containers in containers": (
        lambda a, b: [{"it": (Data(a, a), None)}, Plain([b], 3)],
        lambda packed: (packed[0]["it"][0].value, packed[1].value[0]),
    ),
}


class Packs(Block):
    """Takes and returns what is packed."""

    def __init__(self, pack: Pack, unpack: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.pack, self.unpack = pack, unpack

    def forward(self, packed: Any) -> Any:
        value, other = self.unpack(packed)
        return self.pack(super().forward(value), self.linear(other))


def _returns(kind: str) -> None:
    @pattern(f"units that return {kind}", "engines look for tensors in tuples and lists only", gathers=4, reductions=2)
    def _(run: Run) -> Yields:
        pack, unpack = CONTAINERS[kind]
        model = run.shard(nn.Sequential(Packs(pack, unpack), Packs(pack, unpack)), {Packs})
        x = run.data(0, 2, WIDTH).requires_grad_()
        value, other = unpack(model(pack(x, x * 2)))
        (loss_of(value) + loss_of(other)).backward()
        yield
        run.note("gradient of x", x.grad)


for _kind in CONTAINERS:
    _returns(_kind)


class Caches(Block):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.kept.append(self.linear(x))
        return super().forward(x) + torch.stack(cache.kept).sum(0)


class WithCache(Net):
    def __init__(self) -> None:
        super().__init__(block=Caches)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


@pattern(
    "a cache object that units fill",
    "a backward enters a unit through an object it was given, not through what it returned",
    gathers=3 + 3 + 2,
    reductions=3,
    cost="2 forwards, one backward",
)
def _(run: Run) -> Yields:
    model = run.shard(WithCache(), {Caches})
    cache = Cache()
    output = model(run.data(0, 2, WIDTH), cache)
    output = model(run.data(1, 2, WIDTH), cache) + output
    loss_of(output).backward()
    yield


@pattern(
    "a cache object whose contents are in the loss",
    "as above, and only so",
    gathers=3 + 1,
    reductions=1,
    cost="forward, and backward of the first block",
)
def _(run: Run) -> Yields:
    model = run.shard(WithCache(), {Caches})
    cache = Cache()
    model(run.data(0, 2, WIDTH), cache)
    loss_of(cache.kept[0]).backward()
    yield


class Edits(Block):
    """Returns nothing: what it computes is in the list that it was given."""

    def forward(self, values: list[Tensor]) -> None:
        values[0] = super().forward(values[0])


class OfEdits(Net):
    def __init__(self) -> None:
        super().__init__(block=Edits)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.enter(x)]
        for block in self.blocks:
            block(values)
        return self.head(values[0])


@pattern(
    "a list that units edit, returning nothing",
    "the only way into a unit is through what it was given, and its weights are released before the backward",
    **steps(2),
)
def _(run: Run) -> Yields:
    yield from sgd_steps(run, run.shard(OfEdits(), {Edits}), 2)


class Adds(Block):
    """Adds a balancing loss in place to a tensor that it was given."""

    def forward(self, x: Tensor, balance: Tensor) -> Tensor:
        balance.add_(self.linear(x).square().mean())
        return super().forward(x)


@pattern(
    "a tensor to which units add a loss in place, and nothing else in the loss",
    "as above: the tensor has the node of the last unit that changed it",
    gathers=3 + 2,
    reductions=3,
    cost="one forward; the backward comes through the root's own unit and both blocks",
)
def _(run: Run) -> Yields:
    class OfAdds(Net):
        def forward(self, x: Tensor, balance: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x, balance)
            return self.head(x)

    model, balance = run.shard(OfAdds(block=Adds), {Adds}), torch.zeros(())
    model(run.data(0, 2, WIDTH), balance)
    balance.backward()
    yield


class View(Block):
    """Returns a view of what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


@pattern(
    "a returned view that is edited in place",
    "the edit gives the view a new node, and a hook on the old one never fires",
    **steps_of_two(2),
)
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), View()), {Block})
    for step in range(2):
        output = model(run.data(step, 2, WIDTH))
        output += 1
        output[:3] *= 2
        loss_of(output).backward()
        yield


class EditsBetween(Net):
    """Edits in place what its blocks return."""

    def __init__(self) -> None:
        super().__init__(3, block=lambda width: nn.Sequential(Block(width), nn.Linear(width, width)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5).add_(1)
            x[:, 0].zero_()
        return self.head(x)


@pattern(
    "outputs that are edited in place between units",
    "as above, and the next unit's input is the edited one",
    gathers=2 * (4 + 3),
    reductions=2 * 4,
    cost="2 steps: 4 forward, 3 backward",
)
def _(run: Run) -> Yields:
    model = run.shard(EditsBetween(), {nn.Sequential})
    yield from passes(run, model, 2)


class Splits(Block):
    """Returns several views of one tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).unbind(0)


@pattern("several views of one tensor, some of them in the loss", "one node stands behind all of them", **steps_of_two(2))
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), Splits()), {Block})
    for step in range(2):
        first, _, third = model(run.data(step, 3, WIDTH))
        (loss_of(first) + loss_of(third * 2)).backward()
        yield


class Identity(nn.Module):
    """Has parameters, and returns its input as it is."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pattern(
    "a unit that returns its input unchanged",
    "the node behind its output belongs to the unit before it",
    gathers=2 * (4 + 2),
    reductions=2 * 2,
    cost="2 steps: 4 forward; nothing of an identity is in the backward",
)
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), Identity(), Block(), Identity()), {Block, Identity})
    for step in range(2):
        x = run.data(step, 2, WIDTH).requires_grad_()
        train(model, x)
        yield
        run.note("gradient of x", x.grad)


class Passes(Block):
    """Returns its input beside what it computed."""

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(both[0]), both[1]


@pattern(
    "a unit that returns its input beside its output",
    "a memory that every layer hands on, and only the loss uses",
    gathers=2 * (1 + 3 + 3),
    reductions=2 * (1 + 3),
    cost="a root of one unit, kept; 3 units, twice",
)
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Passes(), Passes(), Passes()), {Passes})
    enter = run.shard(Block())
    for step in range(2):
        memory = enter(run.data(step, 2, WIDTH))
        value, same = model((memory, memory))
        (loss_of(value) + loss_of(same)).backward()
        yield


@pattern("an input that requires gradients", "adversarial examples, prompts; the first unit is left through a leaf", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        x = run.data(step, 2, WIDTH).requires_grad_()
        train(model, x)
        yield
        run.note("gradient of x", x.grad)


@pattern(
    "an input that requires gradients, and a frozen model",
    "prompt tuning: no gradient of any parameter ever comes",
    reductions=0,
    gathers=2 * 5,
    cost="2 ordinary steps, and nothing to reduce",
)
def _(run: Run) -> Yields:
    model = run.shard(Net().requires_grad_(False), {Block})
    prompt = run.data(0, 2, WIDTH).requires_grad_()
    for _ in range(2):
        train(model, prompt * 1.5)
        run.note("gradient of the prompt", prompt.grad)
    yield


class Queries(nn.Module):
    """A parameter of the root is the input of a unit, as the queries of DETR are."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.block = nn.Parameter(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.queries) + x


@pattern(
    "a parameter that is the input of a unit",
    "a unit is left through a leaf that outlives every graph",
    gathers=3 * (2 + 1),
    reductions=3 * 2,
    cost="3 steps: 2 forward, 1 backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Queries(), {Block})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        train(model, run.data(step, 3, WIDTH))
        yield
        optimizer.step()


class Weighs(nn.Module):
    """Several inputs, by position and by name, tensors and not, one of them integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(7, WIDTH), Block()

    def forward(self, x: Tensor, tokens: Tensor, *, gain: Tensor, mask: list[bool], nothing: None = None) -> Tensor:
        return self.block(x * gain + self.embedding(tokens)) * torch.tensor(mask).view(-1, 1)


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weighs(), Weighs()

    def forward(self, x: Tensor, tokens: Tensor, gain: Tensor) -> Tensor:
        y = self.first(x, tokens, gain=gain, mask=[True, False, True])
        return self.second(y, tokens=tokens, gain=gain * 2, mask=[True, True, False])


@pattern(
    "inputs by position and by name, some of them with gradients",
    "a unit is left through each of them, in any order",
    **steps_of_two(2),
)
def _(run: Run) -> Yields:
    model = run.shard(Weighing(), {Weighs})
    for step in range(2):
        x, gain = run.data(step, 3, WIDTH).requires_grad_(), run.data(step + 10, WIDTH).requires_grad_()
        loss_of(model(x, run.tokens(step, 3, vocabulary=7), gain)).backward()
        yield
        run.note("gradient of x", x.grad)
        run.note("gradient of gain", gain.grad)


@pattern("a sparse output: one element is in the loss", "most of the gradient is zero, none of it is missing", **steps(1))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    model(run.data(0, 2, WIDTH))[0, run.rank % 3].backward()
    yield


class Returns(nn.Module):
    """Returns no tensor at all, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> str:
        self.loss = loss_of(self.net(x))
        return "done"


@pattern("a forward that returns no tensor", "the loss is an attribute of the root", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Returns(), {Block})
    for step in range(2):
        assert model(run.data(step, 2, WIDTH)) == "done"
        model.loss.backward()
        yield


class ReturnsWeight(nn.Module):
    """Returns its own weight, as embeddings that are tied by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        y = self.linear(x)
        return (y, self.linear.weight) if weight else y


@pattern(
    "a unit that returns its weight",
    "its memory is freed after the forward",
    refused="returns one of its own parameters",
    gathers=2,
    reductions=1,
    cost="one unit, which is the root: the refused forward, and one step",
)
def _(run: Run) -> Yields:
    model = run.shard(ReturnsWeight())
    run.refused(lambda: model(run.data(0, 2, WIDTH), weight=True))
    train(model, run.data(1, 2, WIDTH))
    yield
