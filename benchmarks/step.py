"""A training step over gloo: every contender on the same model, the same batches, the same processes, in turn.

    python benchmarks/step.py      # the table of docs/development/benchmarks.md: about 40 minutes on two idle cores
    python benchmarks/step.py --model mlp conv --option plain bf16 --ranks 2 4 --contenders fsdp2 ours door_fsdp2

Processes of one thread each hold one copy of the model per contender, all from the same initial weights. A repeat goes round the
contenders, each time beginning with another; each runs `--steps` whole steps (forward, backward, AdamW) after a barrier, and the
slowest rank's time counts. Beside it stands the processor time of all ranks together. What the contenders computed is compared as
well: a fast wrong answer ends the program with an error.

Options: `checkpoint` computes each unit again in the backward (non-reentrant, inside the unit). `bf16` is the mixed precision of
each engine, fp32 shards and reductions (bare and DDP have none of their own that runs on a CPU: autocast). `accumulate` is four
batches a step, three of them under the engine's no_sync. `lora` freezes the model and trains adapters beside its layers.

More ranks than cores take turns, so that what an engine hides behind computing cannot show: read such cases as processor time.
"""

import argparse
import copy
import gc
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from common import Bar, Sample, arguments, begin, no_garbage_collection, over_gloo, print_table, write
from engines import CONTENDERS, TITLES, turns
from torch import Tensor, nn
from workloads import SMALL, WORKLOADS, Batch, Workload, adapt, checkpoint_units

NAMES = ("bare", "ddp", "fsdp1", "fsdp1_orig", "fsdp2", "ours", "ours_no_shard")
DOORS = ("door_ddp", "door_fsdp1", "door_fsdp2")
"""This engine by the names of its peers: measured where they are asked for."""
OPTIONS = ("plain", "checkpoint", "bf16", "accumulate", "lora")
DEFAULT = [(model, option, 2) for option in OPTIONS for model in WORKLOADS]
DEFAULT += [(model, "plain", 4) for model in WORKLOADS]
UNABLE = {("fsdp1", "lora"): "flat parameters want all of a unit frozen, or nothing"}
BATCHES = 4  # the same few batches again and again: the loss moves, so that a wrong update shows
ACCUMULATED = 4
COMPARED = 6  # steps
TOLERANCE = {"bf16": 1e-2}
"""How far losses may be apart, 1e-4 unless said here: autocast rounds elsewhere than parameters that are bf16."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One case."""

    contenders: tuple[str, ...]
    model: str
    option: str
    ranks: int
    steps: int
    repeats: int
    small: bool

    @property
    def workload(self) -> Workload:
        return (SMALL if self.small else WORKLOADS)[self.model]

    @property
    def label(self) -> str:
        return f"{self.model}, {self.option}, {self.ranks} ranks"


class Runner:
    """One contender: its model, its optimizer, and how far it has come."""

    def __init__(self, name: str, module: nn.Module, settings: Settings) -> None:
        self.engine = CONTENDERS[name]
        self.model = self.engine.wrap(copy.deepcopy(module), settings.workload.unit, half=settings.option == "bf16")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-4, foreach=True)
        self.parts = ACCUMULATED if settings.option == "accumulate" else 1
        self.losses: list[Tensor] = []

    def run(self, batches: Sequence[Batch], steps: int) -> tuple[float, float]:
        """Seconds of one step by the clock and of the processor, over `steps` of them after everybody has arrived."""
        with no_garbage_collection():
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                self.step(batches)
            elapsed = time.perf_counter() - clock, time.process_time() - processor
        return elapsed[0] / steps, elapsed[1] / steps

    def step(self, batches: Sequence[Batch]) -> None:
        total = torch.zeros(())
        for part in range(self.parts):
            last = part == self.parts - 1
            with nullcontext() if last else self.engine.no_sync(self.model):
                loss = self.model(*batches[(len(self.losses) * self.parts + part) % len(batches)]) / self.parts
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total)


def make(settings: Settings) -> nn.Module:
    """The plain module that every contender gets a copy of."""
    module = settings.workload.make()
    if settings.option == "lora":
        adapt(module, settings.workload.unit)
    if settings.option == "checkpoint":
        checkpoint_units(module, settings.workload.unit)
    return module


def batches_of(rank: int, settings: Settings) -> list[Batch]:
    """The batches of a rank. Each rank has others; every contender has the same."""
    generator = torch.Generator().manual_seed(1 + rank)
    return [settings.workload.batch(generator) for _ in range(BATCHES)]


def work(rank: int, settings: Settings) -> dict[str, dict[str, list[float]]]:
    """For each contender, the times of the slowest rank and the mean losses of all ranks. Every rank returns the same."""
    module = make(settings)
    runners = {name: Runner(name, module, settings) for name in settings.contenders}
    batches = batches_of(rank, settings)

    for runner in runners.values():
        runner.run(batches, steps=2)  # lazy initialisation, first allocations
    gc.freeze()  # what exists by now is not looked through again
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in settings.contenders}
    for _, name in turns(settings.contenders, settings.repeats):
        times[name].append(runners[name].run(batches, settings.steps))

    return {name: of_all_ranks(times[name], runner.losses) for name, runner in runners.items()}


