"""One rank over "pretend_nccl", in a process of its own: python -m tests.support.accelerator.nccl_rank RANK SIZE FOLDER STORY.

It saves what the story returns as FOLDER/RANK.pt. See tests/device/test_pretend_nccl.py.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import fsdp
from fsdp.commands.selftest.failures import on_one_rank
from fsdp.commands.selftest.training import Place
from tests.support.accelerator.device import NAME, Scheduler, host_waits
from tests.support.accelerator.pretend_nccl import start
from tests.support.models import Block, Net, loss_of

STRATEGIES: Final[dict[str, dict[str, Any]]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 1)},
    "offload": {"offload_policy": fsdp.OffloadPolicy()},
    "bf16": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "deterministic": {"reduction": fsdp.ReductionPolicy(deterministic=True)},
    "deterministic, NO_SHARD": {"sharding_strategy": "NO_SHARD", "reduction": fsdp.ReductionPolicy(deterministic=True)},
}
TRACED: Final = "SHARD_GRAD_OP"
"""Its steps on the device are recorded."""
STEPS: Final = 3


class Broken(Exception):
    pass


def _break(gradient: Tensor) -> None:
    raise Broken("no")


def made(device: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = fsdp.fully_shard(Net(3).to(device), auto_wrap_policy={Block}, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rank: int, number: int, device: str) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank)).to(device)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    fsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trained(rank: int, device: str) -> dict[str, Tensor]:
    """The weights of a training run under every strategy."""
    found = {}
    for name, options in STRATEGIES.items():
        on_host = device == "cpu" and name == "offload"
        model, optimizer = made(device, **({} if on_host else options))
        with fsdp.trace(model) if name == TRACED and device != "cpu" else nullcontext():
            for number in range(STEPS):
                step(model, optimizer, batch(rank, number, device))
        state = fsdp.full_state_dict(model, rank0_only=False)
        found |= {f"{name} {key}": value.cpu().clone() for key, value in state.items()}
    return found


def waits(rank: int, device: str) -> int:
    """How often the host waits in a step, after those in which the order of the units is learned."""
    model, optimizer = made(device)
    for number in range(STEPS):
        step(model, optimizer, batch(rank, number, device))
    x = batch(rank, STEPS, device)
    before = host_waits(rank)
    step(model, optimizer, x)
    return host_waits(rank) - before


def _failure(train: Callable[[int], None]) -> dict[str, Any]:
    """The error that ends a training, how long its last step took, and the error of another step after it."""
    began = time.monotonic()
    try:
        for number in range(100):
            began = time.monotonic()
            train(number)
    except fsdp.WorldError as error:
        found: dict[str, Any] = {"error": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - began}
        try:
            train(100)
        except fsdp.WorldError as again:
            return {**found, "again": str(again)}
    raise AssertionError("training went on")


def a_peer_that_raises(rank: int, device: str) -> dict[str, Any]:
    """Rank 1 fails in the middle of its fourth backward, and begins another step.

    The others have launched more than it, and their hosts wait for that.
    """
    model, optimizer = made(device)

    def train(number: int) -> None:
        hook = None
        if number == 3 and rank == 1:
            hook = model.blocks[1].register_forward_hook(lambda module, args, output: (output.register_hook(_break), None)[1])
        step(model, optimizer, batch(rank, number, device))
        assert hook is None
        torch.get_device_module(NAME).synchronize()

    try:
        return _failure(train)
    except Broken:
        with suppress(fsdp.WorldError, RuntimeError):  # rank 0 holds the store, and may have ended
            step(model, optimizer, batch(rank, 4, device))
        return {}


def a_peer_that_is_killed(rank: int, device: str) -> dict[str, Any]:
    model, optimizer = made(device)

    def train(number: int) -> None:
        if number == 3 and rank == 1:
            os._exit(9)  # as if killed: it says nothing
        step(model, optimizer, batch(rank, number, device))
        torch.get_device_module(NAME).synchronize()

    return _failure(train)


def an_abort(rank: int, device: str) -> dict[str, Any]:
    """A host that waits for a collective which its peer does not launch is freed by another thread, and later launches raise."""
    group: Any = dist.group.WORLD
    store = c10d._get_default_store()
    if rank == 1:
        store.set("started", "")  # rank 0 holds the store, and must not end before this
        return {}
    total = torch.ones(4, device=device)
    work = group.allreduce([total])
    timer = threading.Timer(0.3, group.abort)
    timer.start()
    began = time.monotonic()
    work.wait()
    torch.get_device_module(NAME).synchronize()
    after, refused = time.monotonic() - began, ""
    try:
        group.allreduce([total])
    except RuntimeError as failure:
        refused = str(failure)
    store.wait(["started"])
    return {"seconds": after, "refused": refused, "values": total.tolist()}


def a_mismatch(rank: int, device: str) -> None:
    """Two ranks launch all-reduces of different sizes, and their hosts wait for the results."""
    total = torch.ones(4 + rank, device=device)
    group: Any = dist.group.WORLD
    group.allreduce([total]).wait()
    print(total.tolist(), flush=True)  # never


def selftest(rank: int, device: str) -> str | None:
    """The check of `python -m fsdp selftest` in which one rank fails."""
    said = on_one_rank(Place(rank, 2, torch.device(device), Path()))
    store = c10d._get_default_store()
    store.set(f"selftest of {rank}", "")
    store.wait(["selftest of 0", "selftest of 1"])  # rank 0 holds the store, and rank 1 must be heard until then
    return said


STORIES: Final[dict[str, tuple[Callable[[int, str], Any], float]]] = {
    "trained": (trained, 60.0),
    "waits": (waits, 60.0),
    "a peer that raises": (a_peer_that_raises, 60.0),
    "a peer that is killed": (a_peer_that_is_killed, 60.0),
    "selftest": (selftest, 60.0),
    "an abort": (an_abort, 60.0),
    "a mismatch": (a_mismatch, 3.0),
}
"""Each story, and the time-out of the process group in seconds."""


def main(rank: int, size: int, folder: Path, name: str, scheduler: str) -> None:
    torch.set_num_threads(1)
    story, seconds = STORIES[name]
    start(rank, size, folder, timedelta(seconds=seconds), Scheduler[scheduler], rank)
    torch.save(story(rank, f"{NAME}:{rank}"), folder / f"{rank}.pt")
    os._exit(0)  # the threads of the device are not asked


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
