"""How much of the communication a step hides behind its computing, over a simulated wire, against max(computing, communication).

    python benchmarks/overlap.py
    python benchmarks/overlap.py --contenders fsdp2 ours --loads 0.5 1 --repeats 5

One process plays rank 0 of W. Computing is sleeping: a block's forward takes `--milliseconds`, its backward twice that, so
that neither the machine nor its neighbours matter. Communication is a time too: all groups share one wire, on which a
collective takes latency + received bytes / bandwidth, one after another in the order of their launches (simulated_link.py).
The bandwidth is chosen so that the communication of FULL_SHARD takes 0.1 to 4 times as long as computing (`load`).

What is measured is when each engine launches a collective and when it waits for it. On the CPU all of them wait on the host.
For FSDP2 and FSDP1, whose overlap on CUDA comes from streams, that means that most gathers and all reductions are waited for
at their launch, so theirs are figures of CPU training, not of CUDA. `fsdp2_prefetch` is FSDP2 asked for asynchronous gathers,
one unit ahead both ways. Ours reduces by an exchange of chunks here, as on any CPU.

`ideal` is max(computing, communication) for what this very contender sends. No engine reaches it at loads near 1: the first
gather comes before all computing and the last reduction after it, and who replicates has nothing to send before the backward.
`reachable` is what is left when these are taken into account.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from common import Bar, arguments, be_steady, begin, markdown, write
from engines import CONTENDERS, DDP, FSDP2, TITLES, Ours, Unit, turns
from simulated_link import Link, joined
from torch import Tensor, library, nn
from torch.utils.flop_counter import register_flop_formula

import fsdp

LOADS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


PER_SECOND = 1e12
"""Operations that the operator that sleeps states for each second: by these `fsdp.plan` knows how long it takes."""


@library.custom_op("fsdp_benchmarks::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    """Wait, and return a copy."""
    time.sleep(seconds)
    return x.clone()


@sleep.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@register_flop_formula(torch.ops.fsdp_benchmarks.sleep)
def _operations(x: Any, seconds: float, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(seconds * PER_SECOND)


class Sleeps(torch.autograd.Function):
    """Computes nothing with its weights, for a while, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, *weights: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*weights)
        result: Tensor = sleep(x, seconds)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return sleep(gradient, 2 * ctx.seconds), None, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


class Block(nn.Module):
    """The unit: four square weights."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(width, width)) for _ in range(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Sleeps.apply(x, self.seconds, *self.weights)  # type: ignore[no-untyped-call]
        return output


class Model(nn.Module):
    """Blocks, and one small parameter of the root's own."""

    def __init__(self, blocks: int, width: int, seconds: float) -> None:
        super().__init__()
        self.enter = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.enter
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _bytes_of_a_block(module: nn.Module, unit: Unit) -> int:
    block = next(child for child in module.modules() if isinstance(child, unit))
    return sum(parameter.numel() * parameter.element_size() for parameter in block.parameters())


class DDPByBlocks(DDP):
    def __init__(self) -> None:
        super().__init__()
        self.options += ", a bucket as large as a block"

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, **options: Any) -> nn.Module:
        block = _bytes_of_a_block(module, unit)
        return super().wrap(module, unit, half, bucket_cap_mb=block / 2**20, init_sync=False)


class OursByBlocks(Ours):
    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, **options: Any) -> nn.Module:
        block = _bytes_of_a_block(module, unit) / 2**20
        return super().wrap(module, unit, half, reduction=fsdp.ReductionPolicy(bucket_cap_mb=block, first_bucket_mb=block))


class FSDP2Prefetching(FSDP2):
    def __init__(self) -> None:
        super().__init__()
        self.options += "; _set_unshard_async_op(True), one unit prefetched in forward and in backward"

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False) -> nn.Module:
        model: Any = super().wrap(module, unit, half)
        blocks: list[Any] = [child for child in model.modules() if isinstance(child, unit)]
        for one in (model, *blocks):
            one._set_unshard_async_op(True)
        model.set_modules_to_forward_prefetch(blocks[:1])
        for this, following in pairwise(blocks):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
        return model  # type: ignore[no-any-return]


HERE = {
    **CONTENDERS,
    "ddp": DDPByBlocks(),
    "ours_no_shard": OursByBlocks(
        "ours_no_shard",
        'auto_wrap_policy={unit}, sharding_strategy="NO_SHARD", a bucket as large as a block',
        sharding_strategy="NO_SHARD",
    ),
    "fsdp2_prefetch": FSDP2Prefetching(),
}
REPLICATED = ("ddp", "ours_no_shard")
NAMES = ("bare", "ddp", "fsdp1", "fsdp2", "fsdp2_prefetch", "ours", "ours_no_shard")


@dataclass(frozen=True, slots=True)
class Settings:
    contenders: tuple[str, ...]
    loads: tuple[float, ...]
    world: int
    blocks: int
    width: int
    milliseconds: float
    latency_microseconds: float
    repeats: int

    @property
    def computing(self) -> float:
        """Seconds of a step."""
        return 3 * self.blocks * self.milliseconds / 1e3

    def bandwidth(self, load: float) -> float:
        """At which FULL_SHARD without padding or small talk communicates for `load` times the computing."""
        received = (3 * self.blocks * 4 * self.width**2 + 2 * self.width) * 4 * (self.world - 1) / self.world
        return received / (load * self.computing - (3 * self.blocks + 2) * self.latency_microseconds / 1e6)


