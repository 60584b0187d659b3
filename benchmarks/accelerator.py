"""Peak bytes, host waits and computed times of a step on the pretend accelerator, beside FSDP1, FSDP2 and DDP. No GPU takes part.

    python benchmarks/accelerator.py
    python benchmarks/accelerator.py --world 4 --contenders ours fsdp2

The pretend accelerator (docs/development/pretend-accelerator.md) is a device type of torch whose allocator follows the rules of
torch's for CUDA, and which counts every time the host waits for a stream. Rank r of W is on its device r, in one process. Ours
runs on simulated ranks and the peers on threads with a process group of torch. Both launch the same collectives of the
accelerator, with the same order of sums. The norm of gradients is added in an order of each engine's own, so losses differ in
their last bits.

A step is a forward, a backward, the gradients' norm, AdamW (foreach) and the dropping of gradients. `peak` is what the device
holds at most in steady steps, with everything: parameters, optimizer state, activations, gradients, buffers. `training` is the
same without the optimizer's step, which makes temporary tensors of the size of a shard for all alike. `waits` are those of the
host in one step; `clipping` are those that the norm adds. Time is not measured: it would say nothing.

`times` are computed. Each kernel takes as long as its bytes or its products of matrices at given speeds, each collective as long
as the bytes that a rank receives, one at a time in the order of launches, and the host no time unless it waits. What a forward
and a backward take is divided by what the bare model takes. What is above 1 was not hidden: collectives, and copies of the
engine.
"""

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import Bar, add_sizes, arguments, be_steady, begin, elsewhere, markdown, sizes_of, write
from engines import TITLES, contenders
from memory import SIZES
from workloads import GPT, Block, Sizes

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.accelerator.build import missing

DEVICE = "pretend"
ENGINES = contenders(DEVICE)
NAMES = ("ddp", "fsdp1", "fsdp1_orig", "fsdp2", "ours", "ours_no_shard")
STEPS = 4
"""The first two are not counted: engines learn the order of their units, and optimizers make their state."""


LINKS = (0.5, 1.0)
"""Speeds of the link: how long the traffic of a fully sharded step takes, as a share of what the bare model takes."""
TOKENS = 4096
"""Products of matrices take as long as with so many tokens a rank."""
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


def virtual_times(settings: Settings) -> dict[str, float]:
    """For each speed of the link, the time of a forward and a backward as a multiple of what the bare model takes."""
    from tests.support.accelerator.device import keeping_time

    be_steady()
    traffic = 3 * (settings.world - 1) / settings.world * sum(one.nbytes for one in GPT(settings.sizes).parameters())
    products = PRODUCTS * settings.sizes.batch * settings.sizes.sequence / TOKENS
    with keeping_time(products, BYTES, 1.0):
        bare = _time_of_step(Settings("bare", 1, settings.sizes))
    times = {}
    for share in LINKS:
        with keeping_time(products, BYTES, traffic / (share * bare)):
            times[str(share)] = _time_of_step(settings) / bare
    return times


def _time_of_step(settings: Settings) -> float:
    """The computed seconds of the third forward and backward, on the rank that takes the longest."""
    from tests.support.accelerator.device import Scheduler, seconds
    from tests.support.accelerator.threads import run_threads
    from tests.support.accelerator.world import run

    module, engine = GPT(settings.sizes), ENGINES.get(settings.contender)

    def train(rank: int) -> float:
        device = torch.device(DEVICE, rank)
        model = copy.deepcopy(module).to(device)
        if engine is not None:
            model = engine.wrap(model, Block)
        began = 0.0
        for _ in range(3):
            tokens = torch.zeros(settings.sizes.batch, settings.sizes.sequence, dtype=torch.int64, device=device)
            torch.get_device_module(DEVICE).synchronize(rank)
            began = seconds(rank)
            model(tokens, tokens).backward()
            model.zero_grad()
        torch.get_device_module(DEVICE).synchronize(rank)
        return seconds(rank) - began

    is_simulated = settings.contender.startswith(("ours", "bare"))
    return max((run if is_simulated else run_threads)(settings.world, train, Scheduler.EAGER))


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
    add_sizes(parser, SIZES)
    return parser.parse_args()


def main() -> None:
    if (why := missing()) is not None:
        raise SystemExit(why)
    options = parse()
    report, names = begin("accelerator", options, NAMES, ENGINES)
    settings = [Settings(name, options.world, sizes_of(options, SIZES)) for name in names]
    cases = [
        {
            "settings": asdict(one),
            **elsewhere(measure, one, options.timeout),
            "times": elsewhere(virtual_times, one, options.timeout),
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
            *(f"{time:.3f}" for time in case["times"].values()),
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
