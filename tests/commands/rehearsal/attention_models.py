"""Models with attention of the kinds that people train, with one micro-batch of each: activations are most of what they hold."""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.commands.rehearsal.models import Case

WIDTH: Final = 64
LENGTH: Final = 192
HEADS: Final = 4
BATCH: Final = 4
WORDS: Final = 101


class Attention(nn.Module):
    """Attention with grouped heads, from one sequence to itself or to another one."""

    def __init__(self, key_heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.key_heads, self.dropout = key_heads, dropout
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * WIDTH * key_heads // HEADS)

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        head = WIDTH // HEADS
        query = self.query(x).unflatten(-1, (HEADS, head)).transpose(1, 2)
        pair = self.keys(x if other is None else other).unflatten(-1, (2, self.key_heads, head))
        key, value = pair.unbind(-3)
        mixed = functional.scaled_dot_product_attention(
            query,
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=causal,
            enable_gqa=self.key_heads != HEADS,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Norms by mean and variance, and a perceptron."""

    def __init__(self, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout=dropout)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), causal=self.causal)
        return x + self.perceptron(x)


class LlamaBlock(nn.Module):
    """Norms by the root mean square, grouped heads, a gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(key_heads=1)
        self.up, self.gate = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), causal=True)
        y = self.second_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class ExpertsBlock(nn.Module):
    """Each token goes to two of four experts; an expert computes all tokens, of which others have the weight zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.router = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), causal=True)
        best = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros_like(x[..., :4]).scatter(-1, best.indices, best.values)
        return x + torch.stack([expert(x) * weights[..., index, None] for index, expert in enumerate(self.experts)]).sum(0)


class Language(nn.Module):
    """Tokens to logits."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """Layers of torch, with a mask that leaves out padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 3 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, padding = self.embedding(tokens), tokens == WORDS
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return x


class CrossBlock(nn.Module):
    """A layer of a decoder: attention to itself, then to what an encoder has made, with a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.itself, self.across = Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        x = x + self.itself(self.norms[0](x), causal=True)
        x = x + self.across(self.norms[1](x), encoded, mask)
        return x + self.perceptron(self.norms[2](x))


class Translation(nn.Module):
    """Tokens of two languages, of different numbers, to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder = nn.ModuleList(GPTBlock(causal=False) for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        encoded, x = self.embedding(tokens), self.embedding(tokens[:, : LENGTH // 2])
        mask = torch.zeros(len(tokens), 1, LENGTH // 2, LENGTH, device=tokens.device)
        for block in self.encoder:
            encoded = block(encoded)
        for block in self.decoder:
            x = block(x, encoded, mask)
        return self.head(x)


class Vision(nn.Module):
    """Patches of images, and a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 145, WIDTH))
        self.blocks = nn.ModuleList(GPTBlock(causal=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def tokens() -> Tensor:
    return torch.zeros(BATCH, LENGTH, dtype=torch.long)


def images() -> Tensor:
    return torch.zeros(BATCH, 3, 48, 48)


MODELS: Final = {
    "GPT": Case(lambda: Language(*(GPTBlock() for _ in range(3))), tokens, {GPTBlock}),
    "GPT with dropout": Case(lambda: Language(*(GPTBlock(dropout=0.1) for _ in range(2))), tokens, {GPTBlock}),
    "Llama, grouped heads": Case(lambda: Language(*(LlamaBlock() for _ in range(3))), tokens, {LlamaBlock}),
    "encoder with masks": Case(Encoder, tokens, {nn.TransformerEncoderLayer}),
    "cross attention": Case(Translation, tokens, {GPTBlock, CrossBlock}),
    "vision": Case(Vision, images, {GPTBlock}),
    "experts": Case(lambda: Language(*(ExpertsBlock() for _ in range(2))), tokens, {ExpertsBlock}),
}
