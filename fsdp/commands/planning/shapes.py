"""Built-in shapes of language models, for a first look without a model of one's own."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdp.errors import ShardingError


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
        self.head, self.queries_of_key = shape.width // shape.heads, shape.heads // shape.key_heads
        keys = self.head * shape.key_heads
        self.norm, self.second_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query, self.output = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))
        self.up, self.gate = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        # (batch, length, heads * head) -> (batch, heads, length, head); tensor parallelism leaves some heads here
        query, key, value = (one(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.query, self.key, self.value))
        key, value = (one.repeat_interleave(self.queries_of_key, 1) for one in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """Tokens (batch, length) to the mean cross entropy of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
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


def parallelize_decoder(model: nn.Module, mesh: Any) -> None:
    """Spread every layer of a `Decoder` over mesh["tp"]. Between layers each rank has a part of the sequence.

    Logits stay cut by the vocabulary: the loss needs torch's `loss_parallel`.

    Raises:
        ShardingError: the heads of the keys cannot be divided among the ranks.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    assert isinstance(model, Decoder)
    tp = mesh["tp"]
    if model.shape.key_heads % tp.size():
        raise ShardingError(
            f"plan: {tp.size()} ranks do not divide {model.shape.key_heads} heads of keys; give other sizes of tp."
        )
    layouts: Any = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    # a DTensor for the layers after a norm, so that their gradients are summed once
    complete = PrepareModuleOutput(**layouts, use_local_output=False)
    for block in model.blocks:
        for name in ("query", "key", "value", "up", "gate"):
            parallelize_module(block, tp, {name: ColwiseParallel()})
        for name in ("output", "down"):
            parallelize_module(block, tp, {name: RowwiseParallel(output_layouts=Shard(1))})
        for name in ("norm", "second_norm"):
            parallelize_module(block, tp, {name: SequenceParallel()})
            parallelize_module(block, tp, {name: complete})
    parallelize_module(model.blocks[-1], tp, PrepareModuleOutput(**layouts))
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, tp, ends)


def make_tokens(batch: int, length: int) -> Tensor:
    """Token numbers (batch, length)."""
    return torch.zeros(batch, length, dtype=torch.long)
