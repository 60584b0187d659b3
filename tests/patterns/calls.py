"""Other methods than forward, other modules than the root, other modes than training."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, sgd, sgd_steps, steps, train


class Coder(nn.Module):
    """Two methods, and a forward that is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.encoder, self.decoder = Block(), Block()

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x * self.scale)

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@pattern(
    "training through another method",
    "engines hook forward only: `encode` meets shards",
    gathers=2 * 3,
    reductions=2 * 2,
    cost="2 steps: 2 forward, 1 backward; the decoder is neither gathered nor reduced",
)
def _(run: Run) -> Yields:
    model = run.shard(Coder(), {Block})
    run.method(model, "encode")
    for step in range(2):
        loss_of(model.encode(run.data(step, 2, WIDTH))).backward()
        yield


@pattern("training through two methods and forward, mixed", "calls of one unit by several names")
def _(run: Run) -> Yields:
    model = run.shard(Coder(), {Block})
    run.method(model, "encode")
    run.method(model, "decode")
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        x = run.data(step, 2, WIDTH)
        loss = loss_of(model.decode(model.encode(x) * 2)) + loss_of(model(x))
        loss.backward()
        yield
        optimizer.step()


class Generates(Net):
    """Feeds its output back, as generation does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def generate(self, x: Tensor, length: int) -> Tensor:
        found = [x]
        for _ in range(length):
            found.append(torch.tanh(self(found[-1])))
        return torch.stack(found)


@pattern(
    "generation between training steps",
    "`generate` calls the forward again and again; it reads no parameter itself",
    gathers=2 * (5 + 3 * 3),
    reductions=2 * 3,
    cost="a step, and 3 evaluations of 3",
)
def _(run: Run) -> Yields:
    model = run.shard(Generates(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        optimizer.step()
        run.note("generated", model.generate(run.data(step + 10, 1, WIDTH), 3))


@pattern("generation by a registered method", "the whole generation is one call: the root's own stay whole for its length")
def _(run: Run) -> Yields:
    model = run.shard(Generates(), {Block})
    run.method(model, "generate")
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        run.note("generated", model.generate(run.data(step + 10, 1, WIDTH), 3))
        loss.backward()
        yield
        optimizer.step()


@pattern("a method of an inner unit", "the method is registered on a unit that is no root")
def _(run: Run) -> Yields:
    net = nn.Sequential(Block(), Coder())
    model = run.shard(net, {Block, Coder})
    run.method(net[1], "encode")
    for step in range(2):
        hidden = net[0](run.data(step, 2, WIDTH))
        (loss_of(net[1].encode(hidden)) + loss_of(model(run.data(step + 5, 2, WIDTH)))).backward()
        yield


def one_unit_in_step(run: Run, number: int) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        train(model.blocks[number] if step == number else model, run.data(step, 2, WIDTH))
        yield
        optimizer.step()


@pattern(
    "a unit trained directly before the root ever ran",
    "engines find out who is the root in its first forward",
    gathers=2 + 5 + 5,
    reductions=1 + 3 + 3,
    cost="one unit forward and backward, then ordinary steps",
)
def _(run: Run) -> Yields:
    yield from one_unit_in_step(run, 0)


@pattern(
    "a unit trained directly after the root ran",
    "as above, the other way round",
    gathers=5 + (2 + 1) + 5,
    reductions=3 + 1 + 3,
    cost="ordinary steps, one unit forward and backward between them, and one in vain behind it",
)
def _(run: Run) -> Yields:
    yield from one_unit_in_step(run, 1)


@pattern(
    "a unit called directly between the root's forward and backward",
    "it must not take away what the backward needs",
    gathers=2 * (3 + 1 + 2 + 1) + 2,
    reductions=2 * (3 + 1),
    cost="a step: 3 forward, 1 of the unit, 2 backward, 1 of the unit; one in vain ahead of its backward",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        extra = loss_of(model.blocks[0](run.data(step + 5, 2, WIDTH)))
        loss.backward()
        yield
        extra.backward()
        yield


@pattern(
    "units called one by one, the root never",
    "pipelines and samplers drive the layers themselves",
    gathers=2 * 6,
    reductions=2 * 3,
    cost="2 steps: 3 units, twice",
)
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), Block(), Block()), {Block})
    for step in range(2):
        x = run.data(step, 2, WIDTH)
        for layer in model:
            x = layer(x)
        loss_of(x).backward()
        yield


@pattern(
    "a plain submodule of the root called directly", "its parameters belong to the root's own unit, whose forward does not run"
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        hidden = torch.tanh(model.enter(run.data(step, 2, WIDTH)))
        loss_of(model.head(model.blocks[0](hidden))).backward()
        yield


@pattern("a plain submodule of the root called after the root", "the head again, on other features; both in one loss")
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        output = model(run.data(step, 2, WIDTH))
        (loss_of(output) + loss_of(model.head(run.data(step + 5, 2, WIDTH)))).backward()
        yield
        optimizer.step()


@pattern("a plain submodule inside an inner unit called directly", "its unit is neither the root nor itself")
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        train(model, run.data(step, 2, WIDTH))
        yield
        train(model.blocks[1].linear, run.data(step + 5, 2, WIDTH))
        yield


Mode = Callable[[nn.Module], AbstractContextManager[None]]
MODES: dict[str, Mode] = {
    "no_grad": lambda model: torch.no_grad(),
    "inference_mode": lambda model: torch.inference_mode(),
    "eval with grad": lambda model: torch.enable_grad(),
}


def _evaluates(mode: str) -> None:
    # without a graph nothing is kept for a backward: the root's own are gathered again
    backward = 2 if mode == "eval with grad" else 3

    @pattern(
        f"an evaluation between forward and backward, {mode}",
        "it must not disturb the graph, nor show stale weights",
        gathers=2 * (3 + 3 + backward),
        reductions=2 * 3,
        cost="2 steps: 3 forward, 3 evaluated, 2 backward, or 3 if the evaluation gave the root's own back",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Net(), {Block})
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model(run.data(step, 2, WIDTH)))
            model.eval()
            with MODES[mode](model):
                run.note("evaluated", model(run.data(step + 5, 2, WIDTH)).sum().item())
            model.train()
            loss.backward()
            yield
            optimizer.step()

    @pattern(
        f"an evaluation inside no_sync, {mode}",
        "kept gradients survive it",
        gathers=5 + 3 + 5 + 5,
        reductions=3,
        cost="3 micro-batches, one of which synchronises, and an evaluation",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Net(), {Block})
        with run.no_sync(model):
            train(model, run.data(0, 2, WIDTH))
            with MODES[mode](model):
                run.note("evaluated", model(run.data(5, 2, WIDTH)).sum().item())
            train(model, run.data(1, 2, WIDTH))
        train(model, run.data(2, 2, WIDTH))
        yield

    @pattern(
        f"an evaluation first of all, {mode}",
        "the first forward decides nothing about later ones",
        gathers=3 + 2 * 5,
        reductions=2 * 3,
        cost="an evaluation, and 2 ordinary steps",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Net(), {Block})
        with MODES[mode](model):
            run.note("evaluated", model(run.data(5, 2, WIDTH)).sum().item())
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            train(model, run.data(step, 2, WIDTH))
            yield
            optimizer.step()


for _mode in MODES:
    _evaluates(_mode)


@pattern(
    "inference tensors as inputs of training",
    "an encoder under inference_mode, then cloned into training",
    gathers=2 * (1 + 5),
    reductions=2 * 3,
    cost="the encoder, and an ordinary step",
)
def _(run: Run) -> Yields:
    encoder, model = run.shard(Block(), None), run.shard(Net(), {Block})
    for step in range(2):
        with torch.inference_mode():
            features = encoder(run.data(step, 2, WIDTH))
        train(model, features.clone())
        yield


def _built(when: str) -> None:
    @pattern(
        f"an optimizer built {when}",
        "its references must be those that train",
        gathers=2 * 5 + 3 * (when == "after an evaluation"),
        reductions=2 * 3,
        cost="2 ordinary steps, and the evaluation",
    )
    def _(run: Run) -> Yields:
        net = Net()
        early = torch.optim.Adam(net.parameters(), lr=0.01, eps=0.1)
        model = run.shard(net, {Block})
        if when == "after an evaluation":
            with torch.no_grad():
                model(run.data(9, 2, WIDTH))
        optimizer = early if when == "before wrapping" else torch.optim.Adam(model.parameters(), lr=0.01, eps=0.1)
        for step in range(2):
            optimizer.zero_grad()
            train(model, run.data(step, 2, WIDTH))
            yield
            optimizer.step()


for _when in ("before wrapping", "after wrapping", "after an evaluation"):
    _built(_when)


@pattern(
    "parameter groups with weight decay",
    "names and dimensions of shards choose the group, as those of the plain ones do",
    **steps(2),
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1]
    others = [p for name, p in model.named_parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=0.1)
    for step in range(2):
        optimizer.zero_grad()
        train(model, run.data(step, 2, WIDTH))
        yield
        optimizer.step()


class Recurses(Block):
    """Calls itself, twice deep."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(self(torch.tanh(x), depth - 1) if depth else x)


@pattern("a unit that calls itself in its forward", "the inner calls end first, and must not take the weights away", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Recurses), {Recurses})
    yield from sgd_steps(run, model, 2)
