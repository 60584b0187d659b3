"""Activation checkpointing of every make, around, inside and across units.

A replay gathers for the backward behind it as well, so a checkpoint costs no gather: a Net takes 3 forward and 2 backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fairscale.nn.checkpoint import checkpoint_wrapper as fairscale_wrapper
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as torch_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.kinds import Lora
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd, train
from tests.patterns.order import Repeats

BackwardPath = Callable[[nn.Sequential, Tensor, bool], Tensor]


class Ways(nn.Module):
    """Blocks between two layers of the root's own, checkpointed in a way that is given."""

    def __init__(self, way: BackwardPath, reentrant: bool, block: Callable[[int], nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(*(block(WIDTH) for _ in range(blocks)))
        self.way = partial(way, reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self.blocks, torch.tanh(self.enter(x))))


def each(blocks: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def across(blocks: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda y: blocks(y), x, use_reentrant=reentrant)


def segments(blocks: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint_sequential(blocks, 2, x, use_reentrant=reentrant)


def nested(blocks: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(each, blocks, x, reentrant, use_reentrant=reentrant)


def second(blocks: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(blocks[1], blocks[0](x), use_reentrant=reentrant)


def mixed(blocks: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(blocks[1], checkpoint(blocks[0], x, use_reentrant=not reentrant), use_reentrant=reentrant)


class Inside(Block):
    """Checkpoints a part of itself."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__(width)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: torch.tanh(self.linear(y)), self.norm(x), use_reentrant=self.reentrant)


class Drops(Block):
    """Random in its forward, so that a replay must see the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(super().forward(x), 0.3)


def _checkpoints(kind: str, reentrant: bool) -> None:
    step: dict[str, Any] = {"gathers": 2 * 5, "reductions": 2 * 3, "cost": "2 steps: 3 forward, 2 for replay and backward"}

    def around(where: str, way: BackwardPath, reason: str, units: int = 2, **more: Any) -> None:
        cost = {
            "gathers": 2 * (1 + 2 * units),
            "reductions": 2 * (1 + units),
            "cost": f"2 steps: {units} units twice, the root's own once",
        }

        @pattern(f"a {kind} checkpoint {where}", reason, **cost)
        def _(run: Run) -> Yields:
            model = run.shard(Ways(way, reentrant, blocks=units, **more), {Block})
            optimizer = sgd(model)
            for number in range(2):
                optimizer.zero_grad()
                train(model, run.data(number, 2, WIDTH))
                yield
                optimizer.step()

    around("around each unit", each, "the replay is a forward inside the backward")
    around("across units", across, "several units are replayed before the first of them has its backward")
    around("over segments of units", segments, "as above, and the last segment is not checkpointed", units=4)
    around("nested", nested, "a replay that is replayed")
    around("around the second of two units", second, "a unit that is replayed after one that is not")
    around("beside one of the other kind", mixed, "a backward inside the backward, beside one that is not")
    around("around units with dropout", each, "a replay must see the same random numbers", block=Drops)

    @pattern(f"a {kind} checkpoint inside units", "gradients of a part come in a backward of its own", **step)
    def _(run: Run) -> Yields:
        model = run.shard(Ways(lambda blocks, x, reentrant: blocks(x), reentrant, partial(Inside, reentrant=reentrant)), {Inside})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH))
            yield

    @pattern(f"a {kind} checkpoint around and inside units", "as above, and the unit is replayed too", **step)
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant, partial(Inside, reentrant=reentrant)), {Inside})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH))
            yield

    @pattern(
        f"a {kind} checkpoint around units in units",
        "the outer one waits for the inner ones, which are complete in another order",
        gathers=2 * (1 + 2 * 4),
        reductions=2 * 5,
        cost="2 steps: 2 blocks and their 2 layers twice, the root's own once",
    )
    def _(run: Run) -> Yields:
        net = Ways(each, reentrant)
        model = run.shard(net, lambda name, module: isinstance(module, Block) or name.endswith(".linear"))
        for number in range(2):
            train(model, run.data(number, 2, WIDTH))
            yield

    root = {
        "gathers": 3 + (3 if reentrant else 2),
        "reductions": 3,
        "cost": "the root's own are kept where the forward has a graph",
    }

    @pattern(f"a {kind} checkpoint around the root", "the root itself is replayed", **root)
    def _(run: Run) -> Yields:
        model = run.shard(Net(), {Block})
        x = run.data(0, 2, WIDTH).requires_grad_()
        loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()
        yield
        run.note("gradient of x", x.grad)

    @pattern(
        f"a unit called twice inside one {kind} checkpoint",
        "gradients of its calls come one by one",
        gathers=2 * (2 + 1),
        reductions=2 * 1,
        cost="2 steps: 2 calls forward; replays and backward once. The unit that is never called is left alone",
    )
    def _(run: Run) -> Yields:
        model = run.shard(_Around(Repeats("aa"), reentrant), {Block})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH).requires_grad_())
            yield

    @pattern(
        f"a unit called twice, in two {kind} checkpoints",
        "as above; reentrant ones each have a backward of their own",
        gathers=2 * (2 + (2 if reentrant else 1)),
        reductions=2 * (2 if reentrant else 1),
        cost="2 steps: 2 calls forward; each reentrant replay gathers, and its gradients are complete before the next one's",
    )
    def _(run: Run) -> Yields:
        model = run.shard(_Twice(reentrant), {Block})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH).requires_grad_())
            yield

    @pattern(
        f"two forwards with {kind} checkpoints, one backward",
        "preference training; the second replay sees what the first one freed",
        gathers=3 + 3 + (4 if reentrant else 2),
        reductions=3 + (2 if reentrant else 0),
        cost="2 forwards of 3; reentrant replays each gather, the others once a unit",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant), {Block})
        (loss_of(model(run.data(0, 2, WIDTH))) - 0.5 * loss_of(model(run.data(1, 2, WIDTH)))).backward()
        yield

    @pattern(
        f"two forwards with {kind} checkpoints, two backwards",
        "as above, one after the other",
        gathers=3 + 3 + 2 + 3,
        reductions=2 * 3,
        cost="2 forwards; the first backward finds the root's own",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant), {Block})
        losses = [loss_of(model(run.data(number, 2, WIDTH))) for number in range(2)]
        for loss in losses:
            loss.backward()
            yield

    @pattern(
        f"{kind} checkpoints around frozen bases with adapters",
        "most of what is replayed is frozen, and is needed again",
        gathers=2 * (2 * (2 + 2) + 1),
        reductions=2 * 3,
        cost="2 steps: 2 units of a bf16 and an fp32 buffer, twice; the root's own once",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant, Lora), {Lora})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH))
            yield

    @pattern(f"{kind} checkpoints under no_sync", "kept gradients of replays add up", gathers=3 * 5, reductions=3)
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant), {Block})
        with run.no_sync(model):
            train(model, run.data(0, 2, WIDTH))
            train(model, run.data(1, 2, WIDTH))
        train(model, run.data(2, 2, WIDTH))
        yield

    @pattern(f"{kind} checkpoints, the same backward twice", "what was replayed is replayed again", gathers=8, reductions=6)
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant), {Block})
        output = model(run.data(0, 2, WIDTH))
        loss_of(output).backward(retain_graph=True)
        yield
        output.sum().backward()
        yield

    def borrows(trainable: bool) -> None:
        @pattern(
            f"a {kind} checkpoint around a method that reads {'a' if trainable else 'a frozen'} weight of another unit",
            "no forward is on the stack when it is replayed, and the read gives a shard",
            gathers=2 * (2 + 2),
            reductions=2 * (1 + trainable),
            cost="2 steps: the block, and the read of the other one's weight; both again in the replay",
        )
        def _(run: Run) -> Yields:
            model = run.shard(_Borrows(reentrant, trainable), {Block})
            for number in range(2):
                train(model, run.data(number, 2, WIDTH).requires_grad_())
                yield

    borrows(True)
    borrows(False)

    @pattern(
        f"{kind} checkpoints around units that only some losses use",
        "a replay that never comes",
        gathers=2 * (2 + 1),
        reductions=2 * 1,
        cost="2 steps: 2 units forward, one backward",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Ways(each, reentrant, blocks=3), {Block})
        for number in range(2):
            hidden = torch.tanh(run.data(number, 2, WIDTH)).requires_grad_()
            first = checkpoint(model.blocks[0], hidden, use_reentrant=reentrant)
            checkpoint(model.blocks[1], first, use_reentrant=reentrant)
            loss_of(first).backward()
            yield


