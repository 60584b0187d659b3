"""Host time and dispatched operations per unit, over a process group that does nothing.

    python benchmarks/host.py                                     # 8 and 1,024 ranks, 1 to 128 tensors a unit
    python benchmarks/host.py --tensors 12 --world 8 --repeats 20

One process plays rank 0 of W: nothing is sent and nobody waits, so what remains is what the host does. Units are small enough
that arithmetic hardly counts. *Added* time is a contender's minus the bare model's. Gathered values are garbage, so nothing here
looks at a result. The processor's time of the process (all its threads) is what is judged: unlike the clock's, which is kept as
well, it leaves out what other programs took.

Up to 64 ranks the group is torch's fake one. It copies once for each rank, which beyond that outgrows all else, so larger worlds
get the group of simulated_link.py on a wire that takes no time: it copies nothing, and costs some µs of Python a collective.
There FSDP1 looks dear because on a CPU it gathers into a list of W tensors. What either group takes is measured alone
(`group_alone`), and is part of every contender's added time.

Beside forward, backward, clip_grad_norm_ and the AdamW step: wrapping, and the state_dict of this rank's part. Operations are
counted as counting.py says; both counts are exact, the difference between two models, per unit, and what is left over, fixed.
"""

import argparse
import copy
import gc
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Bar, Sample, alone, arguments, be_steady, begin, elsewhere, no_garbage_collection, print_table, write
from counting import COUNTERS
from engines import CONTENDERS, turns
from simulated_link import Link, joined
from torch import Tensor, nn

from fsdp.comm.failure.desync import DesyncDetector

