"""Host time and dispatched operations per unit, over a process group that does nothing.

    python benchmarks/host.py                                  # about two minutes
    python benchmarks/host.py --tensors 12 --world 8 64 1024   # does the cost grow with the world?

A fake process group plays rank 0 of W: nothing is sent and nobody waits, so what remains is what the host does. Units
are small enough that arithmetic hardly counts. *Added* time is a contender's minus the bare model's. Gathered values are
garbage, so nothing here looks at a result. The processor's time of the process (all its threads) is what is judged:
unlike the clock's, which is kept as well, it leaves out what other programs took.

The fake group is not free: a collective of its own copies once per rank. What that takes is measured alone and stated
(`group_alone`), is part of every contender's added time, and outgrows all else in large worlds. So the bars are for
W = 8, and across worlds the dispatched operations say more than the times.

Operations are counted twice, because the two miss different things. `dispatched`: what reaches the Python key of the
dispatcher (a subclass such as DTensor counts once for itself and once for what it does inside). `profiled`: the aten
and c10d records of the profiler, composite operations included. Both are exact: the difference between two models,
per unit, and what is left over, fixed.
"""

import argparse
import copy
import gc
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    CONTENDERS,
    Bar,
    Sample,
    be_quiet,
    choose,
    machine,
    no_standard_error,
    print_bars,
    print_table,
    rotated,
    warn_if_busy,
    write,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("bare", "fsdp1", "fsdp1_orig", "fsdp2", "ours")
PHASES = ("forward", "backward", "step")
COUNTED_UNITS = (4, 8)  # two sizes tell what belongs to a unit and what to the model
JUDGED_WORLD = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """One case: so many tensors in a unit, so many ranks. It runs in a process of its own."""

    contenders: tuple[str, ...]
    units: int
    tensors: int
    world: int
    width: int
    repeats: int
    steps: int


class Unit(nn.Module):
    """Weights and biases in pairs, each pair one `F.linear`; a weight left alone by an odd count has no bias."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        shapes = [(width, width) if index % 2 == 0 else (width,) for index in range(tensors)]
        self.tensors = nn.ParameterList(nn.Parameter(torch.full(shape, 1.0 / width)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        tensors = list(self.tensors)
        for weight, bias in zip(tensors[::2], [*tensors[1::2], None], strict=False):
            x = F.linear(x, weight, bias)
        return x


class Runner:
    """One contender at one size, and its training step cut into phases."""

    def __init__(self, name: str, units: int, settings: Settings) -> None:
        module = nn.Sequential(*(Unit(settings.tensors, settings.width) for _ in range(units)))
        self.model = CONTENDERS[name].wrap(copy.deepcopy(module), Unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.x = torch.ones(2, settings.width)

    def phases(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The phases of one step in order; whoever iterates runs each before asking for the next."""
        loss = torch.empty(0)

        def forward() -> None:
            nonlocal loss
            loss = self.model(self.x).sum()

        yield "forward", forward
        yield "backward", lambda: loss.backward()
        yield "step", self.optimizer.step
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        for _ in range(3):
            for _, run in self.phases():
                run()

    def time(self, into: dict[str, list[float]]) -> None:
        for phase, run in self.phases():
            clock, processor = time.perf_counter(), time.process_time()
            run()
            into[phase].append(time.process_time() - processor)
            into[f"{phase}_by_the_clock"].append(time.perf_counter() - clock)


