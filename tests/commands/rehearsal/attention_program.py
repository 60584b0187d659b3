"""Trains models with attention as rank 0 of a group that sends nothing, and saves what torch's allocator and autograd say."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fsdp
from tests.commands.rehearsal.allocator_program import SIZE, allocated
from tests.commands.rehearsal.attention_models import MODELS
from tests.commands.rehearsal.models import Case
from tests.support.everything import EVERYTHING
from tests.support.processes import be_alone, rank_0_of

MESH = (2, SIZE // 2)
"""Groups of two would be reduced over gloo in another way than over a group that sends nothing."""
ALL = ("NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
WAYS = [*product(ALL, (False, True))] if EVERYTHING else [("SHARD_OPTIMIZER", False), ("FULL_SHARD", True)]
"""Strategies, and whether the activations are recomputed."""


class Measured(NamedTuple):
    """Bytes of one training."""

    peak: int
    """The most that the allocator gave out at once in a third step, with what was there before."""
    engine: int
    """The engine's peak over all steps."""
    kept: int
    """Given out in the forward of a third step, and not given back when it ended, but for unsharded parameters."""


def measure(case: Case, strategy: str, recompute: bool) -> Measured:
    before: list[int] = []

    def train() -> Iterator[int]:
        torch.manual_seed(0)
        model = case.build()
        if recompute:
            for module in units_of(model, case):
                module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        mesh = {"mesh": MESH} if strategy == "HYBRID_SHARD" else {}
        fsdp.fully_shard(model, auto_wrap_policy=case.units, sharding_strategy=strategy, **mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            loss_of(model, case).backward()
            optimizer.step()
            model.zero_grad()
        gc.collect()
        before.append(fsdp.memory_bytes(model))
        yield 0
        loss = loss_of(model, case)
        before.append(fsdp.memory_bytes(model))
        yield 0
        loss.backward()
        optimizer.step()
        model.zero_grad()
        yield fsdp.memory_bytes(model, peak=True)

    (rest, forward, backward), engine = allocated(train)
    return Measured(max(forward.most, backward.most), engine, forward.last - rest.last - (before[1] - before[0]))


def units_of(model: nn.Module, case: Case) -> list[nn.Module]:
    """The modules whose activations are recomputed."""
    return [module for module in model.modules() if type(module) in case.units]


def loss_of(model: nn.Module, case: Case) -> Tensor:
    return model(case.inputs()).float().square().mean()


def saved_by(case: Case) -> int:
    """Bytes that autograd saves in a forward of the plain model, but for parameters. Each memory counts once."""
    torch.manual_seed(0)
    model = case.build()
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Any:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, case)
    for one in (*model.parameters(), *model.buffers()):
        found.pop(one.untyped_storage().data_ptr(), None)
    del loss
    return sum(found.values())


def measured() -> tuple[dict[tuple[str, str, bool], tuple[int, ...]], dict[str, int]]:
    with rank_0_of(SIZE):
        trained = {
            (name, strategy, recompute): tuple(measure(MODELS[name], strategy, recompute))
            for name, (strategy, recompute) in product(MODELS, WAYS)
        }
        return trained, {name: saved_by(case) for name, case in MODELS.items()}


if __name__ == "__main__":
    be_alone(measured)
