"""A training inside `fsdp.join` whose ranks go different ways."""

import random

import torch
from torch import Tensor, nn

import fsdp
from tests.support.paths import LAYERS, Branching, Hop, batch


def paths_of(seed: int, ranks: int) -> list[list[tuple[Hop, ...]]]:
    """For each rank, its batches: the layers that each one goes through."""
    draw = random.Random(seed)
    return [
        [tuple(Hop(layer) for layer in range(LAYERS) if draw.random() < 0.6) for _ in range(draw.randrange(5))]
        for _ in range(ranks)
    ]


def weights_after(rank: int | None, seed: int, ranks: int, divides_by_all: bool, zeroes: str) -> tuple[dict[str, Tensor], int]:
    """Train on one rank inside a join, or (None) on all of them in a single process; and how many forwards it ran."""
    torch.manual_seed(0)
    model: nn.Module = Branching() if rank is None else _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    paths, forwards = paths_of(seed, ranks), 0
    if rank is None:
        for number in range(max(map(len, paths))):
            left = [one for one in range(ranks) if len(paths[one]) > number]
            for one in left:
                loss = model(batch(number, 0, one), paths[one][number]).square().mean()
                (loss / (ranks if divides_by_all else len(left))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict()), 0
    with fsdp.join(model, optimizer.step, divides_by_all_ranks=divides_by_all) as joined:
        for number, hops in enumerate(paths[rank]):
            if zeroes == "before":
                optimizer.zero_grad()
            if number % 2:
                with torch.no_grad():
                    model(batch(number, 1, rank), hops[:1])
            model(batch(number, 0, rank), hops).square().mean().backward()
            joined.step()
            if zeroes == "after":
                optimizer.zero_grad()
            if number % 3 == rank:
                with torch.no_grad():
                    model(batch(number, 1, rank), [Hop(layer) for layer in range(LAYERS)])
            forwards += 1
    return {name: value.clone() for name, value in fsdp.full_state_dict(model, rank0_only=False).items()}, forwards


def _sharded() -> nn.Module:
    return fsdp.fully_shard(Branching(), auto_wrap_policy={nn.Linear}, uneven_paths=True)