class Counting(TorchDispatchMode):
    """Counts what is dispatched, on both floors: a subclass's operation, then those it performs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrappers = [kind for kind in types if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__]
        self.operations[f"{func.name()} on {wrappers[0].__name__}" if wrappers else func.name()] += 1
        # to decline is to let the subclass go first, with this mode still listening to what it does
        return NotImplemented if wrappers else func(*args, **(kwargs or {}))


@contextmanager
def _dispatched(found: Counter[str]) -> Iterator[None]:
    with Counting() as counting:
        yield
    found.update(counting.operations)


@contextmanager
def _profiled(found: Counter[str]) -> Iterator[None]:
    with no_standard_error(), profile(activities=[ProfilerActivity.CPU]) as recording:
        yield
    found.update(event.name for event in recording.events() if event.name.startswith(("aten::", "c10d::", "_c10d")))


COUNTERS = {"dispatched": _dispatched, "profiled": _profiled}


def count(name: str, settings: Settings) -> dict[str, Any]:
    """Per counter and phase: operations per unit, operations of the model whatever its size, and which they are."""
    runners = [Runner(name, units, settings) for units in COUNTED_UNITS]
    for runner in runners:
        runner.warm_up()
    small_units, large_units = COUNTED_UNITS
    report: dict[str, Any] = {}
    for kind, counter in COUNTERS.items():
        report[kind] = {}
        small: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        large: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        for runner, found in zip(runners, (small, large), strict=True):
            for phase, run in runner.phases():
                with counter(found[phase]):
                    run()
        for phase in PHASES:
            operations = {
                operation: (large[phase][operation] - small[phase][operation]) / (large_units - small_units)
                for operation in sorted(large[phase] | small[phase])
            }
            per_unit = sum(operations.values())
            report[kind][phase] = {
                "per_unit": per_unit,
                "fixed": small[phase].total() - per_unit * small_units,
                "operations_per_unit": {operation: times for operation, times in operations.items() if times},
            }
    return report


def group_alone(settings: Settings) -> dict[str, float]:
    """Processor seconds of one collective over one unit, with no contender around it."""
    elements = sum(p.numel() for p in Unit(settings.tensors, settings.width).parameters())
    shard = torch.ones(-(-elements // settings.world))
    whole = torch.ones(settings.world * shard.numel())
    collectives: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }
    best = {}
    for name, run in collectives.items():
        durations = []
        for _ in range(20):
            processor = time.process_time()
            for _ in range(10):
                run()
            durations.append((time.process_time() - processor) / 10)
        best[name] = min(durations)
    return best


def measure(settings: Settings) -> dict[str, Any]:
    """Everything about one case. The process group is set up here, so call it once per process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # garbage may hold denormals, and their arithmetic is slow
    torch.manual_seed(0)
    be_quiet()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.world)
    runners = {name: Runner(name, settings.units, settings) for name in settings.contenders}
    for runner in runners.values():
        runner.warm_up()
    gc.freeze()  # what exists by now is not looked through again
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in settings.contenders}
    for repeat in range(settings.repeats):
        for name in rotated(settings.contenders, repeat):
            gc.collect()
            gc.disable()
            for _ in range(settings.steps):
                runners[name].time(into=seconds[name])
            gc.enable()
    # the counts come last: a profiler that has run once is not gone without a trace
    operations = {name: count(name, settings) for name in settings.contenders}
    group = group_alone(settings)
    dist.destroy_process_group()
    contenders = {
        name: {"seconds_of_all_units": dict(seconds[name]), "operations": operations[name]} for name in settings.contenders
    }
    return {"contenders": contenders, "group_alone": group}


def measure_elsewhere(settings: Settings, timeout: float) -> dict[str, Any]:
    """`measure` in a fresh process: another world cannot be set up in one that already had one."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        try:
            return process.apply_async(measure, (settings,)).get(timeout)
        except multiprocessing.TimeoutError:
            raise SystemExit(f"{settings} did not finish within {timeout:.0f} s and was ended") from None


def summarise(contenders: dict[str, Any], units: int) -> dict[str, dict[str, Sample]]:
    """Per contender: microseconds per unit in each phase, and `added` in forward and backward over bare."""
    micro = {
        name: {phase: Sample.of([1e6 * s / units for s in one["seconds_of_all_units"][phase]]) for phase in PHASES}
        for name, one in contenders.items()
    }
    for phases in micro.values():
        phases["both"] = phases["forward"] + phases["backward"]
    if "bare" in micro:
        for phases in micro.values():
            phases["added"] = phases["both"] - micro["bare"]["both"]
    return micro


def judge(micro: dict[str, dict[str, Sample]], settings: Settings) -> list[Bar]:
    """Added host time is held to the faster form of FSDP1; the optimizer to FSDP2's, whose parameters are DTensors."""
    bars: list[Bar] = []
    if not {"ours", "bare"} <= micro.keys() or settings.world != JUDGED_WORLD:
        return bars
    label = f"{settings.tensors} tensors"
    ours, fsdp1 = micro["ours"], [micro[name] for name in ("fsdp1", "fsdp1_orig") if name in micro]
    if "fsdp2" in micro:
        bars.append(Bar(f"{label}: added, ours / FSDP2", 0.30, ours["added"] / micro["fsdp2"]["added"]))
    if fsdp1:
        best = Sample(min(one["added"].least for one in fsdp1), min(one["added"].median for one in fsdp1))
        bars.append(Bar(f"{label}: added, ours / the faster FSDP1", 0.45, ours["added"] / best))
    if "fsdp2" in micro:
        bars.append(Bar(f"{label}: AdamW step, ours / FSDP2", 0.35, ours["step"] / micro["fsdp2"]["step"]))
    return bars