def of_all_ranks(times: Sequence[tuple[float, float]], losses: list[Tensor]) -> dict[str, list[float]]:
    """From the times of a rank by the clock and of the processor: those of the slowest rank, and of all ranks together."""
    clock, processor = (column.contiguous() for column in torch.tensor(times, dtype=torch.float64).unbind(dim=1))
    dist.all_reduce(clock, op=dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    mean = torch.stack(losses).double()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    seconds = {"seconds_per_step": clock.tolist(), "processor_seconds_per_step": processor.tolist()}
    return {**seconds, "losses": mean.tolist()}


def compare_losses(report: dict[str, dict[str, list[float]]], tolerance: float) -> tuple[float, list[str]]:
    """The largest distance between two contenders, and a sentence for each one that computed something else.

    `bare` shares no gradients, so it agrees with the others only before the first update. The others add the gradients of more
    than two ranks in different orders, and AdamW makes much of the rounding of a small gradient: seen are 2e-6 after `COMPARED`
    steps, and 7e-4 after fourteen of a hundred layers. Another sum shows in the second step.
    """
    first = {name: one["losses"][:1] for name, one in report.items()}
    unsharded = {name: one["losses"][:COMPARED] for name, one in report.items() if name != "bare"}
    worst, complaints = 0.0, []
    for group in (first, unsharded):
        for (reference, expected), (name, losses) in combinations(group.items(), 2):
            gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
            distance = math.inf if any(map(math.isnan, gaps)) else max(gaps)
            worst = max(worst, distance)
            if distance > tolerance:
                complaints.append(f"{name} and {reference} differ by {distance:.2e} over {len(losses)} step(s)")
    return worst, complaints


def judge(samples: dict[str, Sample], case: str) -> list[Bar]:
    """FSDP1 is held to the faster of its two forms."""
    fsdp1 = [samples[name] for name in ("fsdp1", "fsdp1_orig") if name in samples]
    peers = {**samples, "the faster FSDP1": Sample.best(fsdp1)} if fsdp1 else samples
    pairs = [("ours", "the faster FSDP1", 0.80), ("ours", "fsdp2", 0.70), ("ours", "ddp", 1.10), ("ours_no_shard", "ddp", 1.00)]
    pairs += [("door_fsdp2", "fsdp2", 0.80), ("door_fsdp1", "ours", 1.05), ("door_ddp", "ours_no_shard", 1.05)]
    return [
        Bar.ratio(f"step: {TITLES[mine]} / {TITLES.get(theirs, theirs)}", limit, samples[mine], peers[theirs], case)
        for mine, theirs, limit in pairs
        if mine in samples and theirs in peers
    ]


def show(label: str, samples: dict[str, Sample], report: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for name, sample in samples.items():
        times = sample.median, sample.least, sample.most, Sample.of(report[name]["processor_seconds_per_step"]).median
        rows.append([name, *(f"{1e3 * seconds:.1f}" for seconds in times)])
    print_table([label, "median ms", "min", "max", "processor ms"], rows)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, (*NAMES, *DOORS))
    parser.add_argument("--model", nargs="+", choices=WORKLOADS, help="gpt8x256 by default, where one of these three is given")
    parser.add_argument("--option", nargs="+", choices=OPTIONS, help="plain by default")
    parser.add_argument("--ranks", nargs="+", type=int, help="processes, one thread each; 2 by default")
    parser.add_argument("--steps", type=int, default=1, help="steps in one measurement")
    parser.add_argument("--repeats", type=int, default=12, help="measurements of each contender")
    parser.add_argument("--small", action="store_true", help="small models, to see that all runs")
    return parser.parse_args()


def cases_of(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    if not (options.model or options.option or options.ranks):
        return DEFAULT
    return [
        (model, option, ranks)
        for ranks in options.ranks or [2]
        for option in options.option or ["plain"]
        for model in options.model or ["gpt8x256"]
    ]


def measure(settings: Settings, skipped: dict[str, str], seconds: float) -> tuple[dict[str, Any], list[Bar], list[str]]:
    """One case, as it is written down."""
    found = over_gloo(work, settings, settings.ranks, seconds)
    samples = {name: Sample.of(one["seconds_per_step"]) for name, one in found.items()}
    worst, complaints = compare_losses(found, TOLERANCE.get(settings.option, 1e-4))
    show(settings.label, samples, found)
    print(f"losses agree within {worst:.1e}" if not complaints else "; ".join(complaints), flush=True)
    case = {
        "settings": asdict(settings),
        "model": settings.workload.what,
        "oversubscribed": settings.ranks > (os.cpu_count() or 1),
        "skipped": skipped,
        "contenders": found,
        "milliseconds": {name: asdict(Sample.of([1e3 * s for s in one["seconds_per_step"]])) for name, one in found.items()},
        "largest_loss_difference": worst,
        "allowed_loss_difference": TOLERANCE.get(settings.option, 1e-4),
    }
    return case, judge(samples, settings.label), [f"{settings.label}: {complaint}" for complaint in complaints]


def main() -> None:
    options = parse()
    available = (*NAMES, *DOORS) if options.contenders else NAMES
    report, names = begin("step", options, available)
    report["cases"] = []
    bars, complaints = [], []
    for model, option, ranks in cases_of(options):
        skipped = {name: UNABLE[name, option] for name in names if (name, option) in UNABLE}
        able = tuple(name for name in names if name not in skipped)
        settings = Settings(able, model, option, ranks, options.steps, options.repeats, options.small)
        case, held, wrong = measure(settings, skipped, options.timeout)
        report["cases"].append(case)
        bars += held
        complaints += wrong
    write(report, bars, options.out)
    if complaints:
        raise SystemExit("the losses differ: " + "; ".join(complaints))


if __name__ == "__main__":
    main()
