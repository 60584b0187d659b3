"""Programs in which each rank draws its own path through the units of a model, and the numbers of a single process for them."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import ReductionPolicy
from tests.support.models import is_at_rest

WIDTH = 6
LAYERS = 4


class Hop(NamedTuple):
    """A call of one layer on the path of a forward."""

    layer: int
    recompute: str = ""
    """ "reentrant", "kept" (the other kind of checkpoint), or none."""


class Pass(NamedTuple):
    """What one rank does with one batch."""

    hops: tuple[Hop, ...]
    kind: str = "train"
    """ "train", "accumulate" (under no_sync), "evaluate" or "empty" (a backward without a batch)."""


class Step(NamedTuple):
    """What all ranks do until the optimizer steps."""

    passes: tuple[tuple[Pass, ...], ...]
    """For each rank. The last one trains, or is empty."""
    clips: bool = False
    keeps_zeros: bool = False
    """Whether gradients are set to zero after the step, and not to None."""


class Pair(nn.Module):
    """A unit around a unit, of which a rank may leave the inner one out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x) * self.scale
        return self.inner(x) if float(x.detach().sum()) > 0 else x


class Branching(nn.Module):
    """Each forward is told which layers it goes through, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Pair(), nn.Linear(WIDTH, WIDTH), Pair()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, hops: Sequence[Hop]) -> Tensor:
        for layer, recompute in hops:
            module = self.layers[layer]
            if recompute:
                x = x + torch.tanh(checkpoint(module, x, use_reentrant=recompute == "reentrant"))
            else:
                x = x + torch.tanh(module(x))
        return self.head(x)


def draw_program(seed: int, ranks: int, steps: int = 4) -> list[Step]:
    """A program of so many ranks. Some steps are those of an earlier one."""
    draw = random.Random(seed)
    program: list[Step] = []
    habit = draw.choice(["dropping", "wild", "alike"])
    for _ in range(steps):
        if program and draw.random() < 0.3:
            program.append(draw.choice(program))
            continue
        shared = draw_passes(draw, "wild")
        passes = tuple(shared if habit == "alike" and draw.random() < 0.7 else draw_passes(draw, habit) for _ in range(ranks))
        program.append(Step(passes, draw.random() < 0.3, draw.random() < 0.3))
    return program


def draw_passes(draw: random.Random, habit: str) -> tuple[Pass, ...]:
    kinds = ["train" if draw.random() < 0.85 else "empty"]
    while draw.random() < (0.1 if habit == "dropping" else 0.35):
        kinds.insert(0, draw.choice(["accumulate", "evaluate"]))
    return tuple(Pass(draw_hops(draw, habit), kind) for kind in kinds)


def draw_hops(draw: random.Random, habit: str) -> tuple[Hop, ...]:
    if habit == "dropping":
        layers = [layer for layer in range(LAYERS) if draw.random() < 0.6]
    else:
        layers = [draw.randrange(LAYERS) for _ in range(draw.randrange(5))]
    return tuple(Hop(layer, draw.choice(["", "", "reentrant", "kept"])) for layer in layers)


def batch(step: int, number: int, rank: int) -> Tensor:
    """The batch of one pass."""
    # a reentrant checkpoint needs an input that requires grad
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(3, WIDTH, generator=generator).requires_grad_()


class Seen(NamedTuple):
    """What a step left."""

    losses: tuple[float, ...]
    """Of one rank."""
    norm: float
    gradients: dict[str, Tensor | None]
    """The full gradients after the backward."""


def sharded(rank: int, program: Sequence[Step], **options: Any) -> tuple[list[Seen], dict[str, Tensor]]:
    """Run the program on one rank; return what it saw, and the full weights at the end."""
    torch.manual_seed(0)
    model = fsdp.fully_shard(Branching(), auto_wrap_policy={nn.Linear, Pair}, uneven_paths=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for number, step in enumerate(program):
        losses = tuple(take(model, one, batch(number, index, rank), True) for index, one in enumerate(step.passes[rank]))
        norm = float(fsdp.clip_grad_norm_(model, 0.05)) if step.clips else 0.0
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            is_full = gradient is None or options.get("sharding_strategy") == "NO_SHARD"
            gradients[name] = gradient if gradient is None else (gradient if is_full else fsdp.full_tensor(gradient)).clone()
        seen.append(Seen(losses, norm, gradients))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not step.keeps_zeros)
    fsdp.meet(model)
    weights = fsdp.full_state_dict(model, rank0_only=False)
    assert is_at_rest(model), "something is held"
    return seen, {name: value.clone() for name, value in weights.items()}


def take(model: nn.Module, one: Pass, x: Tensor, is_sharded: bool, divisor: int = 1) -> float:
    """Run one pass; return its loss."""
    if one.kind == "evaluate":
        with torch.no_grad():
            return float(model(x, one.hops).square().mean())
    if one.kind == "empty":
        if is_sharded:
            fsdp.empty_backward(model)
        return 0.0
    with fsdp.no_sync(model) if is_sharded and one.kind == "accumulate" else nullcontext():
        loss = model(x, one.hops).square().mean()
        (loss / divisor).backward()
    return float(loss.detach())


def plain(program: Sequence[Step], ranks: int) -> tuple[list[list[Seen]], dict[str, Tensor]]:
    """The same in a single process, which averages over the ranks: what each rank sees, and the weights at the end."""
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[list[Seen]] = [[] for _ in range(ranks)]
    for number, step in enumerate(program):
        losses = [
            tuple(take(model, one, batch(number, index, rank), False, ranks) for index, one in enumerate(passes))
            for rank, passes in enumerate(step.passes)
        ]
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)) if step.clips else 0.0
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        for rank in range(ranks):
            seen[rank].append(Seen(losses[rank], norm, gradients))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not step.keeps_zeros)
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def assert_alike(found: tuple[list[Seen], dict[str, Tensor]], wanted: tuple[list[Seen], dict[str, Tensor]]) -> None:
    """Compare what one rank saw with what it would have seen in a single process."""
    for number, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"step {n}: {text}")
        assert abs(one.norm - other.norm) <= 1e-4 * max(1.0, other.norm), f"step {number}: {one.norm}, {other.norm}"
        for name, gradient in other.gradients.items():
            mine = one.gradients[name]
            assert (mine is None) == (gradient is None), f"step {number}: {name}.grad is {mine}, not {gradient}"
            if mine is not None and gradient is not None:
                torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}.grad: {text}")
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": "SHARD_GRAD_OP", "prefetch": 3},
    {"sharding_strategy": "SHARD_GRADIENTS"},
    {"sharding_strategy": "SHARD_OPTIMIZER", "prefetch": 0},
    {"sharding_strategy": "NO_SHARD"},
    {"reshard_after_forward": True, "prefetch": 2, "reduction": ReductionPolicy(bucket_cap_mb=0.0001)},
    {"reduction": ReductionPolicy(deterministic=True, streams=2), "plain_shards": False},
    {"reduction": ReductionPolicy(at_end=True, find_unused_parameters=True), "prefetch": 0},
]


def check(number: int, option: int, ranks: int, seed: int) -> None:
    """Compare a program on simulated ranks with a single process. The option after the last one is a mesh of four ranks."""
    if option == len(OPTIONS):
        ranks, options = 4, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    else:
        options = OPTIONS[option]
    program = draw_program(number, ranks)
    wanted, weights = plain(program, ranks)
    for rank, found in enumerate(fsdp.simulate(ranks, lambda rank: sharded(rank, program, **options), seed)):
        assert_alike(found, (wanted[rank], weights))
