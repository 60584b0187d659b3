"""One rank of four over gloo: a pipeline of two stages, each sharded over two ranks; what it launched, and its peaks."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import fsdp
from fsdp.commands.planning.shapes import Block, Decoder, cut_decoder
from fsdp.runtime.registry import engines_in
from tests.commands.rehearsal.allocator_program import allocated
from tests.commands.rehearsal.parallel_models import SMALL
from tests.support.processes import be_a_rank

MICRO_BATCHES, ROWS, LENGTH, STEPS = 4, 16, 24, 6
STRATEGIES = ("SHARD_GRADIENTS", "FULL_SHARD")


class Run(NamedTuple):
    """What a rank has counted."""

    peak: int
    """Bytes that torch's allocator had given out at most in a step: in the step in which it was the least, because how long a
    tensor that was sent stays alive differs from step to step."""
    engine_peak: int
    collectives: list[tuple[str, str, int]]
    """Of that step, in order."""


class Log:
    """Notes what a communicator launches."""

    def __init__(self, found: list[tuple[str, str, int]]) -> None:
        self._found = found

    def __call__(self, kind: str, label: str, received: int, call: Callable[[], Any]) -> Any:
        if kind != "gather_objects":
            self._found.append((kind, label, received))
        return call()


def train(strategy: str) -> Run:
    found: list[tuple[str, str, int]] = []

    def steps() -> Iterator[int]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        place = mesh["pp"].get_local_rank()
        module = cut_decoder(Decoder(SMALL), place, 2)
        fsdp.fully_shard(module, mesh=mesh["dp"], auto_wrap_policy={Block}, sharding_strategy=strategy)
        stage = fsdp.PipelineStage(module, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda output, target: output)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        (engine,) = engines_in(module, "test")
        for comm in engine.comms.each().values():
            comm.recorder = Log(found)
        for _ in range(STEPS):
            tokens = torch.zeros(MICRO_BATCHES * ROWS, LENGTH, dtype=torch.long)
            found.clear()
            given: dict[str, Any] = {"target": tokens, "losses": []} if place else {}
            schedule.step(*(() if place else (tokens,)), return_outputs=False, **given)
            del given
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            yield fsdp.memory_bytes(module, peak=True)

    (_, *held), engine_peak = allocated(steps)
    return Run(min(one.most for one in held), engine_peak, found)


def run(rank: int, size: int, folder: Path) -> Any:
    return {strategy: tuple(train(strategy)) for strategy in STRATEGIES}


if __name__ == "__main__":
    be_a_rank(run)
