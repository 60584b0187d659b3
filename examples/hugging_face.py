"""A Hugging Face causal language model, sharded in place. Its class, its methods and its names stay.

    python examples/hugging_face.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/hugging_face.py     # CPU and gloo, or one GPU per process and NCCL

With `transformers` installed the model is a tiny Llama. Without, it is the stand-in below, which has the same features: a config
object, an output object that holds the loss, a cache object that layers write into, tied embeddings, and `generate`. It
learns the first bytes of its own source by heart. `fsdp.fully_shard` keeps the class of the model, so `generate` works.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from world import join_world

import fsdp

ROWS, LENGTH, BATCH, STEPS = 2, 64, 8, 70
PROMPT_BYTES = 16


def make_model() -> tuple[nn.Module, type[nn.Module]]:
    """The model, randomly initialised, and the class of its layers."""
    torch.manual_seed(0)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    except ImportError:
        return LookAlike(LookAlikeConfig()), Layer
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config), LlamaDecoderLayer


class Result(NamedTuple):
    """The losses of this rank, and what was generated, the same on every rank."""

    model: str
    losses: list[float]
    text: bytes
    text_without_cache: bytes


def train(rank: int, device: torch.device | str = "cpu") -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    module, layer = make_model()
    model: Any = fsdp.fully_shard(module.to(device), auto_wrap_policy={layer}, sync_module_states=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = torch.tensor(list(Path(__file__).read_bytes()[: ROWS * LENGTH])).view(ROWS, LENGTH)
    chance = torch.Generator().manual_seed(1 + rank)  # each rank its own data
    losses = []
    for _ in range(STEPS):
        tokens = rows[torch.randint(ROWS, (BATCH,), generator=chance)].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())

    # every rank generates alike: each call of the model gathers from all of them
    model.eval()
    prompt = rows[:1, :PROMPT_BYTES].to(device)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": LENGTH - PROMPT_BYTES, "do_sample": False}
    texts = []
    for use_cache in (True, False):
        text = model.generate(prompt, use_cache=use_cache, **options)
        texts.append(bytes(text[0].tolist()))
    return Result(type(model).__name__, losses, *texts)


def main() -> None:
    world = join_world()
    result = train(world.rank, world.device)
    same = "the same" if result.text == result.text_without_cache else "NOT the same"
    world.say(f"on {world.description}: {result.model} learnt, from loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}")
    world.say(f"it writes {result.text.decode(errors='replace')!r}, {same} with its cache and without")
    dist.destroy_process_group()


@dataclass
class LookAlikeConfig:
    """The shape of the model."""

    vocab_size: int = 256
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 128


class Output(OrderedDict[str, Any]):
    """A mapping whose entries are attributes too, like a ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Cache:
    """Keys and values of every layer, (batch, heads, length so far, head size). Layers write into it."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return self.pairs[0][0].shape[2] if self.pairs else 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.pairs:
            old_key, old_value = self.pairs[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.pairs[layer] = key, value
        return key, value


class Layer(nn.Module):
    """Attention and a perceptron: (batch, length, hidden) -> the same."""

    def __init__(self, config: LookAlikeConfig, index: int) -> None:
        super().__init__()
        size, self.heads, self.index = config.hidden_size, config.num_attention_heads, index
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention_in, self.attention_out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.perceptron = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor, *, past_key_values: Cache | None) -> Tensor:
        batch, length, size = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            key, value = past_key_values.update(self.index, key, value)
        # a single token, after a past, may look at all there is
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, size))
        hidden: Tensor = x + self.perceptron(self.perceptron_norm(x))
        return hidden


class LookAlike(nn.Module):
    """What a causal language model of `transformers` looks like to its caller."""

    def __init__(self, config: LookAlikeConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, past_key_values: Cache | None = None) -> Output:
        start = 0 if past_key_values is None else len(past_key_values)
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        hidden = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            hidden = layer(hidden, past_key_values=past_key_values)
        logits = self.lm_head(self.norm(hidden))
        output = Output(logits=logits, past_key_values=past_key_values)
        if labels is not None:
            output["loss"] = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return output

    @torch.no_grad()
    def generate(self, input_ids: Tensor, *, max_new_tokens: int, use_cache: bool = True, **unused: Any) -> Tensor:
        """`input_ids` (batch, length) and the likeliest tokens after them. Of the other options there is only the default."""
        cache = Cache() if use_cache else None
        for _ in range(max_new_tokens):
            unseen = input_ids if cache is None else input_ids[:, len(cache) :]
            logits = self(unseen, past_key_values=cache).logits
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(dim=-1)], dim=1)
        return input_ids


if __name__ == "__main__":
    main()
