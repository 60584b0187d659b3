"""Peak bytes, host waits and computed times of a step on the pretend accelerator, beside FSDP1, FSDP2 and DDP. No GPU takes part.

    python benchmarks/accelerator.py
    python benchmarks/accelerator.py --world 4 --contenders ours fsdp2
    python benchmarks/accelerator.py --contenders ours fsdp1 --timeline 1.0

The pretend accelerator (docs/development/pretend-accelerator.md) is a device type of torch whose allocator follows the rules of
torch's for CUDA, and which counts every time the host waits for a stream. Rank r of W is on its device r, in one process. Ours
runs on simulated ranks and the peers on threads with a process group of torch. Both launch the same collectives of the
accelerator, with the same order of sums. The norm of gradients is added in an order of each engine's own, so losses differ in
their last bits.

A step is a forward, a backward, the gradients' norm, AdamW (foreach) and the dropping of gradients. `peak` is what the device
holds at most in steady steps, with everything: parameters, optimizer state, activations, gradients, buffers. `training` is the
same without the optimizer's step, which makes temporary tensors of the size of a shard for all alike. `waits` are those of the
host in one step; `clipping` are those that the norm adds. Time is not measured: it would say nothing.

`times` are computed (tests/support/accelerator/timeline.py). What the hosts enqueue is recorded, and played again with a clock:
each kernel takes as long as its bytes or its products of matrices at given speeds, each collective as long as the bytes that a
rank receives, and the host no time unless it waits. The collectives of one communicator run one after another, and communicators
share the link of their rank. FSDP1, FSDP2 and DDP have one communicator, ours has one for gathers and one for reductions.

What a forward and a backward take is divided by what the bare model takes. It is 1 and three parts. `gathers` and `reductions`
are how long the computing stream, or at the end the host, had nothing to do but wait for them. `copies` are kernels of the
engine: those of the computing stream, and those of other streams that it waited for. `apart` is the same step if each
communicator had a link of its own. `--timeline LOAD` prints each collective and each wait instead, and writes nothing.
"""

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Bar, add_sizes, arguments, be_steady, begin, elsewhere, markdown, sizes_of, write
from engines import FSDP2, TITLES, Bare, Ours, Unit, contenders
from memory import SIZES
from torch import nn
from workloads import GPT, Block, Sizes

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.accelerator.build import missing
from tests.support.accelerator.timeline import Speeds, Stretch, Timeline

DEVICE = "pretend"


def last_of(module: nn.Module, unit: Unit) -> Any:
    """The unit that a forward calls last."""
    return [child for child in module.modules() if isinstance(child, unit)][-1]


class FSDP2Keeping(FSDP2):
    """The last unit is kept from its forward to its backward."""

    def __init__(self, device: str) -> None:
        super().__init__(device, "fsdp2_last_kept")
        self.options += "; the last unit with reshard_after_forward=False"

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False) -> nn.Module:
        wrapped: Any = super().wrap(module, unit, half)
        last = last_of(module, unit)
        last.set_reshard_after_forward(False, recurse=False)
        return wrapped


class OursKeeping(Ours):
    """The last unit is kept from its forward to its backward."""

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, **options: Any) -> nn.Module:
        import fsdp

        last = last_of(module, unit)
        fsdp.fully_shard(last, reshard_after_forward=False)
        return super().wrap(module, unit, half, **options)


ENGINES: dict[str, Bare] = {
    **contenders(DEVICE),
    "fsdp2_last_kept": FSDP2Keeping(DEVICE),
    "ours_last_kept": OursKeeping("ours_last_kept", "as ours, the last unit with reshard_after_forward=False"),
    "ours_prefetch_2": Ours("ours_prefetch_2", "as ours, prefetch=2", prefetch=2),
}
NAMES = (
    *("ddp", "fsdp1", "fsdp1_orig", "fsdp2", "fsdp2_last_kept"),
    *("ours", "ours_last_kept", "ours_prefetch_2", "ours_no_shard"),
)
STEPS = 4
"""The first two are not counted: engines learn the order of their units, and optimizers make their state."""


LINKS = (0.5, 1.0, 2.0)
"""Speeds of the link: how long the traffic of a fully sharded step takes, as a share of what the bare model takes."""
TOKENS = 4096
"""Products of matrices take as long as with so many tokens a rank."""
MARKS = (0, 1)
"""Where the step begins and ends whose time is computed."""
PRODUCTS, BYTES = 3e14, 2e12
"""Multiplications and additions a second, and bytes that kernels read and write a second: about those of a large GPU."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One contender, in a process of its own: torch cannot lose an accelerator again."""

    contender: str
    world: int
    sizes: Sizes


