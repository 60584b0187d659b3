"""Trains models as rank 0 of a group that sends nothing, and saves what torch's allocator gave out at most."""

import gc
import sys
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
from tests.rehearsal.models import MODELS, Case

SIZE = 8
STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
ROWS = 16
"""Times as many inputs as in other tests, so that activations count."""


def peak_of(case: Case, strategy: str) -> tuple[int, int]:
    """Bytes held at most in a third step, and of these the engine's peak over all steps."""
    torch.manual_seed(0)
    model = fsdp.fully_shard(case.build(), auto_wrap_policy=case.units, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    inputs = torch.cat([case.inputs()] * ROWS)
    step(model, optimizer, inputs)
    gc.collect()
    gc.disable()
    rest = held(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(model, optimizer, inputs)
    gc.enable()
    events = [(e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(accumulate(count for _, count in sorted(events, key=lambda one: one[0])))
    return rest + peak, fsdp.memory_bytes(model, peak=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).float().square().mean().backward()
    optimizer.step()
    model.zero_grad()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes between steps: what the engine keeps, buffers, optimizer state."""
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    local = [fsdp.to_local(value) for value in state]
    own = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local if one.numel()}.values())
    buffers = sum(one.numel() * one.element_size() for one in model.buffers())
    return fsdp.memory_bytes(model) + own + buffers


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    found = {(name, strategy): peak_of(case, strategy) for name, case in MODELS.items() for strategy in STRATEGIES}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
