"""Random plans of tensor parallelism, with every strategy, in the simulated world: gradients, norms and weights of one process.

python -m tests.building.test_random_dimensions 0 200    # these seeds
"""

import random
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.shards.shard_tensor import ShardTensor
from tests.support.everything import EVERYTHING

SEEDS = range(60 if EVERYTHING else 6)
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "HYBRID_SHARD"]
KINDS = ["none", "columns and rows", "columns", "rows", "sequence"]
WIDTH, LENGTH = 6, 4


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Plan:
    """What a seed chooses."""

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        self.seed = seed
        self.replicas, self.dp, self.tp = chosen.choice(
            [(1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 2, 2), (1, 3, 2), (2, 2, 2), (1, 2, 3)]
        )
        self.strategy = chosen.choice(STRATEGIES[:-1]) if self.replicas == 1 else "HYBRID_SHARD"
        self.kinds = [chosen.choice(KINDS) for _ in range(chosen.randint(1, 3))]
        if self.replicas == 1 and "sequence" in self.kinds and self.tp == 3:
            self.kinds = ["rows"]  # torch cuts the sequence of 4 evenly alone
        self.hidden = 6 if self.tp == 3 else chosen.choice([2, 4, 8])
        self.inner_units = chosen.random() < 0.8
        self.recomputes = chosen.random() < 0.3
        self.accumulates = chosen.random() < 0.3
        self.prefetch = chosen.randint(0, 2)

    @property
    def groups(self) -> int:
        return self.replicas * self.dp

    def make(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(*(Block(self.hidden) for _ in self.kinds), nn.Linear(WIDTH, 3))

    def wrap(self, model: nn.Sequential, mesh: DeviceMesh) -> None:
        for block, kind in zip(model, self.kinds, strict=False):
            parallel(block, kind, mesh["tp"])
        data = mesh["replica", "dp"] if self.replicas > 1 else mesh["dp"]
        options: dict[str, Any] = {"auto_wrap_policy": {Block}} if self.inner_units else {}
        fsdp.fully_shard(model, mesh=data, sharding_strategy=self.strategy, prefetch=self.prefetch, **options)

    def batch(self, step: int, group: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + group)
        return torch.randn(2, LENGTH, WIDTH, generator=generator)


def parallel(block: nn.Module, kind: str, mesh: DeviceMesh) -> None:
    if kind == "columns and rows":
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "columns":
        parallelize_module(block, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    elif kind == "rows":
        parallelize_module(block, mesh, {"down": RowwiseParallel(input_layouts=Replicate())})
    elif kind == "sequence":
        up = ColwiseParallel(input_layouts=Shard(1))
        down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        parallelize_module(block, mesh, {"norm": SequenceParallel(), "up": up, "down": down})
        parallelize_module(block, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))
        parallelize_module(block, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()))


def run(plan: Plan, model: nn.Sequential, groups: list[int], clip: Any, no_sync: Any) -> dict[str, Any]:
    """Three clipped steps; the norms, the gradients of the first, and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, Any] = {"norms": []}
    for step in range(3):
        for turn in range(passes := 2 if plan.accumulates else 1):
            with no_sync(model) if turn < passes - 1 else nullcontext():
                for group in groups:
                    x = plan.batch(step + 5 * turn, group)
                    out = checkpoint(model, x, use_reentrant=False) if plan.recomputes else model(x)
                    (out.square().mean() / len(groups)).backward()
        found["norms"].append(float(clip()))
        if not step:
            found["grads"] = {name: value(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: value(p.detach()) for name, p in model.named_parameters()}
    return found


def value(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().clone()
    return (fsdp.full_tensor(tensor) if isinstance(tensor, ShardTensor) else tensor).clone()


def check(seed: int) -> None:
    plan = Plan(seed)
    alone = plan.make()
    wanted = run(plan, alone, list(range(plan.groups)), lambda: nn.utils.clip_grad_norm_(alone.parameters(), 0.1), nullcontext)

    def program(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (plan.replicas, plan.dp, plan.tp), mesh_dim_names=("replica", "dp", "tp"))
        model = plan.make()
        plan.wrap(model, mesh)
        return run(plan, model, [dist.get_rank() // plan.tp], lambda: fsdp.clip_grad_norm_(model, 0.1), fsdp.no_sync)

    results = fsdp.simulate(plan.groups * plan.tp, program, seed=seed)
    for found in results:
        assert found["norms"] == results[0]["norms"]
        assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-6)
        for kind, most in (("grads", 1e-6), ("weights", 2e-5)):
            for name, tensor in wanted[kind].items():
                difference = float((found[kind][name] - tensor).abs().max())
                assert difference <= most * max(float(tensor.abs().max()), 1e-2), (vars(plan), kind, name, difference)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_trains_as_one_process(seed: int) -> None:
    check(seed)


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:])):
        check(number)
        print(number, vars(Plan(number)), flush=True)
