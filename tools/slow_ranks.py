"""Training on four processes over gloo that are only slow: none of them may be told of a failure, a disagreement or a deadlock.

Each sleeps at random moments, often for as long as ranks wait before they look for a reason, which is 20 ms here. See soak.py.
"""

import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from tests.building import test_experts as experts
from tests.comm.failure import dimension_programs as dimensions
from tests.support import stalls

STALL: Final = 0.02
"""Seconds that a rank waits before it looks for the reason."""
STEPS: Final = 4


class Slow:
    """The random sleeps of one rank in one program."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)

    def nap(self, *_: Any) -> None:
        if self._chance.random() < 0.3:
            time.sleep(max(0.0, self._chance.choice((0, 0, 1, 1, 2, 3)) * STALL + self._chance.uniform(-0.002, 0.002)))

    def slow_down(self, model: nn.Module) -> None:
        """Sleep in hooks of some modules, which are others on each rank."""
        for module in model.modules():
            if self._chance.random() < 0.5:
                module.register_forward_pre_hook(self.nap)
            if self._chance.random() < 0.3:
                module.register_full_backward_hook(self.nap)

    def train(self, model: nn.Module, loss_of: Callable[[int], Tensor], steps: int = STEPS) -> torch.optim.Optimizer:
        self.slow_down(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            loss = loss_of(step)
            self.nap()
            loss.backward()
            self.nap()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def wrap_and_train(self, mesh: Any = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fsdp.fully_shard(dimensions.plain(), mesh=mesh, auto_wrap_policy={nn.Sequential}, **options)
        return model, self.train(model, lambda step: model(dimensions.batch(step, dist.get_rank())).square().mean())


def save_and_load(slow: Slow, folder: Path) -> None:
    model, optimizer = slow.wrap_and_train()
    fsdp.clip_grad_norm_(model, 1.0)
    fsdp.save(folder, model, optimizer)
    slow.nap()
    fsdp.load(folder, model, optimizer)
    slow.nap()
    fsdp.full_state_dict(model)


def use_replicas(slow: Slow, _: Path) -> None:
    slow.wrap_and_train(dimensions.make_mesh(), sharding_strategy="HYBRID_SHARD")


def use_tensor_parallelism(slow: Slow, _: Path) -> None:
    mesh = dimensions.make_mesh()
    model = dimensions.distribute(mesh)
    slow.train(model, lambda step: model(dimensions.batch(step, mesh["dp"].get_local_rank())).square().mean())


def use_experts(slow: Slow, _: Path) -> None:
    model, mesh = experts.prepared()
    experts.wrap(model, mesh, sharding_strategy="SHARD_GRAD_OP")
    slow.train(model, lambda step: model(experts.batch(step, dist.get_rank())).square().mean(), steps=3)


def use_pipeline(slow: Slow, _: Path) -> None:
    stage = dimensions.make_stage()
    slow.slow_down(stage.module)
    schedule = stage.make_schedule()
    for step in range(3):
        stage.run(schedule, dimensions.batch(step, stage.mesh["dp"].get_local_rank(), rows=8))
        slow.nap()
        fsdp.clip_grad_norm_(stage.module, 1.0, pp_mesh=stage.mesh["pp"])
        stage.module.zero_grad()


def skip_blocks(slow: Slow, _: Path) -> None:
    model: Any = fsdp.fully_shard(dimensions.plain(), auto_wrap_policy={nn.Sequential}, uneven_paths=True)

    def loss_of(step: int) -> Tensor:
        taken = random.Random(f"{step}/{dist.get_rank()}").sample(range(len(model)), 2)
        x = dimensions.batch(step, dist.get_rank())
        for index in sorted(taken):
            x = model[index](x)
        return model(x).square().mean()  # type: ignore[no-any-return]

    slow.train(model, loss_of)
    fsdp.meet(model)


PROGRAMS: Final = (save_and_load, use_replicas, use_tensor_parallelism, use_experts, use_pipeline, skip_blocks)


def play(number: int, size: int, rank: int, folder: Path) -> None:
    """Play one program, which is the same on every rank. The process groups of the program before it end first."""
    stalls._SECONDS = STALL  # type: ignore[misc]
    stalls.look_soon()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        dimensions._made.clear()
    store = dist.FileStore(str(folder / f"store {number}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    dimensions._made.append(dimensions.make_mesh())
    program = random.Random(number).choice(PROGRAMS)
    program(Slow(f"{number}/{rank}"), folder / f"{number}")
