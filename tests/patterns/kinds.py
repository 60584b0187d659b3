"""Parameters of odd shapes and kinds, and none at all."""

import torch
from torch import Tensor, nn

from tests.patterns.harness import Run, Yields, pattern
from tests.patterns.modules import WIDTH, Block, Net, loss_of, passes, sgd_steps, steps, steps_of_two, train


class Odd(nn.Module):
    """Parameters of no size, of no dimension, smaller than the world, and not divisible by it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.tensor([0.7]))
        self.cube = nn.Parameter(torch.linspace(-1, 1, WIDTH * 3 * 5).view(WIDTH, 3, 5))
        self.odd = nn.Linear(WIDTH, 7)
        self.back = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("bw,wij->bij", x, self.cube).sum((1, 2))
        return self.back(torch.tanh(self.odd(x))) * self.gain + self.one * mixed.unsqueeze(1) + self.empty.sum()


@pattern(
    "parameters of no size, no dimension, and of odd sizes",
    "shards of nothing; rows that do not divide by the world",
    **steps_of_two(2),
)
def _(run: Run) -> Yields:
    # in float64: the gradient of the gain is a sum in which nearly everything cancels
    model = run.shard(nn.Sequential(Odd(), Odd()).double(), {Odd})
    yield from sgd_steps(run, model, 2)


class Transposed(nn.Module):
    """Its weights are not contiguous: a transposed view, and a convolution in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * 6).view(6, WIDTH).t())
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution((x @ self.weight).view(-1, 2, 3, 1)).tanh()


@pattern("weights that are not contiguous", "a flat copy in the order of memory is another weight", **steps_of_two(2))
def _(run: Run) -> Yields:
    # in float64: gathered whole parameters are contiguous, so kernels may sum in another order
    model = run.shard(nn.Sequential(Block(), Transposed()).double(), {Block, Transposed})
    yield from sgd_steps(run, model, 2)


class Wide(nn.Module):
    """Three dtypes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.wide.float() + self.narrow.float())


@pattern(
    "three dtypes in one unit",
    "flat engines want all of a unit alike",
    gathers=2 * 2 * 3,
    cost="2 units, forward and backward, 3 buffers; the root has no own",
    within=2**-8,  # a mean in bf16, on either side in another order: one rounding of 2^-9 each
    reductions=2 * 3,
)
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Wide(), Wide()), {Wide})
    train(model, run.data(0, 2, WIDTH))
    yield


class Lora(nn.Module):
    """A frozen bf16 layer and a trainable fp32 correction of low rank."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x)))


@pattern(
    "a frozen bf16 base with fp32 adapters",
    "as above, and the base has no gradients",
    gathers=2 * (1 + 2 * 2 + 2 * 2),
    reductions=2 * 3,
    cost="2 steps: the root's own once, 2 units of 2 buffers twice",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Lora), {Lora})
    yield from sgd_steps(run, model, 2)


class Quantised(nn.Module):
    """A frozen base of whole numbers, made into floating-point ones in the forward."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        codes = torch.arange(width * width, dtype=torch.uint8).view(width, width)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.05), requires_grad=False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = (self.codes.float() - 8) * self.scale
        return torch.tanh(x @ base + self.up(self.down(x)))


@pattern(
    "a frozen base of uint8, dequantised in the forward",
    "its parameters cannot require gradients at all",
    gathers=2 * (1 + 2 * 3 + 2 * 3),
    reductions=2 * 3,
    cost="2 steps: the root's own once, 2 units of 3 buffers twice",
)
def _(run: Run) -> Yields:
    model = run.shard(Net(block=Quantised), {Quantised})
    yield from passes(run, model, 2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.polar(torch.linspace(0.5, 1.5, WIDTH), torch.linspace(0, 2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * self.phase).real


@pattern("complex parameters", "sums and collectives know real numbers only", **steps_of_two(2))
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(Block(), Complex()), {Block, Complex})
    yield from passes(run, model, 2)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(9, WIDTH, sparse=True), Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens))


@pattern("an embedding with sparse gradients", "the reduction is dense, and so is `.grad`", **steps_of_two(2))
def _(run: Run) -> Yields:
    model = run.shard(Looks(), {nn.Embedding, Block})
    for step in range(2):
        loss_of(model(run.tokens(step, 2, 3, vocabulary=9))).backward()
        yield


class Bare(nn.Module):
    """No parameters of its own, and a child without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.net = nn.Tanh(), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.scale(x))


@pattern("units and a root without parameters", "nothing to gather, and still the final callback", gathers=2 * 3, reductions=3)
def _(run: Run) -> Yields:
    model = run.shard(Bare(), {nn.Tanh, Net, Block})
    train(model, run.data(0, 2, WIDTH))
    yield


@pattern("a model without parameters", "nothing to do, and nothing to trip over", gathers=0, reductions=0)
def _(run: Run) -> Yields:
    model = run.shard(nn.Sequential(nn.Tanh(), nn.Sigmoid()))
    x = run.data(0, 2, WIDTH).requires_grad_()
    train(model, x)
    run.note("gradient of x", x.grad)
    yield


@pattern("ignored modules", "their parameters stay whole, and are the user's own business", **steps(2))
def _(run: Run) -> Yields:
    net = Net()
    model = run.shard(net, {Block}, ignored_modules=[net.head, net.blocks[0].norm])
    yield from sgd_steps(run, model, 2)


@pattern(
    "an outer root around one with ignored modules",
    "the outer wrapping is not told again what the inner one ignored",
    gathers=2 * (4 + 3),
    reductions=2 * 4,
    cost="2 steps: 2 blocks and the own of either root forward, all but the outer root's own backward",
)
def _(run: Run) -> Yields:
    net = Net()
    model = run.shard(nn.Sequential(run.shard(net, {Block}, ignored_modules=[net.head]), nn.Linear(3, 3)))
    yield from sgd_steps(run, model, 2)


def _fill(module: nn.Module) -> None:
    """One module's own parameters, to values that depend on their shapes only."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view(parameter.shape))


class Filled(nn.Module):
    """Can initialise itself, as torch's layers can."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def _whole(meta: nn.Module) -> nn.Module:
    meta.to_empty(device="cpu")
    for module in meta.modules():
        _fill(module)
    return meta


@pattern(
    "a meta-device model and param_init_fn",
    "a model too large to be built on one device is given memory shard by shard",
    **steps(2),
)
def _(run: Run) -> Yields:
    with torch.device("meta"):
        net = Net()
    model = run.shard(net, {Block}, param_init_fn=_fill) if run.sharded else run.shard(_whole(net))
    yield from passes(run, model, 2)


@pattern("a meta-device model that initialises itself", "`reset_parameters` of each module is the default", **steps_of_two(2))
def _(run: Run) -> Yields:
    with torch.device("meta"):
        net = nn.Sequential(Filled(), nn.Tanh(), Filled())
    model = run.shard(net if run.sharded else _whole(net), {Filled})
    yield from passes(run, model, 2)
