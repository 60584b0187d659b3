"""Where the host's time of a training step goes: the profiles of the contenders of host.py, by file and by function.

    python benchmarks/where.py
    python benchmarks/where.py --contenders ours --tensors 1 --top 20

cProfile makes every call of a Python function dearer, by about as much for everybody, so shares say more than times and the
table is no measurement of speed: host.py is. Time in C++ that was called from Python (operators, autograd, the group) is a
function of its own.
"""

import cProfile
import pstats
from collections import defaultdict
from dataclasses import asdict
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
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        sums[row["place"]] += row["microseconds"]
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def show(found: dict[str, Any], top: int) -> None:
    for name, phases in found.items():
        rows = [row for phase in ("forward", "backward") for row in phases[phase]]
        total = sum(row["microseconds"] for row in rows)
        print(f"\n{name}: {total:.0f} profiled µs a unit in forward and backward")
        places = list(by_place(rows).items())[:top]
        shares = [[place, f"{spent:.0f}", f"{100 * spent / total:.0f} %"] for place, spent in places]
        print(markdown(["file", "µs", "share"], shares))
        both: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in rows:
            entry = both[row["place"], row["function"]]
            entry[0] += row["microseconds"]
            entry[1] += row["calls"]
        dearest = sorted(both.items(), key=lambda item: -item[1][0])[:top]
        table = [[f"{place}: `{function}`", f"{spent:.1f}", f"{calls:.1f}"] for (place, function), (spent, calls) in dearest]
        print(markdown(["function", "µs", "calls a unit"], table))


def main() -> None:
    parser = arguments(__doc__, NAMES)
    parser.set_defaults(contenders=DEFAULT)
    parser.add_argument("--tensors", type=int, default=12, help="parameters per unit")
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
    write(report, [], options.out)


if __name__ == "__main__":
    main()
