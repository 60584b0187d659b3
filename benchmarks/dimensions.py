"""A step of data x tensor parallelism, beside FSDP2 over the same styles of torch: over gloo, and the host's work alone.

    python benchmarks/dimensions.py                   # four processes, 2 x 2; and valgrind, if it is there: about seven minutes
    python benchmarks/dimensions.py --repeats 60 --width 256

Units are a norm and two linear layers, the first cut by columns and the second by rows. `columns and rows` leaves the norm alone.
`sequence` cuts the activations between the layers along the sequence (`SequenceParallel`), so that the gradients of each norm are
terms of a sum over the `tp` ranks. `bare` is tensor parallelism alone, whose data ranks share nothing.

A step over gloo is forward, backward and AdamW. It begins at a barrier, the slowest rank counts, and all contenders take turns in
the same processes. If their losses part, the program fails. On two cores four ranks take turns, and nothing is hidden behind
computing.

The host's work is that of one rank of 8 x 2 in a group that sends nothing, for each unit: processor time, and instructions that
callgrind counts, which hardly depend on who else uses the machine. *Added* is forward and backward, less those of `bare`.
"""

import argparse
import gc
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import host
import torch
import torch.distributed as dist
from common import Bar, Sample, alone, arguments, begin, elsewhere, no_garbage_collection, over_gloo, print_table, write
from engines import CONTENDERS, TITLES, turns
from instructions import STEPS, count, count_phases, per_unit
from step import compare_losses, of_all_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard

NAMES = ("bare", "fsdp2", "ours", "door_fsdp2")
STYLES: dict[str, dict[str, ParallelStyle]] = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}
PHASES = ("forward", "backward", "step")
OVER_GLOO, ON_THE_HOST = (2, 2), (8, 2)
"""Ranks of data and of tensor parallelism."""
STEP_BAR, ADDED_BAR = 0.70, 0.40


@dataclass(frozen=True, slots=True)
class Settings:
    contenders: tuple[str, ...]
    style: str
    units: int
    width: int
    length: int
    repeats: int

    @property
    def label(self) -> str:
        return f"{self.style}, {self.units} units of width {self.width}"


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


class Runner(host.Runner):
    """The same as in host.py, of units that are spread over the `tp` ranks."""

    def __init__(self, name: str, settings: Settings, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Unit(settings.width) for _ in range(settings.units)))
        for unit in model.children():
            parallelize_module(unit, mesh["tp"], STYLES[settings.style])
        if name != "bare":
            engine: Any = CONTENDERS[name]
            model = engine.wrap(model, Unit, mesh=mesh["dp"])
        self.model = model
        # torch steps no list of DTensors and ordinary tensors together
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=name != "bare")
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        x = torch.randn(4, settings.length, settings.width, generator=generator)
        self.divisor = x.numel()
        parts = mesh["tp"].size() if settings.style == "sequence" else 1
        self.x = x.chunk(parts, dim=1)[mesh["tp"].get_local_rank() % parts].contiguous()
        self.losses: list[Tensor] = []

    def phases(self) -> Iterator[tuple[str, Callable[[], object]]]:
        loss = torch.empty(0)

        def forward() -> None:
            nonlocal loss
            # the sum over the `tp` ranks is the mean, if each has a part of the sequence
            loss = self.model(self.x).square().sum() / self.divisor

        yield "forward", forward
        yield "backward", lambda: loss.backward()
        yield "step", self.optimizer.step
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def step(self) -> None:
        for _, run in self.phases():
            run()


def over_processes(rank: int, settings: Settings) -> dict[str, dict[str, list[float]]]:
    """For each contender, what `of_all_ranks` says of its steps."""
    mesh = init_device_mesh("cpu", OVER_GLOO, mesh_dim_names=("dp", "tp"))
    runners = {name: Runner(name, settings, mesh) for name in settings.contenders}
    for runner in runners.values():
        runner.warm_up()
    gc.freeze()  # what exists by now is not looked through again
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in settings.contenders}
    for _, name in turns(settings.contenders, settings.repeats):
        with no_garbage_collection():
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            runners[name].step()
            times[name].append((time.perf_counter() - clock, time.process_time() - processor))
    return {name: of_all_ranks(times[name], runner.losses) for name, runner in runners.items()}


def on_the_host(settings: Settings) -> dict[str, dict[str, list[float]]]:
    """For each contender, processor seconds of each phase of one rank, in a group that sends nothing."""
    with alone(ON_THE_HOST[0] * ON_THE_HOST[1]):
        mesh = init_device_mesh("cpu", ON_THE_HOST, mesh_dim_names=("dp", "tp"))
        runners = {name: Runner(name, settings, mesh) for name in settings.contenders}
        for runner in runners.values():
            runner.warm_up()
        gc.freeze()
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in settings.contenders}
        for _, name in turns(settings.contenders, settings.repeats):
            with no_garbage_collection():
                runners[name].time(into=found[name])
        return found


