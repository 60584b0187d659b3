"""Shared code of the benchmarks: the command line, processes and process groups, statistics, bars, tables, and the file of a run.

Rule 1: a claim is a ratio between contenders of one run, never a time of one run against a time of another.
Rule 2: the raw numbers are kept. Nothing is averaged away before it is written.
"""

import argparse
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import result_file
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engines import CONTENDERS, Bare, choose

S = TypeVar("S")
R = TypeVar("R")
D = TypeVar("D", bound=Any)
"""A dataclass of whole numbers."""
START_METHOD = "spawn"
"""How a process of a measurement starts: as an interpreter of its own."""


def arguments(doc: str | None, names: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser with what every benchmark understands; `names` are the contenders to choose from."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names:
        parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"from {', '.join(names)}; all by default")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a case is ended")
    parser.add_argument("--date", help="written into the results; today by default")
    parser.add_argument("--out", type=Path, help="where the JSON goes; benchmarks/results/ by default")
    return parser


def add_sizes(parser: argparse.ArgumentParser, sizes: Any) -> None:
    """An option for each field of a dataclass of whole numbers, with its value as the default."""
    for name, size in asdict(sizes).items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"of the model or a batch; {size} by default")


def sizes_of(options: argparse.Namespace, sizes: D) -> D:
    """The dataclass that was given to `add_sizes`, with the values of the command line."""
    changed: D = replace(sizes, **{name: getattr(options, name) for name in asdict(sizes)})
    return changed


def begin(
    benchmark: str, options: argparse.Namespace, available: Sequence[str], engines: Mapping[str, Bare] = CONTENDERS
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A report with who takes part, how, and where; and their names."""
    names, skipped = choose(getattr(options, "contenders", None), available, engines)
    facts = machine(options.date)
    warn_if_busy(facts)
    stated = {name: engines[name].options for name in names}
    return {"benchmark": benchmark, "machine": facts, "options": stated, "skipped": skipped}, names


def elsewhere(measure: Callable[[S], R], settings: S, timeout: float) -> R:
    """`measure` in a fresh process: a world cannot be set up in one that already had another."""
    with multiprocessing.get_context(START_METHOD).Pool(1) as process:
        try:
            return process.apply_async(measure, (settings,)).get(timeout)
        except multiprocessing.TimeoutError:
            raise SystemExit(f"{settings} did not finish within {timeout:.0f} s and was ended") from None


def be_steady() -> None:
    """One thread, one seed, and none of the peers' deprecation notices, which are not news here."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # garbage may hold denormals, and their arithmetic is slow
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")


@contextmanager
def group(backend: str, store: dist.Store, rank: int, world: int, timeout: timedelta | None = None) -> Iterator[None]:
    """The default process group of this process. It is destroyed at the end."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def alone(world: int) -> Iterator[None]:
    """This process is rank 0 of `world` in torch's group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    be_steady()
    with group("fake", FakeStore(), 0, world):
        yield


def over_gloo(work: Callable[[int, S], R], settings: S, ranks: int, seconds: float) -> R:
    """What `work(rank, settings)` returns on rank 0 of a gloo group, with one process of one thread for each rank.

    Raises:
        ProcessRaisedException: `work` failed on a rank. The other ranks are ended.
        SystemExit: the ranks did not finish in time. All of them are ended.
    """
    # the launcher keeps the store, on a port the system chose: no port is guessed, none can be lost in between
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context(START_METHOD).SimpleQueue()
    given = (work, settings, store.port, ranks, timedelta(seconds=seconds), results)
    processes = mp.start_processes(_rank, args=given, nprocs=ranks, join=False, start_method=START_METHOD)
    deadline = time.monotonic() + seconds
    try:
        # a full pipe keeps rank 0 from ending until its result is read, so look before all ranks have ended
        while not processes.join(timeout=0.2) and results.empty():
            if time.monotonic() > deadline:
                raise SystemExit(f"{settings} did not finish within {seconds:.0f} s and was ended")
        found: R = results.get()
        return found
    finally:
        for process in processes.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(rank: int, work: Callable[[int, S], R], settings: S, port: int, ranks: int, patience: timedelta, results: Any) -> None:
    """One rank of `over_gloo`. Rank 0 hands its result to the launcher."""
    be_steady()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    with group("gloo", store, rank, ranks, patience):
        found = work(rank, settings)
        if rank == 0:
            results.put(found)
        dist.barrier()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not again before the end."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def no_standard_error() -> Iterator[None]:
    """The profiler's C++ side announces each start and stop there; exceptions are not affected."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing. The median is judged; the least is a witness that noise cannot reach."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        return cls(min(values), statistics.median(values), max(values))

    @classmethod
    def best(cls, samples: Iterable["Sample"]) -> "Sample":
        """The faster of several forms of one contender."""
        return min(samples, key=lambda sample: sample.median)

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(self.least + other.least, self.median + other.median, self.most + other.most)

    def __sub__(self, other: "Sample") -> "Sample":
        return Sample(self.least - other.least, self.median - other.median, self.most - other.most)


@dataclass(frozen=True, slots=True)
class Bar:
    """A number that must not exceed `limit`: an exact one, or a ratio of medians with that of the minima beside it."""

    measure: str
    limit: float
    value: float
    case: str = ""
    of_minima: float | None = None

    @classmethod
    def ratio(cls, measure: str, limit: float, ours: Sample, theirs: Sample, case: str = "") -> "Bar":
        return cls(measure, limit, _ratio(ours.median, theirs.median), case, _ratio(ours.least, theirs.least))

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else float("nan")


def print_bars(bars: Sequence[Bar]) -> None:
    if not bars:
        print("\nbars: nothing to judge, because `ours` or those it is held against did not run, or not at the judged size")
        return
    rows = []
    for bar in bars:
        witness = "" if bar.of_minima is None else f"{bar.of_minima:.3f}"
        rows.append([bar.measure, bar.case, f"{bar.limit:g}", f"{bar.value:.5g}", witness, "holds" if bar.holds else "MISSED"])
    print_table(["bar", "case", "at most", "found", "minima", ""], rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print()
    for row in [header, ["-" * width for width in widths], *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as documents include it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(date: str | None) -> dict[str, Any]:
    """What a reader needs to judge the numbers, and nothing that tells whose machine it was."""
    return {
        "date": date or time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def _processor() -> str:
    """Its maker's name for it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def warn_if_busy(facts: Mapping[str, Any]) -> None:
    load, cores = facts["load_average"][0], facts["cores"]
    if load > cores / 4:
        print(f"others use this machine (load {load:.1f} on {cores} cores): expect unsteady times", file=sys.stderr)


def write(report: dict[str, Any], bars: Sequence[Bar], out: Path | None) -> Path:
    """Keep the raw numbers and what they say about the bars, by default under `benchmarks/results/`; and show the latter."""
    path = out or result_file.RESULTS / f"{report['benchmark']}.json"
    report["machine"]["load_average_after"] = os.getloadavg()
    result_file.write(path, {**report, "bars": [bar.as_json() for bar in bars]})
    print_bars(bars)
    print(f"\nraw numbers: {path}")
    return path
