"""Wrapping, the first step and a steady step, against the number of units and of ranks: does the cost of a unit stay what it is?

    python benchmarks/scale.py                                     # a few minutes
    python benchmarks/scale.py --units 10 100 --world 8 --contenders ours

Each case runs in a process of its own that plays rank 0 of W over a group that sends nothing and copies nothing, whatever W
is (simulated_link.py without a delay). A unit is a small linear layer, so that what is counted is the work of the host:
processor seconds, the least of a few steps, and exactly how many operations are dispatched. What can grow with W: a unit's
flat buffer has at least 16 bytes for every rank, and on the CPU a reduction adds what W ranks sent in log2(W) operations,
which the backend does on CUDA (`ours_over_nccl`).
"""

import argparse
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import be_quiet, choose, draw, exact_bar, machine, print_exact_bars, print_markdown, warn_if_busy, write
from host import Counting
from memory import OVER_NCCL, backend_reduces, contender_of
from simulated_link import Link, joined
from torch import Tensor, nn

NAMES = ("bare", "fsdp2", "ours", OVER_NCCL)
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
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    be_quiet()
    with joined(Link(math.inf, 0.0), settings.world), backend_reduces() if settings.contender == OVER_NCCL else nullcontext():
        return _measure(settings)


def _measure(settings: Settings) -> dict[str, Any]:
    torch.manual_seed(0)
    _train(contender_of(settings.contender).wrap(_model(2), Unit))  # what is lazy in torch itself
    module = _model(settings.units)
    gc.collect()
    gc.freeze()
    gc.disable()
    held: list[nn.Module] = []
    wrap = _seconds(lambda: held.append(contender_of(settings.contender).wrap(module, Unit)))
    model = held[0]
    first = _seconds(lambda: _train(model))
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


def measure_elsewhere(settings: Settings, timeout: float) -> dict[str, Any]:
    """`measure` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        try:
            return process.apply_async(measure, (settings,)).get(timeout)
        except multiprocessing.TimeoutError:
            raise SystemExit(f"{settings} did not finish within {timeout:.0f} s and was ended") from None


def cases_of(options: argparse.Namespace, names: Sequence[str]) -> list[Settings]:
    """Units at the first number of ranks, ranks at `--units-of-worlds`, and the case of the bar."""
    pairs = [(units, options.world[0]) for units in options.units]
    pairs += [(options.units_of_worlds, world) for world in options.world]
    if max(options.units) >= JUDGED[0]:
        pairs.append(JUDGED)
    return [Settings(name, units, world, options.repeats) for units, world in dict.fromkeys(pairs) for name in names]


def judge(cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Growth over units is measured between the last two numbers of them: what is fixed weighs on few units."""
    by = {(one["settings"]["contender"], one["settings"]["units"], one["settings"]["world"]): one for one in cases}
    bars = []
    if ("ours", *JUDGED) in by:
        bars.append(exact_bar("wrapping 1,000 units on 1,024 ranks, seconds", by["ours", *JUDGED]["wrap_seconds"], 5.0))
    units, worlds, of_worlds = sorted(options.units), sorted(options.world), options.units_of_worlds
    for name in ("ours", OVER_NCCL):
        if len(units) > 1:
            few, many = (by.get((name, number, options.world[0])) for number in units[-2:])
            bars += _growth(f"{name}, {units[-1]} units / {units[-2]}", few, many)
        if len(worlds) > 1:
            few, many = (by.get((name, of_worlds, world)) for world in (worlds[0], worlds[-1]))
            bars += _growth(f"{name}, {worlds[-1]} ranks / {worlds[0]}", few, many)
    return bars


def _growth(name: str, few: dict[str, Any] | None, many: dict[str, Any] | None) -> list[dict[str, Any]]:
    if few is None or many is None:
        return []
    costs = {"wrap": _wrap, "steady step": _steady, "dispatched": _dispatched}
    return [exact_bar(f"{what} per unit: {name}", cost(many) / cost(few), 1.25) for what, cost in costs.items()]


def _wrap(case: dict[str, Any]) -> float:
    return float(case["wrap_seconds"] / case["settings"]["units"])


def _steady(case: dict[str, Any]) -> float:
    return float(min(case["steady_step_seconds"]) / case["settings"]["units"])


def _dispatched(case: dict[str, Any]) -> float:
    return float(case["dispatched"] / case["settings"]["units"])


def show(cases: Sequence[dict[str, Any]]) -> None:
    rows = []
    for case in cases:
        of = case["settings"]
        first = case["first_step_seconds"] / of["units"]
        times = [f"{1e6 * seconds:.0f}" for seconds in (_wrap(case), first, _steady(case))]
        rows.append([of["contender"], str(of["units"]), str(of["world"]), *times, f"{_dispatched(case):.1f}"])
    print("\nper unit, processor µs")
    print_markdown(["contender", "units", "ranks", "wrap", "first step", "steady step", "dispatched"], rows)


def picture(cases: Sequence[dict[str, Any]], world: int, path: Path) -> None:
    def plot(axes: Any) -> None:
        for name in dict.fromkeys(case["settings"]["contender"] for case in cases):
            mine = [c for c in cases if c["settings"]["contender"] == name and c["settings"]["world"] == world]
            units = [case["settings"]["units"] for case in mine]
            axes.plot(units, [1e6 * _steady(case) for case in mine], marker="o", label=f"{name}, steady step")
            if name != "bare":
                axes.plot(units, [1e6 * _wrap(case) for case in mine], marker="s", linestyle="--", label=f"{name}, wrap")
        axes.set(
            xscale="log", xlabel="units", ylabel="processor µs a unit", ylim=(0, None), title=f"Cost of a unit, {world} ranks"
        )
        axes.legend()

    draw(plot, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"from {', '.join(NAMES)}; all by default")
    parser.add_argument("--units", type=int, nargs="+", default=[10, 50, 200, 1000, 2000])
    parser.add_argument("--world", type=int, nargs="+", default=[64, 2, 8, 512, 4096], help="the first is that of --units")
    parser.add_argument("--units-of-worlds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is ended")
    parser.add_argument("--date", help="written into the results; today by default")
    parser.add_argument("--out", type=Path, help="where the JSON goes; benchmarks/results/ by default")
    options = parser.parse_args()
    names, skipped = choose(options.contenders, NAMES)
    report: dict[str, Any] = {
        "benchmark": "scale",
        "machine": machine(options.date),
        "options": {name: contender_of(name).options for name in names},
        "skipped": skipped,
    }
    warn_if_busy(report["machine"])
    cases = report["cases"] = [measure_elsewhere(one, options.timeout) for one in cases_of(options, names)]
    bars = report["bars"] = judge(cases, options) if "ours" in names else []
    path = write(report, options.out)
    show(cases)
    print_exact_bars(bars)
    picture(cases, options.world[0], path.with_suffix(".png"))
    print(f"\nraw numbers: {path}")


if __name__ == "__main__":
    main()