def models(settings: Settings) -> list[Settings]:
    """The model of each contender with few units, and with many."""
    return [replace(settings, contenders=(name,), units=units) for name in settings.contenders for units in host.COUNTED_UNITS]


def run_under_valgrind(settings: Settings) -> None:
    with alone(ON_THE_HOST[0] * ON_THE_HOST[1]):
        mesh = init_device_mesh("cpu", ON_THE_HOST, mesh_dim_names=("dp", "tp"))
        for one in models(settings):
            runner = Runner(one.contenders[0], one, mesh)
            runner.warm_up()
            count_phases(runner)


def instructions_of(settings: Settings, timeout: float) -> dict[str, dict[str, float]]:
    """Instructions for each unit, by contender and phase."""
    names = [(*one.contenders, one.units, phase) for one in models(settings) for _ in range(STEPS) for phase in PHASES]
    sizes = ["--width", str(settings.width), "--length", str(settings.length)]
    program = [__file__, "--contenders", *settings.contenders, "--styles", settings.style, *sizes, "--inside"]
    return per_unit(count(program, names, timeout), settings.contenders, PHASES)


def added(phases: dict[str, Any], bare: dict[str, Any]) -> Any:
    return phases["forward"] + phases["backward"] - (bare["forward"] + bare["backward"])


def measure(settings: Settings, host_width: int, timeout: float) -> tuple[dict[str, Any], list[Bar]]:
    """One style, as it is written down, and its bars."""
    steps = over_gloo(over_processes, settings, OVER_GLOO[0] * OVER_GLOO[1], timeout)
    _, complaints = compare_losses(steps, 1e-4)
    if complaints:
        raise SystemExit(f"{settings.label}: the losses differ: {'; '.join(complaints)}")
    small = replace(settings, width=host_width, length=4)
    seconds = elsewhere(on_the_host, small, timeout)
    case: dict[str, Any] = {"settings": asdict(settings), "host_settings": asdict(small), "steps": steps, "host_seconds": seconds}
    samples = {name: Sample.of(one["seconds_per_step"]) for name, one in steps.items()}
    micro = {
        name: {phase: Sample.of([1e6 * one / small.units for one in phases[phase]]) for phase in PHASES}
        for name, phases in seconds.items()
    }
    columns = ["step, ms", "processor, ms", *(f"{phase}, us" for phase in PHASES)]
    rows = {
        name: [
            *(f"{1e3 * Sample.of(steps[name][key]).median:.1f}" for key in ("seconds_per_step", "processor_seconds_per_step")),
            *(f"{micro[name][phase].median:.0f}" for phase in PHASES),
        ]
        for name in settings.contenders
    }
    if shutil.which("valgrind"):
        counted = case["instructions_per_unit"] = instructions_of(small, timeout)
        columns += [f"{phase}, thousand instructions" for phase in PHASES]
        for name in settings.contenders:
            rows[name] += [f"{counted[name][phase] / 1e3:.0f}" for phase in PHASES]
    print_table([settings.label, *columns], [[name, *row] for name, row in rows.items()])
    bars = []
    for name in ("ours", "door_fsdp2"):
        if not {name, "fsdp2", "bare"} <= samples.keys():
            continue
        title = f"{TITLES[name]} / FSDP2"
        bars.append(
            Bar.ratio(
                f"dimensions: a step of 2 x 2 over gloo, {title}", STEP_BAR, samples[name], samples["fsdp2"], settings.label
            )
        )
        mine, theirs = (added(micro[one], micro["bare"]) for one in (name, "fsdp2"))
        bars.append(Bar.ratio(f"dimensions: added host time, {title}", ADDED_BAR, mine, theirs, small.label))
        if "instructions_per_unit" in case:
            mine, theirs = (added(counted[one], counted["bare"]) for one in (name, "fsdp2"))
            bars.append(Bar(f"dimensions: added instructions, {title}", ADDED_BAR, mine / theirs, small.label))
    return case, bars


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=[*STYLES])
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of the model over gloo")
    parser.add_argument("--length", type=int, default=8, help="of its sequences")
    parser.add_argument("--host-width", type=int, default=32, help="of the model in the group that sends nothing")
    parser.add_argument("--repeats", type=int, default=40, help="measurements of each contender")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.inside:
        run_under_valgrind(Settings(tuple(options.contenders), options.styles[0], 0, options.width, options.length, 0))
        return
    report, names = begin("dimensions", options, NAMES)
    report["cases"], bars = [], []
    for style in options.styles:
        settings = Settings(names, style, options.units, options.width, options.length, options.repeats)
        case, held = measure(settings, options.host_width, options.timeout)
        report["cases"].append(case)
        bars += held
    write(report, bars, options.out)


if __name__ == "__main__":
    main()
