"""A backward that fails in a program that computes on a stream of its own, with reductions in flight."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.work import Work
from fsdp.reduction.in_flight import ReductionQueue
from fsdp.runtime.passes import Passes
from tests.device.test_races import BF16, HALF, STRATEGIES, Broken, batch, fail_backward, net, reduced_part, sgd
from tests.support.accelerator.device import NAME, Scheduler
from tests.support.accelerator.world import run
from tests.support.models import ALONE, loss_of, promised

ON_TWO_STREAMS: Final = fsdp.ReductionPolicy(bucket_cap_mb=0.0002, streams=2)
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "units alone": {"reduction": ALONE},
    "in pieces": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002)},
    "on two streams": {"reduction": ON_TWO_STREAMS},
    "bf16": {"reduction": ON_TWO_STREAMS, "mp_policy": BF16},
    "bf16, reduced in bf16": {"reduction": ON_TWO_STREAMS, "mp_policy": HALF},
    "offloaded": {"reduction": ON_TWO_STREAMS, "offload_policy": fsdp.OffloadPolicy()},
    "deterministic": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002, deterministic=True)},
    "comm hook": {"reduction": ALONE},
}
"""In a small model units that share collectives have nothing in flight before the end of a backward, so here they share none."""
FEW_CASES: Final = [
    *(("NO_SHARD", option) for option in ("in pieces", "on two streams", "bf16, reduced in bf16", "deterministic", "comm hook")),
    ("FULL_SHARD", "comm hook"),
    ("HYBRID_SHARD", "comm hook"),
]
"""By default. The sums of NO_SHARD, and what the hook does, are in memory of the compute stream."""
CASES: Final = [
    (strategy, option) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD") for option in OPTIONS
]
SEEDS: Final = {Scheduler.EAGER: (0,), Scheduler.LAZY: (0,), Scheduler.RANDOM: (1, 2), Scheduler.STARVE: tuple(range(8))}
SCHEDULES: Final = [(scheduler, seed) for scheduler, seeds in SEEDS.items() for seed in seeds]
FEW_SCHEDULES: Final = [(Scheduler.LAZY, 0), (Scheduler.STARVE, 3)]
"""By default. Both leave reductions behind: LAZY runs only what the compute stream needs, and stream 3 reduces."""
SIZES: Final = range(512, 4097, 512)
"""Bytes of the blocks in which the device hands out memory, up to more than a bucket has."""
TIMES: Final = 24
"""How many blocks of each size a program takes. More than a step has released."""


class Failed:
    """A backward that failed on one rank."""

    def __init__(self) -> None:
        self.cleaned_up = threading.Event()
        self.addresses: set[int] = set()
        """Of the memory that reductions in flight used."""


@contextmanager
def cleaned_up_elsewhere() -> Iterator[dict[int, Failed]]:
    """By rank. Each failed backward is cleaned up as by autograd's thread for the device, after the program has left its stream.

    The thread that drops the backward last cleans up: that of the program, or autograd's. In the latter the default stream is
    current, and the program may go on meanwhile. Which one it is depends on chance, so here both do it like the latter.
    """
    found: dict[int, Failed] = {}
    clean_up, drain = Passes.on_backward_failed, ReductionQueue.drain

    def on_default_stream(passes: Passes) -> None:
        device = passes.engine.units[0].device
        if device.type != NAME:
            clean_up(passes)
            return
        module = torch.get_device_module(device)
        with module.stream(module.default_stream(device)):
            clean_up(passes)
        found[device.index].cleaned_up.set()

    def noted(queue: ReductionQueue, others: Sequence[Work]) -> None:
        for one in (*queue._all_reduces, *queue._reduce_scatters):
            if one.output.device.type == NAME:
                used = (one.output, *(bucket.buffer for bucket in one.buckets if bucket.buffer.untyped_storage().nbytes()))
                found[one.output.device.index].addresses.update(tensor.data_ptr() for tensor in used)
        drain(queue, others)

    with mock.patch.object(Passes, "on_backward_failed", on_default_stream), mock.patch.object(ReductionQueue, "drain", noted):
        yield found


def model_of(strategy: str, option: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = STRATEGIES[strategy][1]
    model = net(**options, **OPTIONS[option])

    def in_place(state: None, bucket: Any) -> "torch.futures.Future[Tensor]":
        bucket.buffer().mul_(0.5)
        return promised(reduced_part(bucket, options))

    if option == "comm hook":
        fsdp.register_comm_hook(model, None, in_place)
    return model, sgd(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model(batch(number))).backward()
    optimizer.step()
    optimizer.zero_grad()


def fail(model: nn.Module) -> None:
    """A backward that fails at its end. Autograd's thread may still drop its graph when this returns."""
    x = batch(1).requires_grad_()
    x.register_hook(fail_backward)
    try:
        loss_of(model(x)).backward()
    except Broken:
        return
    raise AssertionError("the backward did not fail")


class Taken(NamedTuple):
    """Memory that a rank has taken after a failed backward."""

    overwritten: int
    """How many blocks something else has written to."""
    handed_out: int
    """How many blocks a reduction in flight had used."""


def taken_after_a_failure(strategy: str, option: str, scheduler: Scheduler, seed: int) -> list[Taken]:
    """For each rank. The program allocates all that was released, writes to it, and waits for its own stream alone."""

    def program(rank: int) -> Taken:
        device, module = torch.device(NAME, rank), torch.get_device_module(NAME)
        own = module.Stream(device)
        failed[rank] = Failed()
        with torch.device(device), module.stream(own):
            model, optimizer = model_of(strategy, option)
            step(model, optimizer, 0)
            fail(model)
            assert failed[rank].cleaned_up.wait(10)
            taken = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(TIMES) for size in SIZES]
            own.synchronize()
            module.synchronize(device)
            overwritten = sum(not bool((one.cpu() == 7).all()) for one in taken)
        return Taken(overwritten, len(failed[rank].addresses & {one.data_ptr() for one in taken}))

    with cleaned_up_elsewhere() as failed:
        return run(STRATEGIES[strategy][0], program, scheduler, seed)
