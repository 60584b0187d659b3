"""Who is compared, with which options; how raw times become ratios; what is written down.

Rule 1: a claim is a ratio between contenders of one run, never a time of one run against a time of another.
Rule 2: every peer runs with the best options we could find for it on this backend, and they are stated in CONTENDERS.
Rule 3: the raw numbers are kept. Nothing is averaged away before it is written.
"""

import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RESULTS = Path(__file__).parent / "results"

Wrap = Callable[[nn.Module, type[nn.Module]], nn.Module]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train the same module.

    `wrap` takes a plain module and the class of its units, and returns what the training loop calls. It may
    change the module it is given, so each contender gets a copy of its own.
    """

    name: str
    options: str
    wrap: Wrap


def _bare(module: nn.Module, unit: type[nn.Module]) -> nn.Module:
    return module


def _ddp(module: nn.Module, unit: type[nn.Module]) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)


def _fsdp1(*, use_orig_params: bool) -> Wrap:
    def wrap(module: nn.Module, unit: type[nn.Module]) -> nn.Module:
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({unit}),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=False,
            limit_all_gathers=False,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )

    return wrap


def _fsdp2(module: nn.Module, unit: type[nn.Module]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in module.modules():
        if isinstance(child, unit):
            fully_shard(child, mesh=mesh, reshard_after_forward=True)
    return fully_shard(module, mesh=mesh)


def _ours(**options: str) -> Callable[[nn.Module, type[nn.Module]], nn.Module]:
    def wrap(module: nn.Module, unit: type[nn.Module]) -> nn.Module:
        from fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(module, auto_wrap_policy={unit}, **options)

    return wrap


# FSDP1's and FSDP2's options were chosen by trying the others on both benchmarks. Added host time, twelve tensors per
# unit: FSDP1 683 to 699 µs as below (forward_prefetch on or off, either way round from run to run), 766 to 798 with
# limit_all_gathers; FSDP2 1,185 µs as below, 1,243 with explicit forward prefetch, 1,253 with explicit backward
# prefetch too. Over gloo none of them differed by more than the machine's noise.
CONTENDERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("bare", "the module itself: the same local work, no communication", _bare),
        Contender("ddp", "gradient_as_bucket_view=True, broadcast_buffers=False", _ddp),
        Contender(
            "fsdp1",
            "FULL_SHARD, BACKWARD_PRE, forward_prefetch=False, limit_all_gathers=False, flat parameters",
            _fsdp1(use_orig_params=False),
        ),
        Contender(
            "fsdp1_orig",
            "FULL_SHARD, BACKWARD_PRE, forward_prefetch=False, limit_all_gathers=False, use_orig_params=True",
            _fsdp1(use_orig_params=True),
        ),
        Contender("fsdp2", "fully_shard on a CPU mesh: units reshard_after_forward=True, root as by default", _fsdp2),
        Contender("ours", "FullyShardedDataParallel(module, auto_wrap_policy={unit}), all else as by default", _ours()),
        Contender("ours_no_shard", 'the same with sharding_strategy="NO_SHARD"', _ours(sharding_strategy="NO_SHARD")),
    )
}


def choose(requested: Sequence[str] | None, available: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Who runs, in the order of `available`, and who does not with the reason.

    Without a request everybody runs who can be imported. A contender asked for by name that cannot run ends the
    program: a comparison that silently lost a member is worse than none.
    """
    skipped = {}
    for name in requested or available:
        if name not in available:
            raise SystemExit(f"unknown contender {name!r}: choose from {', '.join(available)}")
    for name in (one for one in requested or available if one.startswith("ours")):
        try:
            from fsdp import FullyShardedDataParallel  # noqa: F401
        except ImportError as reason:
            skipped[name] = f"fsdp.FullyShardedDataParallel cannot be imported: {reason}"
            if requested:
                raise SystemExit(f"{name}: {skipped[name]}") from None
            print(f"{name} is left out: {skipped[name]}", file=sys.stderr)
    names = tuple(name for name in available if name in (requested or available) and name not in skipped)
    return names, skipped


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The same contenders, each turn beginning with another, so that nobody always follows the same neighbour."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def be_quiet() -> None:
    """The peers' deprecation notices are not news here."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")


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
    """Repeated measurements of one thing. The least says what the code costs; the median what the machine allowed."""

    least: float
    median: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        return cls(min(values), statistics.median(values))

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(self.least + other.least, self.median + other.median)

    def __sub__(self, other: "Sample") -> "Sample":
        return Sample(self.least - other.least, self.median - other.median)

    def __truediv__(self, other: "Sample") -> "Sample":
        return Sample(_ratio(self.least, other.least), _ratio(self.median, other.median))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio that must not exceed `limit`. The minima decide; the medians stand beside them as a witness."""

    claim: str
    limit: float
    ratio: Sample

    @property
    def verdict(self) -> str:
        return "PASS" if self.ratio.least <= self.limit else "FAIL"

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "limit": self.limit,
            "ratio_of_minima": self.ratio.least,
            "ratio_of_medians": self.ratio.median,
            "verdict": self.verdict,
        }


def print_bars(bars: Sequence[Bar]) -> None:
    if not bars:
        print("\nbars: nothing to judge, because `ours` or those it is held against did not run, or not at the judged size")
        return
    rows = [[bar.claim, f"{bar.limit:.2f}", f"{bar.ratio.least:.3f}", f"{bar.ratio.median:.3f}", bar.verdict] for bar in bars]
    print_table(["bar", "at most", "minima", "medians", ""], rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print()
    for row in [header, ["-" * width for width in widths], *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())


def print_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As documents include it."""
    print(f"\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def exact_bar(claim: str, value: float, limit: float) -> dict[str, Any]:
    """A number without noise that must not exceed `limit`."""
    return {"claim": claim, "value": value, "limit": limit, "verdict": "PASS" if value <= limit else "FAIL"}


def print_exact_bars(bars: Sequence[Mapping[str, Any]]) -> None:
    print_markdown(
        ["bar", "at most", "found", ""], [[b["claim"], f"{b['limit']:g}", f"{b['value']:.5g}", b["verdict"]] for b in bars]
    )


def draw(plot: Callable[[Any], None], path: Path) -> None:
    """One figure as a PNG, where matplotlib is there (`pip install 'fsdp[bench]'`)."""
    try:
        import matplotlib
    except ImportError:
        print(f"no figure: matplotlib is not installed, so {path.name} was not drawn", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    plot(axes)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    print(f"figure: {path}")


def machine(date: str | None) -> dict[str, Any]:
    """What a reader needs to judge the numbers, and nothing that tells whose machine it was."""
    return {
        "date": date or time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def warn_if_busy(facts: Mapping[str, Any]) -> None:
    load, cores = facts["load_average"][0], facts["cores"]
    if load > cores / 4:
        print(f"others use this machine (load {load:.1f} on {cores} cores): expect unsteady times", file=sys.stderr)


def write(report: Mapping[str, Any], out: Path | None) -> Path:
    """Keep the raw numbers, by default under `benchmarks/results/`, named after the benchmark and the date."""
    path = out or RESULTS / f"{report['benchmark']}-{report['machine']['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report["machine"]["load_average_after"] = os.getloadavg()
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path