NAMES = ("bare", "fsdp1", "fsdp1_orig", "fsdp2", "ours", "door_fsdp1", "door_fsdp2")
PHASES = ("forward", "backward", "clip", "step")
ONCE = ("wrap", "state_dict")
"""Not part of a step, and measured as often as there are repeats."""
COUNTED_UNITS = (4, 8)  # two sizes tell what belongs to a unit and what to the model
JUDGED_TENSORS = 12
TENSORS = 768
COPYING_WORLD = 64


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

    @property
    def label(self) -> str:
        return f"{self.tensors} tensors, {self.world} ranks"


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
        self.module = nn.Sequential(*(Unit(settings.tensors, settings.width) for _ in range(units)))
        self.engine = CONTENDERS[name]
        self.model = self.wrap(copy.deepcopy(self.module))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.x = torch.ones(2, settings.width)

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.engine.wrap(module, Unit)

    def phases(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The phases of one step in order; whoever iterates runs each before asking for the next."""
        loss = torch.empty(0)

        def forward() -> None:
            nonlocal loss
            loss = self.model(self.x).sum()

        yield "forward", forward
        yield "backward", lambda: loss.backward()
        yield "clip", lambda: self.engine.clip(self.model)
        yield "step", self.optimizer.step
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        for _ in range(3):
            for _, run in self.phases():
                run()

    def time(self, into: dict[str, list[float]]) -> None:
        for phase, run in self.phases():
            _time(run, into, phase)

    def time_once(self, into: dict[str, list[float]]) -> None:
        module = copy.deepcopy(self.module)
        _time(lambda: self.wrap(module), into, "wrap")
        _time(lambda: self.engine.state_dict(self.model), into, "state_dict")


def _time(run: Callable[[], object], into: dict[str, list[float]], name: str) -> None:
    clock, processor = time.perf_counter(), time.process_time()
    kept = run()  # what it returns is let go after the measurement
    into[name].append(time.process_time() - processor)
    into[f"{name}_by_the_clock"].append(time.perf_counter() - clock)
    del kept


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


class _NoPeers:
    """The peers of a rank that is alone."""

    def check_peers(self, broken: bool) -> None:
        return

    def disconnect(self) -> None:
        return

    def report_restart(self, rank: int) -> NoReturn:
        raise AssertionError


class _OneRank(dict[str, Any]):
    """A store of one rank, which agrees with itself."""

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return int(self[key])

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def agreement(units: int = 48, repeats: int = 200) -> Sample:
    """Microseconds in which a rank sees that a collective is the agreed one, in a steady loop over so many units (gloo only)."""
    sequence = DesyncDetector(_OneRank(), 0, range(1), _NoPeers()).open("shard")  # type: ignore[arg-type]
    names = [f"blocks.{number}" for number in range(units)]

    def loop() -> None:
        for name in names:
            sequence.check_call("all_gather", name, 4096)

    for _ in range(3):
        loop()
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        _time(loop, seconds, "loop")
    return Sample.of([1e6 * one / units for one in seconds["loop_by_the_clock"]])


def group_alone(settings: Settings) -> dict[str, float]:
    """Processor seconds of one collective over one unit, with no contender around it."""
    elements = sum(p.numel() for p in Unit(settings.tensors, settings.width).parameters())
    shard = torch.ones(-(-elements // settings.world))
    unsharded = torch.ones(settings.world * shard.numel())
    collectives: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(unsharded, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, unsharded),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(unsharded), unsharded),
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


@contextmanager
def silent(world: int) -> Iterator[None]:
    """This process is rank 0 of `world` in a group that sends and copies nothing."""
    be_steady()
    with joined(Link(math.inf, 0.0), world):
        yield


def group_of(world: int) -> AbstractContextManager[None]:
    return alone(world) if world <= COPYING_WORLD else silent(world)


def measure(settings: Settings) -> dict[str, Any]:
    """Everything about one case. The process group is set up here, so call it once per process."""
    with group_of(settings.world):
        return _measure(settings)


def _measure(settings: Settings) -> dict[str, Any]:
    runners = {name: Runner(name, settings.units, settings) for name in settings.contenders}
    for runner in runners.values():
        runner.warm_up()
        runner.time_once(into=defaultdict(list))
    gc.freeze()  # what exists by now is not looked through again
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in settings.contenders}
    for repeat, name in turns(settings.contenders, settings.repeats):
        with no_garbage_collection():
            for _ in range(settings.steps):
                runners[name].time(into=seconds[name])
            if repeat % 4 == 0:
                runners[name].time_once(into=seconds[name])
    # the counts come last: a profiler that has run once is not gone without a trace
    operations = {name: count(name, settings) for name in settings.contenders}
    # times by the clock are not kept: the page compares processor time alone
    contenders = {
        name: {"seconds_of_all_units": {what: seconds[name][what] for what in (*PHASES, *ONCE)}, "operations": operations[name]}
        for name in settings.contenders
    }
    return {"contenders": contenders, "group_alone": group_alone(settings)}


def summarise(contenders: dict[str, Any], units: int) -> dict[str, dict[str, Sample]]:
    """Per contender: microseconds per unit in each phase, and `added` in forward and backward over bare."""
    micro = {
        name: {what: Sample.of([1e6 * s / units for s in one["seconds_of_all_units"][what]]) for what in (*PHASES, *ONCE)}
        for name, one in contenders.items()
    }
    for phases in micro.values():
        phases["both"] = phases["forward"] + phases["backward"]
    if "bare" in micro:
        for phases in micro.values():
            phases["added"] = phases["both"] - micro["bare"]["both"]
    return micro


def judge(micro: dict[str, dict[str, Sample]], settings: Settings) -> list[Bar]:
    """Added host time is held to the faster form of FSDP1; what works on parameters to FSDP2's, which are DTensors."""
    if not {"ours", "bare"} <= micro.keys():
        return []
    bars, ours = [], micro["ours"]
    judged = settings.tensors == JUDGED_TENSORS
    fsdp1 = [micro[name]["added"] for name in ("fsdp1", "fsdp1_orig") if name in micro and judged]
    if fsdp1:
        bars.append(Bar.ratio("host: added, ours / the faster FSDP1", 0.40, ours["added"], Sample.best(fsdp1), settings.label))
    if "fsdp2" in micro:
        limits = {**({"added": 0.25} if judged else {}), "step": 0.35, "clip": 0.5, "wrap": 1.0, "state_dict": 1.0}
        bars += [
            Bar.ratio(f"host: {what}, ours / FSDP2", limit, ours[what], micro["fsdp2"][what], settings.label)
            for what, limit in limits.items()
        ]
    if {"door_fsdp2", "fsdp2"} <= micro.keys() and judged:
        bars += [
            Bar.ratio(
                f"host: {what}, ours by FSDP2's names / FSDP2",
                0.5,
                micro["door_fsdp2"][what],
                micro["fsdp2"][what],
                settings.label,
            )
            for what in ("added", "step")
        ]
    return bars


def judge_growth(cases: list[dict[str, Any]]) -> list[Bar]:
    """What one more tensor in a unit adds, between the judged number of tensors and the most there are."""
    bars = []
    for world in dict.fromkeys(case["settings"]["world"] for case in cases):
        added = {
            case["settings"]["tensors"]: case["microseconds_per_unit"]["ours"]["added"]["median"]
            for case in cases
            if case["settings"]["world"] == world and "added" in case["microseconds_per_unit"].get("ours", {})
        }
        if JUDGED_TENSORS in added and max(added) > JUDGED_TENSORS:
            growth = (added[max(added)] - added[JUDGED_TENSORS]) / (max(added) - JUDGED_TENSORS)
            bars.append(
                Bar("host: added by one more tensor, µs", 2.5, growth, f"{JUDGED_TENSORS} to {max(added)}, {world} ranks")
            )
    return bars


def show(case: dict[str, Any], micro: dict[str, dict[str, Sample]], settings: Settings) -> None:
    print(f"\n{settings.label}, {settings.units} units: processor µs per unit, medians; operations of forward/backward/clip/step")
    columns = ["forward", "backward", "added", "clip", "step", *ONCE]
    rows = []
    for name, phases in micro.items():
        times = [f"{phases[column].median:.1f}" if column in phases else "" for column in columns]
        found = case["contenders"][name]["operations"]
        counts = ["/".join(f"{found[kind][phase]['per_unit']:g}" for phase in PHASES) for kind in COUNTERS]
        rows.append([name, *times, *counts])
    print_table(["contender", *columns, *COUNTERS], rows)
    group = ", ".join(f"{name} {1e6 * seconds:.1f} µs" for name, seconds in case["group_alone"].items())
    print(f"the group alone, once over a unit: {group}", flush=True)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 12, 32, 128], help="parameters per unit")
    parser.add_argument("--world", type=int, nargs="+", default=[8, 1024], help="ranks of the group")
    parser.add_argument("--units", type=int, help=f"so that they have {TENSORS} tensors, if that is 6 to 48, when left out")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="steps in one measurement, each timed")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each contender")
    return parser.parse_args()


def main() -> None:
    options = parse()
    report, names = begin("host", options, NAMES)
    cases: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for world in options.world:
        for tensors in options.tensors:
            # FSDP2 wraps a unit of 128 tensors on 1,024 ranks in half a second
            units = options.units or max(6, min(48 if world <= COPYING_WORLD else 12, TENSORS // tensors))
            settings = Settings(names, units, tensors, world, options.width, options.repeats, options.steps)
            case = elsewhere(measure, settings, options.timeout)
            micro = summarise(case["contenders"], settings.units)
            show(case, micro, settings)
            bars += judge(micro, settings)
            summary = {name: {phase: asdict(sample) for phase, sample in phases.items()} for name, phases in micro.items()}
            cases.append({"settings": asdict(settings), **case, "microseconds_per_unit": summary})
    agreed = agreement()
    print(f"\nthat a collective is the agreed one is seen in {agreed.median:.2f} µs; a pass of a unit has at most two")
    bars.append(Bar("host: agreement of the ranks, a unit and pass, µs", 1.0, 2 * agreed.median, "two collectives"))
    write({**report, "cases": cases, "agreement_microseconds": asdict(agreed)}, bars + judge_growth(cases), options.out)


if __name__ == "__main__":
    main()