def show(case: dict[str, Any], micro: dict[str, dict[str, Sample]], settings: Settings) -> None:
    print(f"\n{settings.tensors} tensors per unit, {settings.world} ranks, {settings.units} units: processor µs per unit, minima")
    columns = ["forward", "backward", "added", "step"]
    beside = [name for name in ("fsdp1", "fsdp2") if name in micro and "bare" in micro]
    rows = []
    for name, phases in micro.items():
        times = [f"{phases[column].least:.1f}" if column in phases else "" for column in columns]
        ratios = [f"{(phases['added'] / micro[other]['added']).least:.2f}" for other in beside]
        found = case["contenders"][name]["operations"]
        counts = ["/".join(f"{found[kind][phase]['per_unit']:g}" for phase in PHASES) for kind in COUNTERS]
        rows.append([name, *times, *ratios, *counts])
    header = ["contender", *columns, *(f"added / {name}" for name in beside), *(f"{kind} f/b/s" for kind in COUNTERS)]
    print_table(header, rows)
    alone = ", ".join(f"{name} {1e6 * seconds:.1f} µs" for name, seconds in case["group_alone"].items())
    print(f"the fake group alone, once over a unit: {alone}")


def parse() -> tuple[list[Settings], argparse.Namespace, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"from {', '.join(NAMES)}; all by default")
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 12, 32], help="parameters per unit")
    parser.add_argument("--world", type=int, nargs="+", default=[8], help="ranks of the fake group")
    parser.add_argument("--units", "--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="steps in one measurement, each timed")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each contender")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is ended")
    parser.add_argument("--date", help="written into the results; today by default")
    parser.add_argument("--out", type=Path, help="where the JSON goes; benchmarks/results/ by default")
    options = parser.parse_args()
    names, skipped = choose(options.contenders, NAMES)
    cases = [
        Settings(names, options.units, tensors, world, options.width, options.repeats, options.steps)
        for world in options.world
        for tensors in options.tensors
    ]
    return cases, options, skipped


def main() -> None:
    cases, options, skipped = parse()
    names: Sequence[str] = cases[0].contenders
    report: dict[str, Any] = {
        "benchmark": "host",
        "machine": machine(options.date),
        "options": {name: CONTENDERS[name].options for name in names},
        "skipped": skipped,
        "cases": [],
    }
    warn_if_busy(report["machine"])
    bars: list[Bar] = []
    for settings in cases:
        case = measure_elsewhere(settings, options.timeout)
        micro = summarise(case["contenders"], settings.units)
        show(case, micro, settings)
        bars += judge(micro, settings)
        summary = {name: {phase: asdict(sample) for phase, sample in phases.items()} for name, phases in micro.items()}
        report["cases"].append({"settings": asdict(settings), **case, "microseconds_per_unit": summary})
    report["bars"] = [bar.as_json() for bar in bars]
    path = write(report, options.out)
    print_bars(bars)
    print(f"\nraw numbers: {path}")


if __name__ == "__main__":
    main()
