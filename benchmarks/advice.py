"""Whether the gains that `python -m fsdp trace report` expects are those that following its advice brings.

    python benchmarks/advice.py
    python benchmarks/advice.py --loads 1 --cases defaults

The model and the wire are those of overlap.py: one process plays rank 0 of 8, computing is sleeping, and a collective takes
latency + received bytes / bandwidth. The clock is virtual: sleeping moves it on and nothing else takes time, so the figures are
exact and the same on every machine. A step is traced with each set of options, every piece of advice is followed, and the step is
timed before and after.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import overlap
import simulated_link
import torch
from common import Bar, arguments, machine, print_table, write
from overlap import Block, Model
from simulated_link import Link, joined

import fsdp
from fsdp.api import trace
from fsdp.commands.reporting.advice import Advice, advise
from fsdp.commands.reporting.numbers import numbers_of
from fsdp.commands.reporting.rank_trace import read_traces
from fsdp.debug import phases
from fsdp.debug.tracing import recorder

WORLD = 8
NEAR = 0.05
CASES: dict[str, dict[str, Any]] = {
    "nothing ahead": {"prefetch": 0},
    "nothing ahead, every unit twice": {"prefetch": 0, "reshard_after_forward": True},
    "defaults": {},
    "gathered once": {"sharding_strategy": "SHARD_GRAD_OP"},
}


class VirtualClock:
    """A clock that only sleeping moves on."""

    def __init__(self) -> None:
        self.now = 1.0
        """Seconds."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def seconds(self) -> float:
        return self.now

    def nanoseconds(self) -> int:
        return round(1e9 * self.now)


@contextmanager
def virtual_time() -> Iterator[VirtualClock]:
    """Inside, the model, the wire and traces go by a virtual clock."""
    clock = VirtualClock()
    as_module = SimpleNamespace(sleep=clock.sleep, perf_counter=clock.seconds)
    with ExitStack() as stack:
        for module in (overlap, simulated_link):
            stack.enter_context(patch.object(module, "time", as_module))
        for module in (phases, recorder, trace):
            stack.enter_context(patch.object(module, "perf_counter_ns", clock.nanoseconds))
        yield clock


@dataclass(frozen=True, slots=True)
class Settings:
    load: float
    blocks: int = 8
    width: int = 16
    seconds: float = 0.002
    latency: float = 0.0002

    @property
    def bandwidth(self) -> float:
        """So that the gathers and reductions of FULL_SHARD take `load` times as long as computing."""
        moved = 3 * self.blocks * 4 * self.width**2 * 4 * (WORLD - 1) / WORLD
        return moved / (self.load * 3 * self.blocks * self.seconds)


def run(options: dict[str, Any], settings: Settings, traced: Path | None = None) -> float:
    """Milliseconds of a step with these options; `traced`: write a trace of it there."""
    with virtual_time() as clock, joined(Link(settings.bandwidth, settings.latency), WORLD):
        module = Model(settings.blocks, settings.width, settings.seconds)
        # its units stand for large ones, which share no collective
        options = {"reduction": fsdp.ReductionPolicy(coalesce_cap_mb=0), **options}
        model = fsdp.fully_shard(module, auto_wrap_policy={Block}, **options)
        x = torch.ones(2, settings.width)

        def step() -> float:
            began = clock.now
            model(x).backward()
            model.zero_grad()
            return 1e3 * (clock.now - began)

        for _ in range(3):
            step()
        if traced is None:
            return step()
        with fsdp.trace(model) as trace_of_step:
            found = step()
        traced.write_text(json.dumps(_alone(trace_of_step.document())), encoding="utf-8")
        return found


def _alone(document: dict[str, Any]) -> dict[str, Any]:
    """The trace of a job with one rank: the other ranks of a simulated link exist in name only."""
    return {**document, "fsdp": {**document["fsdp"], "world_size": 1}}


def advice_for(options: dict[str, Any], settings: Settings) -> list[Advice]:
    """The advice for a step with these options."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run(options, settings, path)
        traces = read_traces([path])
        return advise(traces, [numbers_of(one) for one in traces])


def followed(options: dict[str, Any], change: str) -> dict[str, Any]:
    """The options after a piece of advice."""
    new: dict[str, Any] = {**options, **eval(f"dict({change})", {"fsdp": fsdp})}
    if "sharding_strategy" in change:
        new.pop("reshard_after_forward", None)
    return new


def follow(case: str, settings: Settings) -> list[dict[str, Any]]:
    """Trace one set of options, follow all advice, and compare."""
    options = CASES[case]
    before = run(options, settings)
    return [
        {
            "case": case,
            "load": settings.load,
            "advice": one.change,
            "before_ms": before,
            "expected_gain_ms": one.gain / 1e3,
            "gain_ms": before - run(followed(options, one.change), settings),
        }
        for one in advice_for(options, settings)
    ]


def judge(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    return [
        Bar(
            "advice: expected gain off by, part of the step",
            NEAR,
            abs(row["expected_gain_ms"] - row["gain_ms"]) / row["before_ms"],
            f"{row['case']}, load {row['load']:g}: {row['advice']}",
        )
        for row in rows
    ]


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.1, 0.5, 1.0, 2.0], help="communication / computing")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    rows = [row for load in options.loads for case in options.cases for row in follow(case, Settings(load))]
    columns = ("case", "load", "advice", "before_ms", "expected_gain_ms", "gain_ms")
    print_table(columns, [[f"{row[one]:.2f}" if "_ms" in one else str(row[one]) for one in columns] for row in rows])
    write({"benchmark": "advice", "machine": machine(options.date), "rows": rows}, judge(rows), options.out)


if __name__ == "__main__":
    main()
