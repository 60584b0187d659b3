"""Wrapping, the first step and a steady step, against the number of units and of ranks: does the cost of a unit stay what it is?

    python benchmarks/scale.py                                     # a few minutes
    python benchmarks/scale.py --units 10 100 --world 8 --contenders ours

Each case runs in a process of its own that plays rank 0 of W over a group that sends nothing and copies nothing, whatever W
is (simulated_link.py without a delay). A unit is a small linear layer, so that what is counted is the work of the host:
processor seconds, medians of a few models and steps, and exactly how many operations are dispatched. What can grow with W: a
unit's flat buffer has at least 16 bytes for every rank, and on the CPU a reduction adds what W ranks sent in log2(W) operations,
which the backend does on CUDA (`ours_over_nccl`).
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from common import Bar, arguments, begin, elsewhere, markdown, write
from counting import Counting
from host import silent
from memory import ENGINES, OVER_NCCL, backend_reduces
from torch import Tensor, nn

NAMES = ("bare", "fsdp1", "fsdp2", "ours", OVER_NCCL)
WIDTH = 16
JUDGED = (1000, 1024)
"""Units and ranks of the bar for wrapping."""


class Unit(nn.Linear):
    """What is sharded by itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    contender: str
    units: int
    world: int
    repeats: int


def measure(settings: Settings) -> dict[str, Any]:
    """One case. The process group is set up here."""
    with silent(settings.world), backend_reduces() if settings.contender == OVER_NCCL else nullcontext():
        return _measure(settings)


def _measure(settings: Settings) -> dict[str, Any]:
    engine = ENGINES[settings.contender]
    _train(engine.wrap(_model(2), Unit))  # what is lazy in torch itself
    wrap, first = [], []
    for _ in range(settings.repeats):
        module, held = _model(settings.units), list[nn.Module]()
        gc.collect()
        gc.freeze()
        gc.disable()
        wrap.append(_seconds(lambda module=module, held=held: held.append(engine.wrap(module, Unit))))  # type: ignore[misc]
        model = held[0]
        first.append(_seconds(lambda model=model: _train(model)))  # type: ignore[misc]
        gc.enable()
    gc.disable()
    _train(model)
    steady = [_seconds(lambda: _train(model)) for _ in range(settings.repeats)]
    with Counting() as counting:
        _train(model)
    gc.enable()
    return {
        "settings": asdict(settings),
        "wrap_seconds": wrap,
        "first_step_seconds": first,
        "steady_step_seconds": steady,
        "dispatched": counting.operations.total(),
    }


def _model(units: int) -> nn.Module:
    return nn.Sequential(*(Unit(WIDTH, WIDTH) for _ in range(units)))


def _train(model: nn.Module) -> None:
    loss: Tensor = model(torch.ones(2, WIDTH)).sum()
    loss.backward()
    model.zero_grad()


def _seconds(work: Callable[[], Any]) -> float:
    """Of the processor, all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cases_of(options: argparse.Namespace, names: Sequence[str]) -> list[Settings]:
    """Units at the first number of ranks, ranks at `--units-of-worlds`, and the case of the bar."""
    pairs = [(units, options.world[0]) for units in options.units]
    pairs += [(options.units_of_worlds, world) for world in options.world]
    if max(options.units) >= JUDGED[0]:
        pairs.append(JUDGED)
    return [Settings(name, units, world, options.repeats) for units, world in dict.fromkeys(pairs) for name in names]


def judge(cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Bar]:
    """Growth over units is measured between the last two numbers of them: what is fixed weighs on few units."""
    by = {(one["settings"]["contender"], one["settings"]["units"], one["settings"]["world"]): one for one in cases}
    bars = []
    if ("ours", *JUDGED) in by:
        bars.append(Bar("scale: wrapping 1,000 units on 1,024 ranks, s", 5.0, median(by["ours", *JUDGED]["wrap_seconds"])))
    units, worlds, of_worlds = sorted(options.units), sorted(options.world), options.units_of_worlds
    for name in ("ours", OVER_NCCL):
        if len(units) > 1:
            few, many = (by.get((name, number, options.world[0])) for number in units[-2:])
            bars += _growth(f"{name}, {units[-1]} units / {units[-2]}", few, many)
        if len(worlds) > 1:
            few, many = (by.get((name, of_worlds, world)) for world in (worlds[0], worlds[-1]))
            bars += _growth(f"{name}, {worlds[-1]} ranks / {worlds[0]}", few, many)
    return bars


def _growth(name: str, few: dict[str, Any] | None, many: dict[str, Any] | None) -> list[Bar]:
    if few is None or many is None:
        return []
    before, after = costs_of(few), costs_of(many)
    judged = ("wrap", "steady step", "dispatched")
    return [Bar(f"scale: growth of a unit's {what}", 1.25, after[what] / before[what], name) for what in judged]


def costs_of(case: dict[str, Any]) -> dict[str, float]:
    """For each unit, processor seconds and the number of dispatched operations."""
    units = case["settings"]["units"]
    seconds = {what: median(case[f"{what.replace(' ', '_')}_seconds"]) for what in ("wrap", "first step", "steady step")}
    return {what: float(one / units) for what, one in {**seconds, "dispatched": case["dispatched"]}.items()}


def show(cases: Sequence[dict[str, Any]]) -> None:
    rows = []
    for case in cases:
        of, (*seconds, dispatched) = case["settings"], costs_of(case).values()
        times = [f"{1e6 * one:.0f}" for one in seconds]
        rows.append([of["contender"], str(of["units"]), str(of["world"]), *times, f"{dispatched:.1f}"])
    print("\nper unit, processor µs")
    print(markdown(["contender", "units", "ranks", "wrap", "first step", "steady step", "dispatched"], rows))


def main() -> None:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--units", type=int, nargs="+", default=[10, 50, 200, 1000, 2000])
    parser.add_argument("--world", type=int, nargs="+", default=[64, 2, 8, 512, 4096], help="the first is that of --units")
    parser.add_argument("--units-of-worlds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5, help="models that are wrapped, and steady steps of the last")
    options = parser.parse_args()
    report, names = begin("scale", options, NAMES, ENGINES)
    cases = [elsewhere(measure, one, options.timeout) for one in cases_of(options, names)]
    show(cases)
    write({**report, "cases": cases}, judge(cases, options) if "ours" in names else [], options.out)


if __name__ == "__main__":
    main()
