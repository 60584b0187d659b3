"""Built-in shapes of language models, for a first look without a model of one's own."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder with gated perceptrons and grouped-query attention."""

    blocks: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int


SHAPES: Final = {
    "decoder-125m": Shape(12, 768, 2048, 12, 12, 50304),
    "decoder-1b": Shape(16, 2048, 8192, 32, 8, 128256),
    "decoder-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "decoder-70b": Shape(80, 8192, 28672, 64, 8, 128256),
}


class Block(nn.Module):
    """Attention and a gated perceptron, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads = shape.heads, shape.key_heads
        keys = shape.width // shape.heads * shape.key_heads
        self.norm, self.second_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query, self.output = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))
        self.up, self.gate = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm(x)
        query = self.query(y).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = (
            one(y).view(batch, length, self.key_heads, -1).transpose(1, 2).repeat_interleave(self.heads // self.key_heads, 1)
            for one in (self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.second_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """Tokens (batch, length) to the mean cross entropy of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_tokens(batch: int, length: int) -> Tensor:
    """Token numbers (batch, length)."""
    return torch.zeros(batch, length, dtype=torch.long)
