"""What is around a training step: autocast, hooks, buffers, exceptions, copies."""

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd, steps, steps_of_two, train


@pattern("autocast", "weights are cast in the forward, and the casts are kept", **steps(2))
def _(run: Run) -> Yields:
    # as near as ever: both sides cast the same numbers and reduce in fp32
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(run.data(step, 2, WIDTH))
            loss = loss_of(output.float())
        loss.backward()
        yield
        run.note("output", output)
        optimizer.step()


@pattern(
    "autocast over two forwards",
    "kept casts of the first forward's weights must not be freed memory in the second",
    # simulated ranks share autocast's store of casts, and the first that leaves empties it: then the two gradients of a weight
    # are added in fp32 rather than in bf16. One rounding of 2^-9 in each of 3 layers
    within=3 * 2**-9,
    gathers=3 + 3 + 3 + 2,
    # autocast's casts of the two blocks' weights date from the first forward, so their gradients come after autograd has left
    # the second: a second portion each
    reductions=3 + 2,
    cost="an evaluation, 2 forwards, one backward that reduces each block's gradients in two portions",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            run.note("evaluated", model(run.data(2, 2, WIDTH)))
        loss = loss_of(model(run.data(0, 2, WIDTH)).float()) + loss_of(model(run.data(1, 2, WIDTH)).float())
    loss.backward()
    yield


def _hears(where: str, *names: str) -> None:
    @pattern(f"full backward hooks on {where}", "they wrap inputs and outputs in nodes of their own", **steps(2))
    def _(run: Run) -> Yields:
        model = run.shard(Net(), {Block})

        def on_event(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            heard = (*grad_input, *grad_output)
            run.note(f"{type(module).__name__} heard", torch.stack([g.sum() for g in heard if g is not None]))

        for name in names:
            model.get_submodule(name).register_full_backward_hook(on_event)
        for step in range(2):
            train(model, run.data(step, 2, WIDTH))
            yield


_hears("units", "blocks.0", "blocks.1")
_hears("modules inside units", "blocks.0.linear", "blocks.1.norm", "head")
_hears("the root", "")


@pattern("full backward hooks that change gradients", "gradients of modules are scaled on the way", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 0.5,))
        block.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 3,))
    yield from passes(run, model, 2)


@pattern("forward hooks that change inputs and outputs of units", "set before and after wrapping", **steps(2))
def _(run: Run) -> Yields:
    net = Net()
    net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net.blocks[0].register_forward_hook(lambda module, args, output: output.sin())
    model = run.shard(net, {Block})
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[1].register_forward_hook(lambda module, args, output: output.sin())
    yield from passes(run, model, 2)


@pattern(
    "a hook that scales the gradient of a parameter",
    "it is registered on a parameter that is not the one in the graph",
    **steps(2),
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    model.blocks[0].linear.weight.register_hook(lambda gradient: gradient * 0.5)
    yield from passes(run, model, 2)


class Recurrent(nn.Module):
    """LSTMs keep a second book of their weights; the state is carried from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, 3, num_layers=2), nn.LSTM(3, 3, proj_size=2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.first(x)
        return self.second(y)[0]


@pattern("LSTMs", "weights are read from a list that the module keeps beside its parameters", gathers=2 * 2 * 2, reductions=2 * 2)
def _(run: Run) -> Yields:
    model = run.shard(Recurrent(), {nn.LSTM})
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        train(model, run.data(step, 5, 2, WIDTH))
        yield
        optimizer.step()


@pattern("an LSTM inside a unit, called step by step", "its state goes round through the graph", **steps_of_two(2))
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), _Steps()), {_Steps, Block})
    for step in range(2):
        train(model, run.data(step, 3, 2, WIDTH))
        yield


class _Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for one in x:
            state = self.cell(one, state)
        return state[0]


class Normalised(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


@pattern(
    "batch norm over two forwards",
    "buffers change in place between a forward and its backward",
    gathers=2 * (3 + 3 + 2) + 3,
    reductions=2 * 3,
    cost="2 steps of 2 forwards and a backward; an evaluation",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Normalised), {Normalised})
    for step in range(2):
        losses = [loss_of(model(run.data(2 * step + number, 6, WIDTH))) for number in range(2)]
        torch.stack(losses).sum().backward()
        yield
    run.note("running mean", model.blocks[0].norm.running_mean)
    with torch.no_grad():
        run.note("evaluated", model.eval()(run.data(9, 6, WIDTH)))


@pattern("dropout", "each rank's random numbers are those of its replica", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=lambda width: nn.Sequential(Block(width), nn.Dropout(0.4))), {Block})
    for step in range(2):
        train(model, run.data(step, 4, WIDTH))
        yield


@pattern("batches of another size on every rank", "every rank counts the same in the mean", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        train(model, run.data(step, 1 + (run.rank + step) % 3, WIDTH))
        yield


@pattern("a rank with an empty batch", "its gradients are zero, and it takes part in everything", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    for step in range(2):
        output = model(run.data(step, 0 if run.rank == 0 else 2, WIDTH))
        output.square().sum().backward()
        yield


class Branches(Net):
    """Goes another way when its input says so."""

    def forward(self, x: Tensor, sign: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        if sign.item() > 0:
            return self.head(self.blocks[0](x))
        return self.head(self.blocks[1](self.blocks[1](x)))


@pattern(
    "a branch on data, which every rank takes alike",
    "the units of a step are known only when they are called",
    gathers=(2 + 1) + (3 + 1) + (3 + 1) + (2 + 1) + 2 + 2,
    reductions=4 * 2,
    cost="every call forward, a block once backward; one in vain ahead of either pass of the two steps that turn",
)
def _(run: Run) -> Yields:
    model = run.shard(Branches(), {Block})
    optimizer = sgd(model)
    for step, sign in enumerate((1.0, -1.0, -1.0, 1.0)):
        optimizer.zero_grad()
        loss_of(model(run.data(step, 2, WIDTH), torch.tensor(sign))).backward()
        yield
        optimizer.step()


class Fails(Exception):
    """Stands for running out of memory."""


class Breaks(Block):
    """Fails in its forward or its backward, if told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise Fails
        y = super().forward(x)
        if self.where == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: Tensor) -> None:
        raise Fails


