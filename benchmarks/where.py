"""Where the host's time of a training step goes: the profiles of the contenders of host.py, by file and by function.

    python benchmarks/where.py
    python benchmarks/where.py --contenders ours --tensors 1 --top 20

A second profile, of units with `--more` tensors, shows where the time of one more tensor goes.

cProfile makes every call of a Python function dearer, by about as much for everybody, so shares say more than times and the
table is no measurement of speed: host.py is. Time in C++ that was called from Python (operators, autograd, the group) is a
function of its own.
"""

import cProfile
import pstats
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import alone, arguments, begin, elsewhere, markdown, write
from host import NAMES, PHASES, Runner, Settings

import fsdp
import state_machine

DEFAULT = ("bare", "fsdp2", "ours")
STEPS = 20


def measure(settings: Settings) -> dict[str, Any]:
    """By contender and phase: own microseconds per unit and step, and calls, of every function. Once per process."""
    with alone(settings.world):
        return {name: _profile(name, settings) for name in settings.contenders}


def _profile(name: str, settings: Settings) -> dict[str, Any]:
    runner = Runner(name, settings.units, settings)
    runner.warm_up()
    profiles: dict[str, list[cProfile.Profile]] = {phase: [] for phase in PHASES}
    for _ in range(settings.steps):
        for phase, run in runner.phases():
            with cProfile.Profile() as profile:
                run()
            profiles[phase].append(profile)
    return {phase: _functions(steps, settings.units) for phase, steps in profiles.items()}


def _functions(profiles: list[cProfile.Profile], units: int) -> list[dict[str, Any]]:
    """Of each function its least in any step: other programs only add."""
    steps: list[dict[tuple[str, int, str], Any]] = [pstats.Stats(one).stats for one in profiles]  # type: ignore[attr-defined]
    rows = []
    for (path, line, function), (_, calls, *_) in steps[-1].items():
        own = min(step[path, line, function][2] for step in steps if (path, line, function) in step)
        rows.append({"place": place_of(path), "function": function, "microseconds": 1e6 * own / units, "calls": calls / units})
    return sorted(rows, key=lambda row: -row["microseconds"])


def place_of(path: str) -> str:
    """A file as it is imported, and C++ as such: no folder of this machine."""
    if path in ("~", ""):
        return "C++"
    for package in (torch, fsdp, state_machine):
        folder = Path(str(package.__file__)).parent
        if Path(path).is_relative_to(folder):
            return Path(path).relative_to(folder.parent).with_suffix("").as_posix()
    return Path(path).stem


def by_place(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Own microseconds of all functions of a file together, the most first."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row["place"]] += row["microseconds"]
    return dict(sums.most_common())


def by_function(phases: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, str], tuple[float, float]]:
    """Own microseconds and calls of every function of a file, in forward and backward together."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for row in (row for phase in ("forward", "backward") for row in phases[phase]):
        spent, calls = sums.get((row["place"], row["function"]), (0.0, 0.0))
        sums[row["place"], row["function"]] = spent + row["microseconds"], calls + row["calls"]
    return sums


def of_one_more(few: Settings, fewer: dict[str, Any], many: Settings, more: dict[str, Any]) -> list[dict[str, Any]]:
    """Own microseconds and calls of every function for one more tensor in a unit, the most first: the slope between two sizes."""
    before, after, tensors = by_function(fewer), by_function(more), many.tensors - few.tensors
    rows = []
    for (place, function), (spent, calls) in after.items():
        spent_before, calls_before = before.get((place, function), (0.0, 0.0))
        slope, times = (spent - spent_before) / tensors, (calls - calls_before) / tensors
        rows.append({"place": place, "function": function, "microseconds": slope, "calls": times})
    return sorted(rows, key=lambda row: -row["microseconds"])


def show_one_more(found: dict[str, list[dict[str, Any]]], few: int, many: int, top: int) -> None:
    for name, rows in found.items():
        print(f"\n{name}: {sum(row['microseconds'] for row in rows):.1f} profiled µs for one more tensor, from {few} to {many}")
        table = [
            [f"{row['place']}: `{row['function']}`", f"{row['microseconds']:.2f}", f"{row['calls']:.2f}"] for row in rows[:top]
        ]
        print(markdown(["function", "µs", "calls a tensor"], table))


def show(found: dict[str, Any], top: int) -> None:
    for name, phases in found.items():
        rows = [row for phase in ("forward", "backward") for row in phases[phase]]
        total = sum(row["microseconds"] for row in rows)
        print(f"\n{name}: {total:.0f} profiled µs a unit in forward and backward")
        places = list(by_place(rows).items())[:top]
        shares = [[place, f"{spent:.0f}", f"{100 * spent / total:.0f} %"] for place, spent in places]
        print(markdown(["file", "µs", "share"], shares))
        dearest = sorted(by_function(phases).items(), key=lambda item: -item[1][0])[:top]
        table = [[f"{place}: `{function}`", f"{spent:.1f}", f"{calls:.1f}"] for (place, function), (spent, calls) in dearest]
        print(markdown(["function", "µs", "calls a unit"], table))


def main() -> None:
    parser = arguments(__doc__, NAMES)
    parser.set_defaults(contenders=DEFAULT)
    parser.add_argument("--tensors", type=int, default=12, help="parameters per unit")
    parser.add_argument("--more", type=int, default=128, help="parameters per unit of the second profile; 0 for none")
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--top", type=int, default=12, help="lines of each table")
    options = parser.parse_args()
    report, names = begin("where", options, NAMES)
    settings = Settings(names, options.units, options.tensors, options.world, options.width, repeats=1, steps=STEPS)
    found = elsewhere(measure, settings, options.timeout)
    report["settings"] = asdict(settings)
    report["functions"] = {
        name: {phase: [row for row in rows if row["microseconds"] >= 0.5] for phase, rows in phases.items()}
        for name, phases in found.items()
    }
    show(found, options.top)
    if options.more:
        units = max(2, options.units * options.tensors // options.more)
        many = replace(settings, tensors=options.more, units=units)
        more = elsewhere(measure, many, options.timeout)
        slopes = {name: of_one_more(settings, found[name], many, more[name]) for name in names}
        show_one_more(slopes, options.tensors, options.more, options.top)
        report["of_one_more_tensor"] = {
            "settings": asdict(many),
            "functions": {
                name: [row for row in rows if abs(row["microseconds"]) >= 0.02 or row["calls"] >= 0.5]
                for name, rows in slopes.items()
            },
        }
    write(report, [], options.out)


if __name__ == "__main__":
    main()
