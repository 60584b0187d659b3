"""Trains models as rank 0 of a group that sends nothing, and saves what torch's allocator gave out at most."""

import gc
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp
from tests.commands.rehearsal.models import MODELS, Case
from tests.support.processes import be_alone, rank_0_of

SIZE = 8
STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
ACCUMULATED, ACCUMULATING = ("GPT", "Llama"), "FULL_SHARD over three micro-batches"
ROWS = 16
"""Times as many inputs as in other tests, so that activations count."""


def peak_of(case: Case, strategy: str, micro_batches: int = 1) -> tuple[int, int]:
    """Bytes held at most in a third step, and of these the engine's peak over all steps."""

    def train() -> Iterator[int]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(case.build(), auto_wrap_policy=case.units, sharding_strategy=strategy)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        inputs = torch.cat([case.inputs()] * ROWS)
        step(model, optimizer, inputs, micro_batches)
        gc.collect()
        yield 0
        step(model, optimizer, inputs, micro_batches)
        yield fsdp.memory_bytes(model, peak=True)

    (_, peak), engine = allocated(train)
    return peak.most, engine


class Held(NamedTuple):
    """Bytes that torch's allocator had given out in one part of a program."""

    last: int
    """At its end."""
    most: int
    """At once."""


def allocated(run: Callable[[], Iterator[int]]) -> tuple[list[Held], int]:
    """What was held in each part of a program, of which every part ends with a `yield`; and what it yielded last."""
    moments = [0]
    yielded = [0]
    gc.collect()  # what an earlier program left would be freed during this one
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # the program lives until the end of the profile: what was allocated before is not seen when it is freed
        program = run()
        for one in program:
            yielded.append(one)
            moments.append(time.time_ns())
    gc.enable()
    events = sorted((e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    totals = list(zip((moment for moment, _ in events), accumulate(count for _, count in events), strict=True))
    parts = [[total for moment, total in totals if begin < moment <= end] for begin, end in pairwise(moments)]
    return [Held(part[-1], max(part)) for part in parts], yielded[-1]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, micro_batches: int) -> None:
    for _ in range(micro_batches - 1):
        with fsdp.no_sync(model):
            model(inputs).float().square().mean().backward()
    model(inputs).float().square().mean().backward()
    optimizer.step()
    model.zero_grad()


def measured() -> dict[tuple[str, str], tuple[int, int]]:
    with rank_0_of(SIZE):
        found = {(name, strategy): peak_of(case, strategy) for name, case in MODELS.items() for strategy in STRATEGIES}
        return found | {(name, ACCUMULATING): peak_of(MODELS[name], "FULL_SHARD", 3) for name in ACCUMULATED}


if __name__ == "__main__":
    be_alone(measured)
