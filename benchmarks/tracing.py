"""What a trace costs the host while it runs, and that it costs nothing before and after.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --tensors 1 --repeats 100

The units are those of host.py. One process plays rank 0 of 8 over a group that sends nothing, and then two processes train over
gloo, where a trace also asks collectives whether they have ended. Steps with a trace and without take turns. What counts is the
processor time of the thread that drives a step, forward and backward: minima, because noise only adds, and medians beside them.
Entering and leaving `fsdp.trace` is not part of a step.

Dispatched operations are counted of a model that was traced before, and of one that never was.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import Bar, Sample, alone, arguments, begin, elsewhere, no_garbage_collection, over_gloo, print_table, write
from counting import dispatched
from host import Unit
from torch import nn

import fsdp

WAYS = ("plain", "traced", "after")
"""Without a trace on a model that never had one; with one; and without on the model that had one."""


@dataclass(frozen=True, slots=True)
class Settings:
    tensors: int
    units: int
    width: int
    repeats: int
    steps: int


class Runner:
    """A model, and its step."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        units = nn.Sequential(*(Unit(settings.tensors, settings.width) for _ in range(settings.units)))
        self.model = fsdp.fully_shard(units, auto_wrap_policy={Unit})
        self.x = torch.ones(2, settings.width)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        self.model(self.x).sum().backward()
        self.model.zero_grad()


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of single steps, by way; and dispatched operations of one step, by way."""
    gc.freeze()  # what exists by now is not looked through again
    never, sometimes = Runner(settings), Runner(settings)
    runners = {"plain": never, "traced": sometimes, "after": sometimes}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(settings.repeats):
        with no_garbage_collection():
            for way in WAYS:
                time_steps(runners[way], way == "traced", settings.steps, seconds[way])
    operations: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    for way in WAYS:
        with fsdp.trace(runners[way].model) if way == "traced" else nullcontext(), dispatched(operations[way]):
            runners[way].step()
    return {"seconds": seconds, "operations": {way: dict(found) for way, found in operations.items()}}


def time_steps(runner: Runner, traced: bool, steps: int, into: list[float]) -> None:
    with fsdp.trace(runner.model) if traced else nullcontext():
        for _ in range(steps):
            began = time.thread_time()
            runner.step()
            into.append(time.thread_time() - began)


def over_nothing(settings: Settings) -> dict[str, Any]:
    with alone(8):
        return measure(settings)


def of_rank(rank: int, settings: Settings) -> dict[str, Any]:
    return measure(settings)


def judge(name: str, case: dict[str, Any]) -> list[Bar]:
    found = {way: Sample.of(case["seconds"][way]) for way in WAYS}
    plain = found["plain"].least
    alike = case["operations"]["plain"] == case["operations"]["traced"] == case["operations"]["after"]
    return [
        Bar("tracing: host time added by a trace, of minima", 0.05, found["traced"].least / plain - 1, name),
        Bar("tracing: dispatched operations that differ", 0, 0 if alike else 1, name),
    ]


def show(cases: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, case in cases.items():
        found = {way: Sample.of(case["seconds"][way]) for way in WAYS}
        for way in WAYS:
            added = [getattr(found[way], kind) / getattr(found["plain"], kind) - 1 for kind in ("least", "median")]
            operations = str(sum(case["operations"][way].values()))
            rows.append([f"{name}, {way}", f"{1e3 * found[way].least:.2f}", *(f"{one:+.1%}" for one in added), operations])
    print_table(["case", "ms, least", "added, minima", "added, medians", "operations"], rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=12, help="parameters of a unit")
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5, help="in one trace")
    options = parser.parse_args()
    report, _ = begin("tracing", options, ["ours"])
    settings = Settings(options.tensors, options.units, options.width, options.repeats, options.steps)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "nothing is sent": lambda: elsewhere(over_nothing, settings, options.timeout),
        "gloo, 2 ranks": lambda: over_gloo(of_rank, settings, 2, options.timeout),
    }
    cases = {name: run() for name, run in ways.items()}
    show(cases)
    bars = [bar for name, case in cases.items() for bar in judge(name, case)]
    write({**report, "settings": asdict(settings), "cases": cases}, bars, options.out)


if __name__ == "__main__":
    main()
