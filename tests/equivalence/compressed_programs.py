"""The hooks of examples/compression.py on real groups."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from compression import Compression, bf16_reduce_scatter, int8_reduce_scatter

import fsdp
from tests.support.models import CASES, gradients_of, loss_of, units_of, wrap

STEPS: Final = 12


class Compressed(NamedTuple):
    """What came of a hook of examples/compression.py, on one rank, over steps whose gradients are the same."""

    first: dict[str, torch.Tensor | None]
    total: dict[str, torch.Tensor | None]
    """Over all steps."""
    own: dict[str, torch.Tensor | None]
    """The whole gradients of this rank alone, in every step."""
    received: int
    """Bytes, in one step."""
    chunks: list[int]
    """Elements of each bucket that belong to this rank."""


def compressed(rank: int) -> dict[str, Compressed]:
    """By hook."""
    case = CASES["net"]
    plain = case.model()
    loss_of(plain(case.batch(rank, 0))).backward()
    found = {}
    for name, hook, feedback in (
        ("bf16", bf16_reduce_scatter, False),
        ("int8", int8_reduce_scatter, False),
        ("int8, error feedback", int8_reduce_scatter, True),
    ):
        model = wrap(case)
        state = Compression(error_feedback=feedback)
        fsdp.register_comm_hook(model, state, hook)
        steps = []
        for _ in range(STEPS):
            model.zero_grad()
            loss_of(model(case.batch(rank, 0))).backward()
            steps.append(gradients_of(model))
        total = {key: None if one is None else sum(step[key] for step in steps) for key, one in steps[0].items()}
        chunks = [flat.layout.shard_numel for unit in units_of(model) for flat in unit.flats]
        found[name] = Compressed(steps[0], total, gradients_of(plain), state.received_bytes // STEPS, chunks)
    return found


def compressed_where_it_cannot(rank: int) -> str:
    """What a hook for sharded strategies is told where every rank holds everything."""
    model = wrap(CASES["net"], sharding_strategy="NO_SHARD")
    fsdp.register_comm_hook(model, Compression(), int8_reduce_scatter)
    try:
        loss_of(model(CASES["net"].batch(rank, 0))).backward()
    except ValueError as refusal:
        return str(refusal)
    return "nothing was said"


COMPRESSED: Final[dict[str, Callable[[int], Any]]] = {
    "compressed": compressed,
    "compressed under NO_SHARD": compressed_where_it_cannot,
}
