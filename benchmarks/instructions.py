"""Instructions of the processor per unit, in each phase of a step: the host's work, whoever else uses the machine.

    python benchmarks/instructions.py               # needs valgrind; about three minutes

The contenders of host.py run under callgrind, which simulates the processor and counts every instruction, of Python and of C++
alike. The same program has the same count to about a thousandth, however busy the machine is. Two models, of four and of eight
units, show the cost of one unit. Instructions are not time: a cache miss counts like a hit. Compare them between commits.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import Bar, alone, arguments, begin, print_table, write
from host import COUNTED_UNITS, NAMES, PHASES, Runner, Settings

K = TypeVar("K", bound=Hashable)
VALGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=yes", "--collect-atstart=no")
STEPS = 2
"""Counted of each model; the last one is kept."""


def run_under_valgrind(settings: Settings) -> None:
    """Every phase between two toggles; each second toggle makes callgrind write a file, in the order of `keys`."""
    with alone(settings.world):
        for name in settings.contenders:
            for units in COUNTED_UNITS:
                runner = Runner(name, units, settings)
                runner.warm_up()
                count_phases(runner)


def count_phases(runner: Any) -> None:
    for _ in range(STEPS):
        for _, run in runner.phases():
            torch._C._valgrind_toggle()
            run()
            torch._C._valgrind_toggle_and_dump_stats()


def keys(settings: Settings) -> list[tuple[str, int, str]]:
    """What the files are of: a later step's replaces an earlier one's."""
    return [
        (name, units, phase) for name in settings.contenders for units in COUNTED_UNITS for _ in range(STEPS) for phase in PHASES
    ]


def measure(settings: Settings, timeout: float) -> dict[str, dict[str, float]]:
    """Instructions per unit, by contender and phase."""
    given = ["--contenders", *settings.contenders, "--tensors", str(settings.tensors), "--world", str(settings.world)]
    counts = count([__file__, *given, "--inside"], keys(settings), timeout)
    return per_unit(counts, settings.contenders, PHASES)


def per_unit(counts: Mapping[Any, int], names: Sequence[str], phases: Sequence[str]) -> dict[str, dict[str, float]]:
    """By contender and phase, from the counts of the models of both sizes."""
    few, many = COUNTED_UNITS
    return {
        name: {phase: (counts[name, many, phase] - counts[name, few, phase]) / (many - few) for phase in phases} for name in names
    }


def count(program: Sequence[str], names: Sequence[K], timeout: float) -> dict[K, int]:
    """The instructions between the toggles of a program, in their order; where a name comes twice, the later ones."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        command = [*VALGRIND, f"--callgrind-out-file={out}", sys.executable, *program]
        # the order of a dict's keys is not to differ from run to run
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        except FileNotFoundError:
            raise SystemExit("valgrind is not installed, and nothing else here counts instructions") from None
        if done.returncode != 0:
            raise SystemExit(f"under valgrind: {done.stderr[-2000:]}")
        return {name: total(Path(f"{out}.{number}")) for number, name in enumerate(names, start=1)}


def total(path: Path) -> int:
    """The instructions that a file of callgrind's counts."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("totals:"))


def judge(found: dict[str, dict[str, float]], case: str) -> list[Bar]:
    """The bars of host.py, in instructions."""
    if not {"bare", "ours"} <= found.keys():
        return []
    added = {name: sum(phases[p] - found["bare"][p] for p in ("forward", "backward")) for name, phases in found.items()}
    fsdp1 = [added[name] for name in ("fsdp1", "fsdp1_orig") if name in found]
    bars = [Bar("instructions: added, ours / the faster FSDP1", 0.40, added["ours"] / min(fsdp1), case)] if fsdp1 else []
    if "fsdp2" in found:
        bars.append(Bar("instructions: added, ours / FSDP2", 0.25, added["ours"] / added["fsdp2"], case))
        for phase, limit in (("step", 0.35), ("clip", 0.5)):
            bars.append(Bar(f"instructions: {phase}, ours / FSDP2", limit, found["ours"][phase] / found["fsdp2"][phase], case))
    return bars


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--tensors", type=int, default=12, help="parameters per unit")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.inside:
        run_under_valgrind(Settings(tuple(options.contenders), 0, options.tensors, options.world, 64, 1, STEPS))
        return
    report, names = begin("instructions", options, NAMES)
    settings = Settings(names, 0, options.tensors, options.world, 64, 1, STEPS)
    found = measure(settings, options.timeout)
    rows = [[name, *(f"{phases[phase] / 1e3:.0f}" for phase in PHASES)] for name, phases in found.items()]
    print_table([f"thousands a unit, {settings.label}", *PHASES], rows)
    report["settings"], report["instructions_per_unit"] = asdict(settings), found
    write(report, judge(found, settings.label), options.out)


if __name__ == "__main__":
    main()
