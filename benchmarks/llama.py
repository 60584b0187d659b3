"""A model of the size and shape that is trained on a device, and how many operations a step of it must take.

Blocks are Llama's, but for rotary positions, which have no parameters and are the same work for every contender: RMSNorm,
attention whose keys and values are shared by four heads each, SwiGLU. No biases. The forward returns its loss, in fp32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model and of its batches. Heads have 128 elements; a narrower model has one head."""

    blocks: int
    width: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 128)

    @property
    def key_heads(self) -> int:
        return max(1, self.heads // 4)

    @property
    def inner(self) -> int:
        """Of the SwiGLU: 8/3 of the width, in multiples of 256."""
        return -(-8 * self.width // (3 * 256)) * 256

    @property
    def tokens(self) -> int:
        """In a batch of full length."""
        return self.batch * self.sequence


class Block(nn.Module):
    """A transformer block of nine parameters."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, shared = sizes.width, sizes.width // sizes.heads * sizes.key_heads
        self.head = width // sizes.heads
        self.norm_1 = nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared, bias=False)
        self.value = nn.Linear(width, shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, sizes.inner, bias=False)
        self.up = nn.Linear(width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        # (batch, sequence, heads * head) -> (batch, heads, sequence, head)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks between an embedding and a head of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def batch_of(sizes: Sizes, length: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens, and those that follow them; the same on every device."""
    rows = torch.randint(sizes.vocabulary, (sizes.batch, length + 1), generator=generator).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def operations(sizes: Sizes, length: int) -> int:
    """Floating-point operations that one forward and backward of a batch needs, as PaLM counts them.

    Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T for each token, with N parameters, L layers of H heads of Q elements, and
    T tokens in a sequence. N leaves out those that are not multiplied with: a look-up, and the weights of norms. As in PaLM, the
    mask saves attention nothing, and what is computed again does not count.
    """
    shared = sizes.width // sizes.heads * sizes.key_heads
    block = 2 * sizes.width * (sizes.width + shared) + 3 * sizes.width * sizes.inner
    multiplied = sizes.blocks * block + sizes.width * sizes.vocabulary
    return sizes.batch * length * (6 * multiplied + 12 * sizes.blocks * sizes.width * length)
