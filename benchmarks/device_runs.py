"""The runs of gpu.py on a device: contenders train in turn, or each alone. They run on a CPU too, as a test.

Rule 1: only a contender may wait for the device between two readings of the clock.
Rule 2: only `measure` and `measure_memory` set up a process group, and each needs a process of its own.
"""

import copy
import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import host
import torch
import torch.distributed as dist
from common import alone, be_steady, group, no_garbage_collection
from engines import contenders, turns
from llama import Block, Llama, Sizes, batch_of
from step import BATCHES, COMPARED
from torch import Tensor, nn

FIXED_STEPS = 5
HOST_WIDTH = 64

R = TypeVar("R", bound="Runner | HostRunner")


@dataclass(frozen=True, slots=True)
class Settings:
    """One number of ranks."""

    contenders: tuple[str, ...]
    world: int
    sizes: Sizes
    steps: int
    repeats: int
    varying: int
    host_units: int
    kind: str
    """Of the device: "cuda", or "cpu" to see that all runs."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, 0)

    @property
    def backend(self) -> str:
        return "fake" if self.world > 1 else "gloo" if self.kind == "cpu" else "nccl"

    @property
    def label(self) -> str:
        return f"{self.world} ranks, {self.backend}" if self.world > 1 else f"1 rank, {self.backend}"


@contextmanager
def group_of(settings: Settings) -> Iterator[None]:
    """This process is rank 0."""
    if settings.kind == "cuda":
        torch.cuda.set_device(settings.device)
    if settings.backend == "fake":
        with alone(settings.world):
            yield
        return
    be_steady()
    with group(settings.backend, dist.HashStore(), 0, 1):
        yield


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """The time of the device, by events on the stream that computes; on a CPU the host's."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"

    def mark(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:
        """Between two marks. Waits for the later one."""
        if not self._has_events:
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


class Runner:
    """One contender: its model, its optimizer, and its first losses."""

    def __init__(self, name: str, settings: Settings) -> None:
        torch.manual_seed(0)  # every contender makes the same weights
        with settings.device:
            module = Llama(settings.sizes)
        self.model = contenders(settings.kind)[name].wrap(module, Block, half=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.communicates = settings.backend != "fake"
        generator = torch.Generator().manual_seed(1)
        self.batches = [batch_of(settings.sizes, settings.sizes.sequence, generator, settings.device) for _ in range(BATCHES)]
        self.device = settings.device
        self.turns = 0
        self.losses: list[Tensor] = []

    def step(self, batch: Sequence[Tensor]) -> None:
        loss = self.model(*batch)
        loss.backward()
        if not self.communicates:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_zero_([getattr(gradient, "_local_tensor", gradient) for gradient in gradients])
        elif len(self.losses) < COMPARED:
            self.losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def next_step(self) -> None:
        self.step(self.batches[self.turns % BATCHES])
        self.turns += 1

    def warm_up(self) -> None:
        for _ in range(3):
            self.next_step()

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of one step on the device, and until the host had launched it."""
        with no_garbage_collection():
            clock = Clock(self.device)
            synchronize(self.device)
            self.next_step()
            begun, launching = clock.mark(), time.perf_counter()
            for _ in range(steps):
                self.next_step()
            launched, ended = time.perf_counter(), clock.mark()
            seconds = clock.seconds(begun, ended)
        return seconds / steps, (launched - launching) / steps


class HostRunner(host.Runner):
    """The same as in host.py, on the device."""

    def __init__(self, name: str, settings: Settings) -> None:
        units = [host.Unit(host.JUDGED_TENSORS, HOST_WIDTH) for _ in range(settings.host_units)]
        self.module = nn.Sequential(*units).to(settings.device)
        self.engine = contenders(settings.kind)[name]
        self.model = self.wrap(copy.deepcopy(self.module))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.x = torch.ones(2, HOST_WIDTH, device=settings.device)

    def time(self, into: dict[str, list[float]]) -> None:
        for phase, run in self.phases():
            synchronize(self.x.device)
            host._time(run, into, phase)


@contextmanager
def excused(name: str, failed: dict[str, str]) -> Iterator[None]:
    """Whoever fails ends the program, but fairscale, whose last release is years older than this torch: that is written down."""
    try:
        yield
    except Exception as failure:
        if name != "fairscale":
            raise
        failed[name] = f"{type(failure).__name__}: {failure}"


def ready(make: Callable[[str, Settings], R], settings: Settings) -> tuple[dict[str, R], dict[str, str]]:
    """A warm runner for each contender; and why there is none."""
    runners: dict[str, R] = {}
    failed: dict[str, str] = {}
    for name in settings.contenders:
        with excused(name, failed):
            runner = make(name, settings)
            runner.warm_up()
            synchronize(settings.device)
            runners[name] = runner
    return runners, failed


def measure(settings: Settings) -> dict[str, Any]:
    """Times, and losses where there is a group. It is set up here, so call this once per process."""
    with group_of(settings):
        launching, not_launching = measure_host(settings)
        gc.collect()
        stepping, failed = measure_steps(settings)
    for name, one in stepping.items():
        one["host_seconds_of_all_units"] = launching.get(name, {})
    return {"contenders": stepping, "failed": {**not_launching, **failed}}


def measure_host(settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    runners, failed = ready(HostRunner, settings)
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runners}
    for _, name in turns(tuple(runners), settings.repeats):
        with no_garbage_collection():
            for _ in range(settings.steps):
                runners[name].time(into=seconds[name])
    return {name: dict(phases) for name, phases in seconds.items()}, failed


def measure_steps(settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    runners, failed = ready(Runner, settings)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for _, name in turns(tuple(runners), settings.repeats):
        times[name].append(runners[name].run(settings.steps))
    report = {}
    for name, runner in runners.items():
        on_device, on_host = zip(*times[name], strict=True)
        losses = [loss.item() for loss in runner.losses]
        report[name] = {"seconds_per_step": on_device, "launching_seconds_per_step": on_host, "losses": losses}
    return report, failed


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Bytes of the only contender. Its process must have had no other."""
    (name,) = settings.contenders
    report: dict[str, Any] = {"fixed": None, "varying": None}
    failed: dict[str, str] = {}
    with group_of(settings), excused(name, failed):
        runner = Runner(name, settings)
        settle(settings.device)
        for _ in range(FIXED_STEPS):
            runner.next_step()
        report["fixed"] = held(settings.device)
        settle(settings.device)
        generator = torch.Generator().manual_seed(2)
        for length in lengths(settings.sizes.sequence, settings.varying):
            runner.step(batch_of(settings.sizes, length, generator, settings.device))
        report["varying"] = held(settings.device) if settings.varying else None
    return {**report, "failed": failed.get(name)}


def lengths(longest: int, count: int) -> list[int]:
    """Of sequences, from a quarter of the longest on; the same for every contender."""
    apart = max(1, longest // 16)
    return random.Random(0).choices(range(longest, max(0, longest // 4 - 1), -apart), k=count)


def settle(device: torch.device) -> None:
    """Give back what nobody uses, and let peaks begin here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def held(device: torch.device) -> dict[str, float] | None:
    """What the allocator has given out and what it has taken; on a CPU it does not say."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    statistics = torch.cuda.memory_stats(device)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {
        "peak_allocated": allocated,
        "peak_reserved": reserved,
        "reserved_to_allocated": reserved / allocated,
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "inactive_split": statistics["inactive_split_bytes.all.current"],
        "peak_inactive_split": statistics["inactive_split_bytes.all.peak"],
        "allocation_retries": statistics["num_alloc_retries"],
    }