def run(model: nn.Module, x: Tensor, link: Link) -> dict[str, float]:
    """One step, and what it sent."""
    link.reset()
    gc.disable()
    begin = time.perf_counter()
    model(x).backward()
    elapsed = time.perf_counter() - begin
    gc.enable()
    model.zero_grad()
    return {
        "seconds": elapsed,
        "communication": link.busy,
        "received": sum(link.received.values()),
        "collectives": sum(link.collectives.values()),
    }


def measure(settings: Settings) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By load and contender, every single step."""
    be_steady()
    link = Link(1e12, 0.0)
    with joined(link, settings.world):
        models = {
            name: HERE[name].wrap(Model(settings.blocks, settings.width, settings.milliseconds / 1e3), Block)
            for name in settings.contenders
        }
        x = torch.ones(1, settings.width)
        for model in models.values():
            for _ in range(3):
                run(model, x, link)  # lazy initialisation, orders that are learned
        found: dict[str, dict[str, list[dict[str, float]]]] = {}
        for load in settings.loads:
            link.bandwidth, link.latency = settings.bandwidth(load), settings.latency_microseconds / 1e6
            here: dict[str, list[dict[str, float]]] = {name: [] for name in settings.contenders}
            for _, name in turns(settings.contenders, settings.repeats):
                here[name].append(run(models[name], x, link))
            found[str(load)] = here
        del models
        gc.collect()
    return found


def summarise(found: dict[str, dict[str, list[dict[str, float]]]], settings: Settings) -> list[dict[str, Any]]:
    """One line for each load and contender: the median step, ratios to the ideals, and what part of its communication shows."""
    lines = []
    for load, here in found.items():
        # sleeping takes a little longer than it should
        computing = median(step["seconds"] for step in here["bare"]) if "bare" in here else settings.computing
        for name, steps in here.items():
            seconds = median(step["seconds"] for step in steps)
            communication = steps[-1]["communication"]
            ideal = max(computing, communication)
            if name in REPLICATED:
                # a third of the computing is over before there is a gradient, and the last of them comes at the end
                reachable = computing / 3 + max(computing * 2 / 3 + communication / settings.blocks, communication)
            else:
                # a block has three collectives: the very first and the very last are alone
                reachable = max(computing + 2 * communication / (3 * settings.blocks), communication)
            lines.append(
                {
                    "load": float(load),
                    "contender": name,
                    "seconds": seconds,
                    "communication": communication,
                    "received": steps[-1]["received"],
                    "collectives": steps[-1]["collectives"],
                    "to_ideal": seconds / ideal,
                    "to_reachable": seconds / reachable,
                    "exposed": (seconds - computing) / communication if communication else 0.0,
                }
            )
    return lines


def judge(lines: Sequence[dict[str, Any]]) -> list[Bar]:
    bars = []
    for name, peers in (("ours", ("fsdp1", "fsdp2", "fsdp2_prefetch")), ("ours_no_shard", ("ddp",))):
        mine = {line["load"]: line for line in lines if line["contender"] == name}
        if not mine:
            continue
        if name not in REPLICATED:
            value, load = max((line["to_ideal"], load) for load, line in mine.items())
            bars.append(Bar("overlap: step / max(computing, communication)", 1.10, value, f"{name}, load {load:g}"))
        value, load = max((line["to_reachable"], load) for load, line in mine.items())
        bars.append(Bar("overlap: step / reachable", 1.10, value, f"{name}, load {load:g}"))
        for peer in peers:
            theirs = {line["load"]: line for line in lines if line["contender"] == peer}
            if theirs:
                value, load = max((line["seconds"] / theirs[load]["seconds"], load) for load, line in mine.items())
                bars.append(Bar(f"overlap: step / {TITLES[peer]}", 1.0, value, f"{name}, load {load:g}"))
    return bars


def show(lines: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(line["contender"] for line in lines))
    rows = []
    for load in dict.fromkeys(line["load"] for line in lines):
        here = {line["contender"]: line for line in lines if line["load"] == load}
        rows.append([f"{load:g}", *(f"{1e3 * here[n]['seconds']:.0f} ({here[n]['to_ideal']:.2f})" for n in names)])
    print("\nms of the median step (and relative to the ideal of what this contender sends)")
    print(markdown(["load", *names], rows))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    add_settings(parser, LOADS, repeats=7)
    return parser.parse_args()


def add_settings(parser: argparse.ArgumentParser, loads: Sequence[float], repeats: int) -> None:
    """The options of the model and the wire, with these defaults."""
    parser.add_argument("--loads", type=float, nargs="+", default=loads, help="communication of FULL_SHARD / computing")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128, help="a block is four squares of it")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a block's forward; its backward takes twice that")
    parser.add_argument("--latency-microseconds", type=float, default=50.0, help="of each collective")
    parser.add_argument("--repeats", type=int, default=repeats)


def settings_of(options: argparse.Namespace, names: tuple[str, ...]) -> Settings:
    fields = {name: getattr(options, name) for name in Settings.__dataclass_fields__ if name not in ("contenders", "loads")}
    return Settings(contenders=names, loads=tuple(options.loads), **fields)


def main() -> None:
    options = parse()
    report, names = begin("overlap", options, NAMES, HERE)
    settings = settings_of(options, names)
    report["settings"] = {**asdict(settings), "computing": settings.computing}
    report["bandwidths"] = {str(load): settings.bandwidth(load) for load in settings.loads}
    report["steps"] = measure(settings)
    lines = report["lines"] = summarise(report["steps"], settings)
    show(lines)
    write(report, judge(lines), options.out)


if __name__ == "__main__":
    main()
