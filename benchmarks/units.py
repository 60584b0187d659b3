"""Units that "auto" and `fsdp.plan` choose, and small units that share collectives, beside units chosen by hand.

    python benchmarks/units.py
    python benchmarks/units.py --models tiny --repeats 30

Estimated: a plan compares choices for each model of workloads.py and two of the built-in shapes, each on a cluster of GPUs and on
processors. It says how far `auto_wrap_policy="auto"`, and the units that `fsdp.plan` recommends by itself, are from the best
choice by hand, each with the faster of two strategies, without a limit of the memory and with limits at which one of the choices
by hand fits with 5 % to spare. A rehearsal gives the same numbers on every machine.

Measured: steps over gloo as in step.py, in turns: DDP, ours with units by hand, with "auto", and with units by hand that share
collectives (`ReductionPolicy(coalesce_cap_mb=1)`).
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import step
import torch
from common import Bar, Sample, arguments, begin, markdown, write
from torch import nn
from workloads import WORKLOADS

import fsdp
from fsdp.commands.planning.shapes import SHAPES, Block, Decoder, make_tokens

LEAVES: Final = (nn.Linear, nn.Embedding, nn.Conv2d)
SPARE: Final = 1.05
"""A limit of the memory / what the choice by hand needs that sets it."""
STRATEGIES: Final = ("SHARD_GRAD_OP", "FULL_SHARD")
CLUSTERS: Final[dict[str, dict[str, Any]]] = {
    "16 h100": {"world_size": 16, "device": "h100", "network": "ib-ndr"},
    "8 processors": {"world_size": 8, "device": "cpu", "network": "ethernet-10", "per_host": 1},
}


NAMES: Final = ("ddp", "ours", "ours_auto", "ours_sharing")


@dataclass(frozen=True)
class Case:
    """A model, and units of it that somebody could choose by hand."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    unit: type[nn.Module]

    def by_hand(self) -> dict[str, Any]:
        def with_ends(name: str, module: nn.Module) -> bool:
            return isinstance(module, self.unit) or ("." not in name and isinstance(module, LEAVES))

        return {"one unit": None, "units": {self.unit}, "units and ends": with_ends, "leaves": {*LEAVES}}


def cases() -> dict[str, Case]:
    def batch(make: Callable[[torch.Generator], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        with torch.device("cpu"):
            return tuple(one.to("meta") for one in make(torch.Generator()))

    found = {
        name: Case(one.make, lambda one=one: batch(one.batch), one.unit)  # type: ignore[misc]
        for name, one in WORKLOADS.items()
    }
    for name, length in (("decoder-125m", 512), ("decoder-1b", 1024)):
        found[name] = Case(lambda name=name: Decoder(SHAPES[name]), lambda length=length: make_tokens(1, length), Block)  # type: ignore[misc]
    return found


def estimate(name: str, case: Case, cluster: str) -> Iterator[dict[str, Any]]:
    """For each limit of the memory: seconds of the best choice by hand, with "auto", and of what a plan chooses by itself."""

    def rehearsed(memory: int | None, units: Any) -> list[Any]:
        found = fsdp.plan(
            case.build,
            inputs=case.inputs,
            strategies=STRATEGIES,
            checkpointing=[False],
            offload=[False],
            units=units,
            memory=memory,
            **CLUSTERS[cluster],
        )
        return [one for one in found.candidates if one.rehearsal is not None]

    def fastest(found: list[Any], limit: int | None) -> float | None:
        return min((one.rehearsal.seconds for one in found if limit is None or one.rehearsal.peak <= limit), default=None)

    hand = rehearsed(None, case.by_hand())
    for limit in (None, *sorted({int(SPARE * one.rehearsal.peak) for one in hand})[::2]):
        chosen = rehearsed(limit, None)
        yield {
            "model": name,
            "cluster": cluster,
            "memory": limit,
            "by_hand": fastest(hand, limit),
            "auto": fastest([one for one in chosen if one.choice.units == "auto"], limit),
            "plan": fastest(chosen, limit),
        }


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Steps over gloo on two ranks, a case for each model, and what was computed otherwise."""
    found, complaints = [], []
    for model in options.models:
        settings = step.Settings(NAMES, model, "plain", 2, 1, options.repeats, options.small)
        case, _, wrong = step.measure(settings, {}, options.timeout)
        found.append(case)
        complaints += wrong
    return found, complaints


def judge_estimates(lines: Sequence[dict[str, Any]]) -> list[Bar]:
    def worst(name: str, title: str, kept: Sequence[dict[str, Any]]) -> Bar:
        # where nothing fits, no time is short enough
        ratios = [(one[name] or math.inf) / one["by_hand"] for one in kept]
        at = max(range(len(kept)), key=ratios.__getitem__)
        return Bar(f"units: {title}, estimated", 1.05, ratios[at], kept[at]["model"])

    bars = []
    for cluster in CLUSTERS:
        mine = [one for one in lines if one["cluster"] == cluster]
        free = [one for one in mine if one["memory"] is None]
        bars += [
            worst("auto", f'"auto" / the best by hand, {cluster}', free),
            worst("plan", f"a plan's choice / the best by hand, {cluster}", free),
            worst("plan", f"the same with a limit of the memory, {cluster}", [one for one in mine if one["memory"] is not None]),
        ]
    return bars


def judge_steps(cases: Sequence[dict[str, Any]]) -> list[Bar]:
    bars = []
    for case in cases:
        times = {name: Sample.of(one["seconds_per_step"]) for name, one in case["contenders"].items()}
        model, shared = case["settings"]["model"], times["ours_sharing"]
        bars.append(Bar.ratio('units: ours, "auto" / by hand, over gloo', 1.05, times["ours_auto"], times["ours"], model))
        bars.append(Bar.ratio("units: ours, shared collectives / DDP, over gloo", 2.0, shared, times["ddp"], model))
    return bars


def show(lines: Sequence[dict[str, Any]]) -> None:
    def milliseconds(seconds: float | None) -> str:
        return "does not fit" if seconds is None else f"{1e3 * seconds:.2f}"

    rows = [
        [
            one["model"],
            one["cluster"],
            "" if one["memory"] is None else f"{one['memory'] / 2**20:.1f}",
            *(milliseconds(one[name]) for name in ("by_hand", "auto", "plan")),
        ]
        for one in lines
    ]
    print(markdown(["model", "cluster", "memory, MiB", "by hand, ms", '"auto"', "plan"], rows))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=[*cases()], choices=[*cases()])
    parser.add_argument("--repeats", type=int, default=12, help="measured steps of each contender")
    parser.add_argument("--small", action="store_true", help="small models, to see that all runs; estimates nothing")
    options = parser.parse_args()
    report, _ = begin("units", options, NAMES)
    found = cases()
    lines = [
        line
        for name in options.models
        for cluster in CLUSTERS
        for line in (() if options.small else estimate(name, found[name], cluster))
    ]
    show(lines)
    options.models = [name for name in options.models if name in WORKLOADS]
    report["lines"] = lines
    report["cases"], complaints = measure(options)
    write(report, (judge_estimates(lines) if lines else []) + judge_steps(report["cases"]), options.out)
    if complaints:
        raise SystemExit("the losses differ: " + "; ".join(complaints))


if __name__ == "__main__":
    main()
