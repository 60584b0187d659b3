"""What a checkpointed region does beside computing: it edits weights, reads those of others, has hooks; its replay does again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, loss_of, sgd


class Edits(nn.Module):
    """Edits its weight in its forward, or in a part of it that it checkpoints."""

    def __init__(self, edit: Callable[[Tensor], Tensor], inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.weight, self.edit = nn.Parameter(torch.linspace(-1, 1, WIDTH)), edit
        self.inside, self.reentrant = inside, reentrant

    def _edited(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.edit(self.weight)
        return torch.tanh(x * self.weight) + x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._edited, x, use_reentrant=self.reentrant) if self.inside else self._edited(x)


class Region(nn.Module):
    """One layer before a checkpoint around the others."""

    def __init__(self, parts: Sequence[nn.Module], checkpointed: bool, reentrant: bool) -> None:
        super().__init__()
        self.enter, self.parts = nn.Linear(WIDTH, WIDTH), nn.Sequential(*parts)
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = checkpoint(self.parts, x, use_reentrant=self.reentrant) if self.checkpointed else self.parts(x)
        return 2 * x  # what the checkpoint returns is not what the root does


def _edited_in(where: str, checkpointed: bool, inside: bool, reentrant: bool) -> None:
    kind = "reentrant" if reentrant else "non-reentrant"

    @pattern(
        f"weights shrunk in place in {where}, {kind}",
        "the edit is made again by the replay, of which only a part may be a forward of the unit",
        gathers=2 * 5,
        reductions=2 * 3,
        cost="2 steps: 2 units twice, the root's own once",
    )
    def _(run: Run) -> Yields:
        edits = Edits(lambda weight: weight.mul_(0.9), inside, reentrant)
        model = run.shard(Region([Block(), edits, nn.Tanh()], checkpointed, reentrant), {Block, Edits})
        optimizer = sgd(model)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model(run.data(number, 2, WIDTH))).backward()
            yield
            optimizer.step()


for _reentrant in (False, True):
    _edited_in("a unit that a checkpoint replays", True, False, _reentrant)
    _edited_in("a checkpoint inside a unit", False, True, _reentrant)
    _edited_in("a checkpoint inside one around the unit", True, True, _reentrant)


@pattern(
    "weights clamped in a replayed unit, two backwards of one graph",
    "each backward replays the edit, and both are for the same forward",
    gathers=3 + 2 + 3,
    reductions=2 * 3,
    cost="3 forward; 2 for the first backward, until the end of which the root's own stay; 3 for the second",
)
def _(run: Run) -> Yields:
    edits = Edits(lambda weight: weight.clamp_(-0.4, 0.4), False, False)
    model = run.shard(Region([Block(), edits, nn.Tanh()], True, False), {Block, Edits})
    loss = loss_of(model(run.data(0, 2, WIDTH)))
    loss.backward(retain_graph=True)
    yield
    loss.backward()
    yield


def _penalised(run: Run, model: nn.Module) -> Yields:
    """A step with a penalty on the gradient of the input."""
    x = run.data(0, 2, WIDTH).requires_grad_()
    loss = loss_of(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    run.note("the gradient of the input", x.grad)
    yield


class ReadsTwice(nn.Module):
    """Two checkpointed regions, each of which computes with the weight of a unit and then calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.head = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def _region(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(linear(x, self.child.weight))
        return x + torch.tanh(self.child(x))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(x + checkpoint(self._region, x, use_reentrant=False))
        return x * self.head


@pattern(
    "a gradient penalty through replays that read another unit's weight",
    "the graph of the gradients reads that weight when its unit has been released",
)
def _(run: Run) -> Yields:
    yield from _penalised(run, run.shard(ReadsTwice(), {nn.Linear}))


@pattern(
    "a hook that carries off what a reentrant checkpoint returns",
    "it requires no gradient when the hook runs, and does afterwards",
)
def _(run: Run) -> Yields:
    features: list[Tensor] = []
    model = run.shard(Region([nn.Linear(WIDTH, WIDTH)], True, True))
    for _ in range(2):
        # the first forward has no hook yet
        features.clear()
        loss = loss_of(model(run.data(len(features), 2, WIDTH).requires_grad_()))
        if features:
            features[0].square().mean().backward(retain_graph=True)
        loss.backward()
        yield
        model.parts[0].register_forward_hook(lambda module, args, output: features.append(output))


class SomeRanksUse(nn.Module):
    """Of its two parameters only rank 0 uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.linspace(-1, 1, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x * self.weight + (self.other if rank == 0 else 0)


class TwiceWithoutInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.head = SomeRanksUse(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.head(self.leaf(self.leaf(x, rank), rank))


@pattern(
    "a unit called twice on an input without gradient, used differently by the ranks",
    "nobody sees the first call being left, so ranks would find the unit complete at different times",
)
def _(run: Run) -> Yields:
    model = run.shard(TwiceWithoutInput(), {SomeRanksUse}, prefetch=0)
    for number in range(2):
        loss_of(model(run.data(number, 2, WIDTH), run.rank)).backward()
        yield


class PartReplayed(nn.Module):
    """A replayed region computes with weights of the root, then comes to a unit in a checkpoint of the other kind."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.unit, self.head = SomeRanksUse(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return checkpoint(self.unit, torch.tanh(self.part(y, rank)), use_reentrant=True).exp()

        return self.head(checkpoint(region, x, use_reentrant=False))


@pattern(
    "a backward that begins inside a replayed part of the root, whose weights some ranks use",
    "the part is replayed before anything says that the backward has come to the root",
    gathers=2 + 1 + 2,
    reductions=2 * 2,
    cost="2 forward; the root stays whole for the first backward, which reads its weights, and is gathered for the second; the "
    "unit is gathered for each",
)
def _(run: Run) -> Yields:
    features: list[Tensor] = []
    model = run.shard(PartReplayed(), lambda name, module: name == "unit")
    model.unit.register_forward_hook(lambda module, args, output: features.append(output))
    loss = loss_of(model(run.data(0, 2, WIDTH).requires_grad_(), run.rank))
    features[0].square().mean().backward(retain_graph=True)
    yield
    loss.backward()
    yield


class HasUnitInside(nn.Module):
    """Replays a part of itself; the unit inside it is for other days."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.spare = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y * self.scale) * self.scale, x + 1, use_reentrant=False)


class AroundIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = HasUnitInside(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        # nothing keeps the input of the unit alive
        return self.head(self.inside(2 * x) + x)


@pattern(
    "a gradient penalty through a replayed part of a unit with units inside",
    "nobody but the backward sees the gradient leave such a unit, and what made it reads its weights again",
)
def _(run: Run) -> Yields:
    yield from _penalised(run, run.shard(AroundIt(), {HasUnitInside, nn.Linear}))
