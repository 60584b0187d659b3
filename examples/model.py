"""A byte-level GPT, and text sampled from it. Plain torch, without a word of sharding."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BYTES = 256


class GPT(nn.Module):
    """Predicts the next byte at every position: tokens (batch, length) -> logits (batch, length, 256).

    Its blocks are what the trainer shards: each is one unit, and the embeddings and the head are the root's own.
    """

    def __init__(self, *, layers: int, width: int, heads: int, context: int, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.context = context
        self.checkpoint_activations = checkpoint_activations
        self.byte_embedding = nn.Embedding(BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # what is added to the residual stream starts small, so that its variance does not grow with depth
                scale = 1 / math.sqrt(2 * layers) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to the residual stream (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> three of (batch, heads, length, width / heads)
        query, key, value = self.attention_in(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended


def byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss in nats per byte: each row of `tokens` (batch, context + 1) predicts its own continuation."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, BYTES), tokens[:, 1:].reshape(-1))


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, length: int, *, context: int, temperature: float, seed: int) -> Tensor:
    """`prompt` (n,) continued by `length` sampled bytes: (n + length,). The same seed gives the same text."""
    generator = torch.Generator().manual_seed(seed)
    text = prompt
    for _ in range(length):
        logits = model(text[None, -context:])[0, -1].float().cpu()
        chances = torch.softmax(logits / temperature, dim=0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, drawn.to(text.device)])
    return text