def _fails(where: str) -> None:
    # forward: the root's own, the first block, and the second ahead; backward: a whole forward, the second block, the first ahead
    failed = 3 if where == "forward" else 3 + 2

    @pattern(
        f"a {where} that fails and is tried again",
        "out of memory, a smaller batch: nothing of the first try may be left",
        gathers=5 + failed + 5,
        reductions=3 + 3,
        cost="2 ordinary steps, and what was gathered until it failed",
    )
    def _(run: Run) -> Yields:
        model = run.shard(Net(block=Breaks), {Breaks})
        train(model, run.data(0, 2, WIDTH))
        yield
        if run.sharded:  # plain torch leaves half of the gradients behind
            model.blocks[0].where = where
            try:
                train(model, run.data(1, 4, WIDTH))
            except Fails:
                model.blocks[0].where = ""
            else:
                raise AssertionError("it did not fail")
        train(model, run.data(1, 2, WIDTH))
        yield


for _where in ("forward", "backward"):
    _fails(_where)


@pattern("saving and loading between steps", "the optimizer's references stay good, and nothing stays whole")
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(run.data(step, 2, WIDTH)))
        if step == 1:
            state = fsdp.full_state_dict(model, rank0_only=False) if run.sharded else copy.deepcopy(model.state_dict())
            run.note("saved", state["blocks.0.linear.weight"])
        loss.backward()
        yield
        optimizer.step()
        if step == 1:
            halved = {name: tensor / 2 for name, tensor in state.items()}
            if run.sharded:
                fsdp.load_full_state_dict(model, halved)
            else:
                model.load_state_dict(halved)


@pattern("a deep copy of a sharded model", "a moving average by copying; the copy has shards of its own")
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer, average = sgd(model), copy.deepcopy(model).requires_grad_(False)
    for step in range(3):
        optimizer.zero_grad()
        x = run.data(step, 2, WIDTH)
        nn.functional.mse_loss(model(x), average(x)).backward()
        yield
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


@pattern(
    "a pickled sharded model", "torch.save of a module would save this rank's shards", refused="cannot be pickled", **steps(1)
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    run.refused(lambda: torch.save(model, io.BytesIO()))
    train(model, run.data(0, 2, WIDTH))
    yield


@pattern("state_dict and load_state_dict between steps", "a snapshot and the way back, in parts under plain names")
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(run.data(step, 2, WIDTH))).backward()
        yield
        optimizer.step()
        if step == 0:
            best = copy.deepcopy(model.state_dict())
        if step == 1:
            model.load_state_dict(best)


@pattern(
    "a pickled state_dict of a sharded model",
    "torch.save would save this rank's parts",
    refused="full_state_dict",
    **steps(1),
)
def _(run: Run) -> Yields:
    model = run.shard(Net(), {Block})
    run.refused(lambda: torch.save(model.state_dict(), io.BytesIO()))
    train(model, run.data(0, 2, WIDTH))
    yield


class Swaps(Block):
    """Its activation is a child without parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.activation: nn.Module = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(self.norm(x)))


@pattern("a child without parameters that is replaced after wrapping", "the engine remembers modules that are gone", **steps(2))
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Swaps), {Swaps})
    for step in range(2):
        train(model, run.data(step, 2, WIDTH))
        yield
        for block in model.blocks:
            block.activation = nn.GELU()
