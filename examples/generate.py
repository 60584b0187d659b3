"""Generation between training steps, with a cache of keys and values.

    python examples/generate.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/generate.py     # CPU and gloo, or one GPU per process and NCCL

A forward under no_grad is an ordinary call of the sharded model: it gathers unit by unit and keeps nothing. So training
continues afterwards with the same numbers. Rule: every rank generates the same number of tokens, because each call gathers from
all ranks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from world import join_world

import fsdp

TEXT = b"A unit is gathered before it computes, and given back right after it."
PROMPT_BYTES = 8
WIDTH, HEADS, LAYERS = 64, 4, 2
ROUNDS, STEPS, BATCH = 3, 5, 4

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values (batch, heads, length so far, width / heads) of each block."""


class Block(nn.Module):
    """Attention, to what is in the cache as well, and a perceptron: (batch, length, width) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        # after a past, tokens come one at a time, and each may look at all there is
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.perceptron(self.perceptron_norm(x))), (key, value)


class Network(nn.Module):
    """Bytes (batch, length), and the cache of those before them -> logits (batch, length, 256), and the longer cache."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_embedding, self.position_embedding = nn.Embedding(256, WIDTH), nn.Embedding(len(TEXT), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        start = cache[0][0].shape[2] if cache else 0
        x = self.byte_embedding(tokens) + self.position_embedding(torch.arange(start, start + tokens.shape[1]).to(tokens.device))
        longer = []
        for index, block in enumerate(self.blocks):
            x, pair = block(x, cache[index] if cache else None)
            longer.append(pair)
        return self.head(x), longer


@torch.no_grad()
def continue_text(model: nn.Module, prompt: Tensor, count: int) -> bytes:
    """`prompt` (n,) and the `count` likeliest bytes after it. Communicates: every rank must call it alike."""
    model.eval()
    tokens, cache, said = prompt[None], None, prompt.tolist()
    for _ in range(count):
        logits, cache = model(tokens, cache)
        tokens = logits[:, -1:].argmax(dim=-1)  # the next call is given the new byte alone: the cache has the rest
        said.append(int(tokens))
    model.train()
    return bytes(said)


class Run(NamedTuple):
    """One training run: this rank's losses, its shards at the end, and the text generated after each round."""

    losses: list[float]
    shards: list[Tensor]
    said: list[bytes]


def train(rank: int, device: torch.device | str, *, speaking: bool) -> Run:
    """Rounds of training steps, with generation after each of them or without."""
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(Network().to(device), auto_wrap_policy={Block}, sync_module_states=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    text = torch.tensor(list(TEXT), device=device)
    batch = text.expand(BATCH, -1)
    torch.manual_seed(1 + rank)  # each rank its own dropout
    losses, said = [], []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            logits, _ = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if speaking:
            said.append(continue_text(model, text[:PROMPT_BYTES], len(TEXT) - PROMPT_BYTES))
    return Run(losses, [parameter.detach() for parameter in model.parameters()], said)


class Result(NamedTuple):
    """Both runs, and whether they are the same on this rank, bit for bit."""

    silent: Run
    speaking: Run
    same: bool


def run(rank: int, device: torch.device | str = "cpu") -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    silent = train(rank, device, speaking=False)
    speaking = train(rank, device, speaking=True)
    same_shards = all(torch.equal(a, b) for a, b in zip(silent.shards, speaking.shards, strict=True))
    return Result(silent, speaking, same_shards and silent.losses == speaking.losses)


def main() -> None:
    world = join_world()
    result = run(world.rank, world.device)
    for index, said in enumerate(result.speaking.said, start=1):
        loss = result.speaking.losses[index * STEPS - 1]
        world.say(f"after {index * STEPS} steps, loss {loss:.2f}: {said.decode(errors='replace')!r}")
    verdict = "the same as without generation, bit for bit" if result.same else "NOT the same as without generation"
    world.say(f"on {world.description}, losses and weights are {verdict}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
