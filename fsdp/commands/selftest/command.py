"""The command `python -m fsdp selftest`: starts the ranks, waits for them, and prints a report to paste into an issue."""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch

from fsdp import __version__
from fsdp.commands.selftest.checks import CHECKS
from fsdp.errors import ShardingError

LIMIT: Final = 115
"""Seconds for all ranks together."""
BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""The backend for each type of device on which the checks can run."""
MOST: Final = 8
"""At most so many ranks are started by default."""


class Machine(NamedTuple):
    """Where the checks run."""

    kind: str
    """The type of the devices."""
    devices: int
    """The number of devices; 0 on a CPU."""


def add_selftest(commands: Any) -> None:
    """Add `selftest` to the commands."""
    parser = commands.add_parser("selftest", help="check on this machine, in two minutes, that shards train as without them")
    parser.add_argument("--ranks", type=int, help="number of processes (default: one for each accelerator, two on a CPU)")
    parser.add_argument("--cpu", action="store_true", help="check on the CPU although there is an accelerator")
    parser.set_defaults(run=run_selftest)


def run_selftest(given: argparse.Namespace) -> int:
    """Run `selftest`; return the exit status: 0 if every check passed on every rank.

    Raises:
        ShardingError: there are fewer accelerators than ranks were asked for.
    """
    machine = Machine("cpu", 0) if given.cpu else _machine()
    size = given.ranks if given.ranks is not None else min(machine.devices, MOST) or 2
    if size < 1 or (machine.devices and size > machine.devices):
        raise ShardingError(f"selftest: --ranks is {size}, and this machine has {machine.devices or 'no'} accelerators.")
    print("\n".join(_about(machine, size)), flush=True)
    began = time.monotonic()
    with TemporaryDirectory(prefix="fsdp-selftest-") as name:
        printed = _run_ranks(size, Path(name), machine.kind)
        found = [_read(Path(name) / f"{rank}.jsonl") for rank in range(size)]
    lines, passed = _table(found)
    print("\n".join(lines))
    if not passed:
        print("\n".join(("", "What the ranks printed:", *(text for text in printed if text))))
    print(f"\n{'Every check passed' if passed else 'NOT every check passed'}, {time.monotonic() - began:.0f} s.")
    return 0 if passed else 1


def _machine() -> Machine:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in BACKENDS:
        return Machine("cpu", 0)
    return Machine(accelerator.type, torch.accelerator.device_count())


def _about(machine: Machine, size: int) -> list[str]:
    """What a reader of the report must know of the machine."""
    lines = [
        f"fsdp {__version__} selftest",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}",
        f"{size} {'rank' if size == 1 else 'ranks'} over {BACKENDS[machine.kind]}",
    ]
    if machine.kind == "cpu":
        return [*lines, "on the CPU: streams, NCCL and the memory of a GPU are NOT checked", ""]
    module: Any = torch.get_device_module(machine.kind)
    names = sorted({str(module.get_device_name(index)) for index in range(machine.devices)})
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return [*lines, f"{machine.devices} x {', '.join(names)}{cuda}", ""]


def _run_ranks(size: int, folder: Path, kind: str) -> list[str]:
    """Run one process for each rank until all have ended, or the time is over. Return what each printed at the end."""
    command = [sys.executable, "-m", "fsdp.commands.selftest.rank"]
    ranks = []
    for rank in range(size):
        with open(folder / f"{rank}.txt", "wb") as output:
            more = [str(rank), str(size), str(folder), kind, BACKENDS[kind]]
            ranks.append(subprocess.Popen([*command, *more], stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + LIMIT
    try:
        while time.monotonic() < end and any(one.poll() is None for one in ranks):
            time.sleep(0.05)
    finally:
        for one in ranks:
            one.kill()  # nothing, to one that has ended
            one.wait()
    return [(folder / f"{rank}.txt").read_text(encoding="utf-8", errors="replace")[-2000:] for rank in range(size)]


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut short


def _table(found: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[str], bool]:
    """One line for each check, and whether all passed on all ranks."""
    lines, passed = [], True
    width = max(map(len, CHECKS))
    for number, name in enumerate(CHECKS):
        of_ranks = [one[number] if number < len(one) else None for one in found]
        ended = [one for one in of_ranks if one is not None]
        failed = [f"rank {rank}: {one['said']}" for rank, one in enumerate(of_ranks) if one and one["outcome"] == "FAILED"]
        if failed:
            outcome, said, passed = "FAILED", "; ".join(failed), False
        elif len(ended) < len(of_ranks):
            outcome, said, passed = "NOT RUN", f"{len(of_ranks) - len(ended)} ranks did not finish it", False
        else:
            outcome, said = ended[0]["outcome"], ended[0]["said"]
        seconds = max((one["seconds"] for one in ended), default=0.0)
        lines.append(f"{outcome:8} {name:{width}} {seconds:5.1f} s  {said}")
    return lines, passed
