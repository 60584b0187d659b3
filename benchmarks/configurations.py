"""Three language models by their published shapes, on the meta device: names and shapes without memory.

They have weights and no forward, so they cannot be run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a model's card says."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    experts: int = 0
    """0: one dense perceptron."""
    norms_of_heads: bool = False
    tied: bool = False
    """The output layer is the embedding."""


class Attention(nn.Module):
    def __init__(self, of: Figures) -> None:
        super().__init__()
        self.q_proj = nn.Linear(of.hidden, of.heads * of.head, bias=False)
        self.k_proj = nn.Linear(of.hidden, of.key_heads * of.head, bias=False)
        self.v_proj = nn.Linear(of.hidden, of.key_heads * of.head, bias=False)
        self.o_proj = nn.Linear(of.heads * of.head, of.hidden, bias=False)
        if of.norms_of_heads:
            self.q_norm, self.k_norm = nn.RMSNorm(of.head), nn.RMSNorm(of.head)


class Perceptron(nn.Module):
    def __init__(self, of: Figures) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(of.hidden, of.inner, bias=False)
        self.up_proj = nn.Linear(of.hidden, of.inner, bias=False)
        self.down_proj = nn.Linear(of.inner, of.hidden, bias=False)


class Layer(nn.Module):
    """The unit."""

    def __init__(self, of: Figures) -> None:
        super().__init__()
        self.self_attn = Attention(of)
        if of.experts:
            self.gate = nn.Linear(of.hidden, of.experts, bias=False)
            self.experts = nn.ModuleList(Perceptron(of) for _ in range(of.experts))
        else:
            self.mlp = Perceptron(of)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(of.hidden), nn.RMSNorm(of.hidden)


class Decoder(nn.Module):
    def __init__(self, of: Figures) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(of.vocabulary, of.hidden)
        self.layers = nn.ModuleList(Layer(of) for _ in range(of.layers))
        self.norm = nn.RMSNorm(of.hidden)
        self.lm_head = nn.Linear(of.hidden, of.vocabulary, bias=False)
        if of.tied:
            self.lm_head.weight = self.embed_tokens.weight


FIGURES: Mapping[str, Figures] = {
    "Llama-3-8B": Figures(32, 4096, 14336, 32, 8, 128, 128_256),
    "Qwen3-4B": Figures(36, 2560, 9728, 32, 8, 128, 151_936, norms_of_heads=True, tied=True),
    "Mixtral-8x7B": Figures(32, 4096, 14336, 32, 8, 128, 32_000, experts=8),
}


def _make(of: Figures) -> nn.Module:
    with torch.device("meta"):
        return Decoder(of)


CONFIGURATIONS: Mapping[str, Callable[[], nn.Module]] = {name: lambda of=of: _make(of) for name, of in FIGURES.items()}


@dataclass(frozen=True, slots=True)
class UnitShapes:
    """The parameters that are gathered together, in the order in which modules list them."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


def units_of(model: nn.Module, kind: type[nn.Module] = Layer) -> list[UnitShapes]:
    """The root's own first, then one for each module of that kind; a parameter that is tied counts once."""
    inner = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    inside = {parameter for module in inner.values() for parameter in module.parameters()}
    groups = {"": [parameter for parameter in model.parameters() if parameter not in inside]}
    groups |= {name: list(module.parameters()) for name, module in inner.items()}
    return [UnitShapes(name, tuple(tuple(one.shape) for one in parameters)) for name, parameters in groups.items()]
