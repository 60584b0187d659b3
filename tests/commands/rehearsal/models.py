"""Small models of the kinds that people plan for, with one micro-batch of each."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH: Final = 48


class Block(nn.Module):
    """Attention and a perceptron, as in GPT."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 3, -1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(x)


class LlamaBlock(nn.Module):
    """Norms by the root mean square, no bias, a gated perceptron."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.gate = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Experts(nn.Module):
    """Each expert computes a part of the tokens, chosen by position: the same on every rank, and without values."""

    def __init__(self, width: int = WIDTH, count: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = [expert(x[:, index :: len(self.experts)]) for index, expert in enumerate(self.experts)]
        return x + torch.cat(parts, 1)


class Language(nn.Module):
    """Tokens to logits."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 101, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


class Images(nn.Module):
    """Convolutions with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())
            for inside, outside in ((3, 8), (8, 16), (16, 16))
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def tokens() -> Tensor:
    """Two rows of 24 tokens."""
    return torch.zeros(2, 24, dtype=torch.long)


class Case(NamedTuple):
    """A model, its inputs and its units."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    units: set[type[nn.Module]]


MODELS: Final = {
    "GPT": Case(lambda: Language(Block), tokens, {Block}),
    "Llama": Case(lambda: Language(LlamaBlock), tokens, {LlamaBlock}),
    "experts": Case(lambda: Language(Experts), tokens, {Experts}),
    "adapters on a frozen base": Case(lambda: Language(Adapted), tokens, {Adapted}),
    "convolutions": Case(Images, lambda: torch.zeros(4, 3, 12, 12), {nn.Sequential}),
    "tied": Case(lambda: Language(Block, tied=True), tokens, {Block}),
}