class _Borrows(nn.Module):
    """Checkpoints a method of its own, which reads a weight of another unit. Its sum does not tell that it is a shard."""

    def __init__(self, reentrant: bool, trainable: bool) -> None:
        super().__init__()
        self.block, self.lender, self.reentrant = Block(), Block().requires_grad_(trainable), reentrant

    def part(self, x: Tensor) -> Tensor:
        return self.block(x) * self.lender.linear.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


class _Around(nn.Module):
    """All of a module in one checkpoint."""

    def __init__(self, net: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


class _Twice(nn.Module):
    """One block, in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return checkpoint(self.block, torch.sin(y), use_reentrant=self.reentrant)


for _kind, _reentrant in {"reentrant": True, "non-reentrant": False}.items():
    _checkpoints(_kind, _reentrant)

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch's checkpoint_wrapper": partial(torch_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "torch's reentrant checkpoint_wrapper": partial(torch_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "fairscale's checkpoint_wrapper": fairscale_wrapper,
}


def _wraps(name: str) -> None:
    step: dict[str, Any] = {"gathers": 2 * 5, "reductions": 2 * 3, "cost": "2 steps: 3 forward, 2 for replay and backward"}
    wrapper = WRAPPERS[name]

    @pattern(f"{name} around units", "a module between the unit and the one that calls it", **step)
    def _(run: Run) -> Yields:
        model = run.shard(Net(block=lambda width: wrapper(Block(width))), {Block})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH))
            yield

    @pattern(f"{name} inside units", "the unit is the wrapper, and hooks of its child run in the replay", **step)
    def _(run: Run) -> Yields:
        model = run.shard(Net(block=lambda width: nn.Sequential(wrapper(Block(width)))), {nn.Sequential})
        for number in range(2):
            train(model, run.data(number, 2, WIDTH))
            yield


for _name in WRAPPERS:
    _wraps(_name)


@pattern("checkpoint wrappers put on after sharding", "the units are there first", gathers=2 * 5, reductions=2 * 3)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    yield from passes(run, model, 2)
