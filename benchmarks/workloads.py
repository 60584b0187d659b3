"""The models that are trained for measurements, their data, and what can be done to a model before anybody wraps it.

A model's forward returns its loss, in fp32. Its units, which engines gather and release one by one, are all of one class. Sizes
are such that a step of plain torch takes 0.05 to 0.4 s on one core, so that some dozens of each fit a run; SMALL ones only show
that all runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]


class Unit(nn.Module):
    """What is gathered together. With `checkpointed` it keeps only its input and computes again in the backward."""

    checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a GPT and of its batches."""

    blocks: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int


class Block(Unit):
    """A transformer block of twelve parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def compute(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.sequence, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Perceptron(Unit):
    """Two layers, and the way around them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Convolutions(Unit):
    """A basic block of a ResNet, with norms of groups: those of batches would make the loss depend on how ranks share one."""

    def __init__(self, inward: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inward, width, 3, stride, 1, bias=False)
        self.norm_1 = nn.GroupNorm(8, width)
        self.conv_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_2 = nn.GroupNorm(8, width)
        self.shortcut = nn.Identity() if inward == width else nn.Conv2d(inward, width, 1, stride, bias=False)

    def compute(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class Chain(nn.Module):
    """An entrance, units one after another, and a classifier behind them."""

    def __init__(self, enter: nn.Module, units: list[Unit], width: int) -> None:
        super().__init__()
        self.enter = enter
        self.units = nn.Sequential(*units)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.units(self.enter(x))
        x = x.flatten(2).mean(2) if x.dim() > 2 else x
        return F.cross_entropy(self.leave(x).float(), targets)


CLASSES = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its data."""

    what: str
    unit: type[Unit]
    make: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]


def language(sizes: Sizes) -> Workload:
    def batch(generator: Generator) -> Batch:
        rows = torch.randint(sizes.vocabulary, (sizes.batch, sizes.sequence + 1), generator=generator)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    what = f"GPT, {sizes.blocks} blocks, width {sizes.width}, {sizes.batch} x {sizes.sequence} tokens a rank"
    return Workload(what, Block, lambda: GPT(sizes), batch)


def perceptrons(what: str, units: int, width: int, inner: int, rows: int) -> Workload:
    def make() -> nn.Module:
        return Chain(nn.Linear(CLASSES, width), [Perceptron(width, inner) for _ in range(units)], width)

    return Workload(f"{what}: {units} of {width} x {inner}, {rows} rows a rank", Perceptron, make, _examples((rows, CLASSES)))


def convolutional(stages: tuple[int, ...], blocks: int, images: int) -> Workload:
    def make() -> nn.Module:
        units: list[Unit] = []
        inward = stages[0]
        for width in stages:
            units += [
                Convolutions(inward if first else width, width, 2 if first and width > inward else 1)
                for first in (True, *[False] * (blocks - 1))
            ]
            inward = width
        return Chain(nn.Conv2d(3, stages[0], 3, 2, 1), units, stages[-1])

    what = f"ResNet-like: {blocks} blocks each of {', '.join(map(str, stages))} channels, {images} images of 32 x 32 a rank"
    return Workload(what, Convolutions, make, _examples((images, 3, 32, 32)))


def _examples(shape: tuple[int, ...]) -> Callable[[Generator], Batch]:
    return lambda generator: (torch.randn(shape, generator=generator), torch.randint(CLASSES, shape[:1], generator=generator))


WORKLOADS: Mapping[str, Workload] = {
    "gpt8x256": language(Sizes(8, 256, 4, 128, 256, 2)),
    "gpt4x512": language(Sizes(4, 512, 8, 128, 256, 2)),
    "mlp": perceptrons("large layers", 4, 1024, 2048, 64),
    "tiny": perceptrons("many tiny units", 100, 32, 32, 16),
    "conv": convolutional((64, 128, 256), 3, 4),
}
SMALL: Mapping[str, Workload] = {
    "gpt8x256": language(Sizes(2, 32, 2, 8, 32, 2)),
    "gpt4x512": language(Sizes(1, 64, 2, 8, 32, 2)),
    "mlp": perceptrons("large layers", 2, 32, 64, 4),
    "tiny": perceptrons("many tiny units", 6, 8, 8, 4),
    "conv": convolutional((8, 16), 1, 2),
}


class Adapted(nn.Module):
    """A frozen layer, and beside it two small ones that are trained."""

    RANK = 8

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.inward: nn.Module
        self.outward: nn.Module
        if isinstance(layer, nn.Linear):
            self.inward = nn.Linear(layer.in_features, self.RANK, bias=False)
            self.outward = nn.Linear(self.RANK, layer.out_features, bias=False)
        else:
            kernel, stride, padding = layer.kernel_size, layer.stride, layer.padding
            self.inward = nn.Conv2d(layer.in_channels, self.RANK, kernel, stride, padding, bias=False)  # type: ignore[arg-type]
            self.outward = nn.Conv2d(self.RANK, layer.out_channels, 1, bias=False)
        nn.init.normal_(self.outward.weight, std=0.02)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.outward(self.inward(x))
        return y


def adapt(module: nn.Module, unit: type[Unit]) -> None:
    """Freeze everything, and put adapters beside the layers of the units."""
    module.requires_grad_(False)
    for one in [child for child in module.modules() if isinstance(child, unit)]:
        for name, layer in list(one.named_children()):
            if isinstance(layer, nn.Linear | nn.Conv2d):
                setattr(one, name, Adapted(layer))


def checkpoint_units(module: nn.Module, unit: type[Unit]) -> None:
    for child in module.modules():
        if isinstance(child, unit):
            child.checkpointed = True
