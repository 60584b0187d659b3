"""What `fsdp.plan` estimates, beside what it is an estimate of: steps over a simulated wire, and its own processor time.

    python benchmarks/plan.py
    python benchmarks/plan.py --loads 0.5 1 --repeats 3

The model and the wire are those of overlap.py: one process plays rank 0 of W, a block computes by sleeping, and a collective
takes latency + received bytes / bandwidth. `fsdp.measure_links` measures the wire through the process group; nothing else tells
the plan what the wire does. No product of matrices says how long sleeping takes. So the operator that sleeps states its
operations, and the device's throughput is measured with the plain model: it is what makes its step take as long as it did.
The plan compares ten choices at each load: strategies, with and without prefetching and checkpointing, and the model as one unit.
Then steps are measured. A plan leaves out the host time of the engine.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import torch
from common import Bar, arguments, be_steady, begin, markdown, write
from overlap import PER_SECOND, Block, Model, Settings, add_settings, run, settings_of
from simulated_link import Link, joined
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.commands.planning.shapes import SHAPES, Decoder, make_tokens

LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A choice: options of `fsdp.fully_shard`, and whether blocks are recomputed."""

    strategy: str
    prefetch: int | None = None
    in_units: bool = True
    """Whether blocks are units. Otherwise the model is one."""
    checkpointing: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What `fsdp.fully_shard` and `fsdp.plan` take alike."""
        return {} if self.prefetch is None else {"prefetch": self.prefetch}

    def wrap(self, model: Model) -> nn.Module:
        """Shard a model."""
        if self.checkpointing:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        policy = {Block} if self.in_units else None
        return fsdp.fully_shard(model, auto_wrap_policy=policy, sharding_strategy=self.strategy, **self.options)


CASES = {
    "NO_SHARD": Case("NO_SHARD"),
    "NO_SHARD, checkpointed": Case("NO_SHARD", checkpointing=True),
    "SHARD_GRAD_OP": Case("SHARD_GRAD_OP"),
    "SHARD_GRAD_OP, checkpointed": Case("SHARD_GRAD_OP", checkpointing=True),
    "SHARD_GRAD_OP, nothing ahead": Case("SHARD_GRAD_OP", prefetch=0),
    "SHARD_GRAD_OP, one unit": Case("SHARD_GRAD_OP", in_units=False),
    "FULL_SHARD": Case("FULL_SHARD"),
    "FULL_SHARD, checkpointed": Case("FULL_SHARD", checkpointing=True),
    "FULL_SHARD, nothing ahead": Case("FULL_SHARD", prefetch=0),
    "FULL_SHARD, one unit": Case("FULL_SHARD", in_units=False),
}
"""What is compared, by name."""


def make(settings: Settings) -> Model:
    return Model(settings.blocks, settings.width, settings.milliseconds / 1e3)


def throughput(settings: Settings, plain: Sequence[float]) -> float:
    """Operations a second of a device on which the plain model takes as long as it did."""
    return PER_SECOND * settings.computing / median(plain)


def estimated(settings: Settings, flops: float) -> dict[str, float]:
    """By case, the seconds of a step, with the wire as it is measured now."""
    found = fsdp.measure_links()
    found["device"] = replace(found["device"], flops=flops, half_flops=flops)

    def seconds(case: Case) -> float:
        plan = fsdp.plan(
            lambda: make(settings),
            settings.world,
            inputs=lambda: torch.ones(1, settings.width),
            loss=lambda output: output,
            optimizer=None,
            strategies=[case.strategy],
            units={"blocks": {Block} if case.in_units else None},
            checkpointing=[case.checkpointing],
            options=case.options,
            **found,
        )
        (rehearsal,) = (one.rehearsal for one in plan.candidates)
        assert rehearsal is not None
        return rehearsal.seconds

    return {name: seconds(case) for name, case in CASES.items()}


def measure(settings: Settings) -> tuple[list[float], list[dict[str, Any]]]:
    """Steps of the plain model; and one line for each load and case: estimated, and every single step."""
    be_steady()
    link = Link(1e12, 0.0)
    lines = []
    with joined(link, settings.world):
        x = torch.ones(1, settings.width)
        bare = make(settings)
        plain = [run(bare, x, link)["seconds"] for _ in range(settings.repeats)]
        models = {name: case.wrap(make(settings)) for name, case in CASES.items()}
        for model in models.values():
            for _ in range(3):
                run(model, x, link)  # lazy initialisation, orders that are learned
        for load in settings.loads:
            link.bandwidth, link.latency = settings.bandwidth(load), settings.latency_microseconds / 1e6
            link.reset()
            expected = estimated(settings, throughput(settings, plain))
            steps: dict[str, list[float]] = {name: [] for name in CASES}
            for _ in range(settings.repeats):
                for name, model in models.items():
                    steps[name].append(run(model, x, link)["seconds"])
            lines += [{"load": load, "case": n, "estimated": expected[n], "steps": steps[n]} for n in CASES]
        models.clear()
        gc.collect()
    return plain, lines


def processor_time() -> float:
    """Processor seconds of a plan of the largest size that is promised."""
    began = time.process_time()
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fsdp.plan(lambda: Decoder(SHAPES["decoder-8b"]), 1024, inputs=lambda: make_tokens(1, 4096), mp_policy=policy)
    return time.process_time() - began


def judge(lines: Sequence[dict[str, Any]], processor: float) -> list[Bar]:
    worst = max(lines, key=lambda one: abs(one["estimated"] / median(one["steps"]) - 1))
    error = abs(worst["estimated"] / median(worst["steps"]) - 1)
    pairs = [
        (one, other)
        for one, other in combinations(lines, 2)
        if one["load"] == other["load"] and abs(median(one["steps"]) / median(other["steps"]) - 1) > 0.1
    ]
    wrong = sum(
        (one["estimated"] < other["estimated"]) != (median(one["steps"]) < median(other["steps"])) for one, other in pairs
    )
    bars = [
        Bar("plan: error of an estimated step", 0.15, error, f"{worst['case']}, load {worst['load']:g}"),
        Bar("plan: processor seconds, 8B at 1,024 ranks", 10.0, processor, "8 choices"),
    ]
    if pairs:
        bars.append(Bar("plan: pairs in the wrong order", 0.1, wrong / len(pairs), f"of {len(pairs)} that differ by 10 %"))
    return bars


def show(lines: Sequence[dict[str, Any]]) -> None:
    rows = []
    for one in lines:
        measured = median(one["steps"])
        rows.append(
            [
                f"{one['load']:g}",
                one["case"],
                f"{1e3 * one['estimated']:.1f}",
                f"{1e3 * measured:.1f}",
                f"{one['estimated'] / measured - 1:+.1%}",
            ]
        )
    print(markdown(["load", "case", "estimated, ms", "measured, ms", "error"], rows))


def main() -> None:
    parser = arguments(__doc__)
    add_settings(parser, LOADS, repeats=5)
    options = parser.parse_args()
    report, names = begin("plan", options, ["ours"])
    settings = settings_of(options, names)
    report["settings"] = asdict(settings)
    processor = report["processor"] = processor_time()
    report["plain"], lines = measure(settings)
    report["lines"] = lines
    show(lines)
    write(report, judge(lines, processor), options.out)


if __name__ == "__main__":
    main()