def measure(settings: Settings) -> dict[str, Any]:
    """One contender: what each rank counted, and its losses."""
    from tests.support.accelerator.device import Scheduler, host_waits, load
    from tests.support.accelerator.threads import run_threads
    from tests.support.accelerator.world import run

    be_steady()
    load()
    module = GPT(settings.sizes)
    device_module = torch.get_device_module(DEVICE)
    engine = ENGINES[settings.contender]

    def train(rank: int) -> dict[str, Any]:
        device = torch.device(DEVICE, rank)
        model = engine.wrap(copy.deepcopy(module).to(device), Block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        shape = (settings.sizes.batch, settings.sizes.sequence)
        losses, waits, clipping, training, whole = [], [], [], [], []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(settings.world * step + rank)
            tokens = torch.randint(settings.sizes.vocabulary, shape, generator=generator).to(device)
            device_module.synchronize(rank)
            device_module.reset_peak_memory_stats(rank)
            before = host_waits(rank)
            loss = model(tokens, tokens)
            loss.backward()
            between = host_waits(rank)
            training.append(int(device_module.max_memory_allocated(rank)))
            engine.clip(model)
            after = host_waits(rank)
            optimizer.step()
            optimizer.zero_grad()
            waits.append(host_waits(rank) - before)
            whole.append(int(device_module.max_memory_allocated(rank)))
            clipping.append(after - between)
            losses.append(loss.detach())
            del loss
        rest = int(device_module.memory_allocated(rank))
        counted = {"peak": whole, "training": training, "waits": waits, "clipping": clipping}
        steady = {what: max(values[2:]) for what, values in counted.items()}
        return {"at_rest": rest, **steady, "losses": [float(loss) for loss in losses]}

    simulated = settings.contender.startswith("ours")
    ranks = (run if simulated else run_threads)(settings.world, train, Scheduler.EAGER)
    counted = {what: max(one[what] for one in ranks) for what in ("at_rest", "training", "peak", "waits", "clipping")}
    return {**counted, "losses": [one["losses"] for one in ranks]}


def times(settings: Settings) -> dict[str, dict[str, float]]:
    """For each speed of the link, what a forward and a backward take and wait for, as multiples of what the bare model takes."""
    records, found = _records(settings), {}
    for load in LINKS:
        bare, timeline = _play(settings, records, load)
        step, apart = _slowest(timeline), _slowest(_play(settings, records, load, shares_link=False)[1])
        waited = step.reasons
        parts = {
            "gathers": waited["gathers"],
            "reductions": waited["reductions"],
            "copies": step.computing - bare.seconds + waited["copies"] + waited["peers"],
        }
        seconds = {"step": step.seconds, **parts, "apart": apart.seconds}
        found[str(load)] = {what: one / bare.seconds for what, one in seconds.items()}
    return found


def timeline_of(settings: Settings, load: float) -> list[str]:
    """The collectives and the waits of the slowest rank, in shares of the bare model's step: when, what, and how long."""
    bare, timeline = _play(settings, _records(settings), load)
    step = _slowest(timeline)
    lines: list[tuple[float, str]] = []

    def share(seconds: float) -> str:
        return f"{seconds / bare.seconds:.4f}"

    for collective, arrived in timeline.collectives(step.device):
        if collective.begin >= step.begin:
            there, ends = share(arrived - step.begin), share(collective.end - step.begin)
            what = f"{collective.kind}, {collective.received / 1e6:.3f} MB: there {there}, ends {ends}"
            lines.append((collective.begin, what))
    for wait in step.waits:
        why = ", ".join(f"{share(seconds)} {reason}" for reason, seconds in wait.reasons.items())
        lines.append((wait.begin, f"    computing waits: {why}"))
    head = f"{TITLES[settings.contender]}, load {load:g}: {share(step.seconds)}"
    return [head, *(f"{share(begin - step.begin)}  {what}" for begin, what in sorted(lines))]


def _play(settings: Settings, records: tuple[str, str], load: float, shares_link: bool = True) -> tuple[Stretch, Timeline]:
    """The step of the bare model, and the timeline of a contender whose link is as fast as `load` says."""
    traffic = 3 * (settings.world - 1) / settings.world * sum(one.nbytes for one in GPT(settings.sizes).parameters())
    products = PRODUCTS * settings.sizes.batch * settings.sizes.sequence / TOKENS
    bare = Timeline(records[0], Speeds(products, BYTES, 1.0)).between(0, *MARKS)
    return bare, Timeline(records[1], Speeds(products, BYTES, traffic / (load * bare.seconds)), shares_link)


def _slowest(timeline: Timeline) -> Stretch:
    """The step of the rank that takes the longest."""
    return max((timeline.between(device, *MARKS) for device in timeline.devices), key=lambda step: step.seconds)


def _records(settings: Settings) -> tuple[str, str]:
    """What the hosts enqueue for the bare model, and with a contender."""
    be_steady()
    return _record(Settings("bare", 1, settings.sizes)), _record(settings)


def _record(settings: Settings) -> str:
    """What the hosts of all ranks enqueue in three steps. The third one is between `MARKS`."""
    from tests.support.accelerator.device import Scheduler, load, mark, recording
    from tests.support.accelerator.threads import run_threads
    from tests.support.accelerator.world import run

    load()
    module, engine = GPT(settings.sizes), ENGINES[settings.contender]
    synchronize = torch.get_device_module(DEVICE).synchronize

    def train(rank: int) -> None:
        device = torch.device(DEVICE, rank)
        model = engine.wrap(copy.deepcopy(module).to(device), Block)
        for step in range(3):
            tokens = torch.zeros(settings.sizes.batch, settings.sizes.sequence, dtype=torch.int64, device=device)
            synchronize(rank)
            if step == 2:
                mark(rank, MARKS[0])
            model(tokens, tokens).backward()
            model.zero_grad()
        synchronize(rank)
        mark(rank, MARKS[1])

    is_simulated = settings.contender.startswith(("ours", "bare"))
    with recording() as recorded:
        (run if is_simulated else run_threads)(settings.world, train, Scheduler.EAGER)
        return recorded()


def judge(cases: Sequence[dict[str, Any]]) -> list[Bar]:
    """Ours against the better of FSDP1 and FSDP2, and no host wait."""
    found = {case["settings"]["contender"]: case for case in cases}
    sharded = [found[name] for name in ("fsdp1", "fsdp1_orig", "fsdp2") if name in found]
    if "ours" not in found:
        return []
    ours, case = found["ours"], f"{found['ours']['settings']['world']} ranks"
    bars = [Bar("accelerator: host waits of a step", 0.0, float(ours["waits"]), case)]
    if sharded:
        for what, name in (("training", "forward and backward"), ("peak", "step")):
            ratio = ours[what] / min(one[what] for one in sharded)
            bars.append(Bar(f"accelerator: peak bytes, {name} / the best of FSDP1 and FSDP2", 0.95, ratio, case))
    return bars


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--world", type=int, default=8, help="ranks, at most 8")
    parser.add_argument("--timeline", type=float, metavar="LOAD", help="print each collective and each wait at this load")
    add_sizes(parser, SIZES)
    return parser.parse_args()


def main() -> None:
    if (why := missing()) is not None:
        raise SystemExit(why)
    options = parse()
    report, names = begin("accelerator", options, NAMES, ENGINES)
    settings = [Settings(name, options.world, sizes_of(options, SIZES)) for name in names]
    if options.timeline is not None:
        for one in settings:
            print("\n".join(elsewhere(partial(timeline_of, load=options.timeline), one, options.timeout)))
        return
    cases = [
        {
            "settings": asdict(one),
            **elsewhere(measure, one, options.timeout),
            "times": elsewhere(times, one, options.timeout),
        }
        for one in settings
    ]
    wanted = cases[-1]["losses"]
    for case in cases:
        pairs = [(a, b) for mine, its in zip(case["losses"], wanted, strict=True) for a, b in zip(mine, its, strict=True)]
        case["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
    rows = [
        [
            TITLES[case["settings"]["contender"]],
            *(f"{case[what] / 1e6:.3f}" for what in ("at_rest", "training", "peak")),
            *(str(case[what]) for what in ("waits", "clipping")),
            f"{case['largest_loss_difference']:.0e}",
            *(f"{found['step']:.3f}" for found in case["times"].values()),
        ]
        for case in cases
    ]
    columns = ["contender", "MB at rest", "training", "peak", "host waits", "of which clipping", "losses"]
    print(markdown([*columns, *(f"time, link {share}" for share in LINKS)], rows))
    write({**report, "cases": cases}, judge(cases), options.out)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of autograd for a device may still drop a graph, and Python must not end in the middle of that
