"""On a CUDA device: steps, peak memory, fragmentation and host time of Llama-like blocks in bf16. Not run on a GPU yet.

    python benchmarks/gpu.py                                   # 1 rank over NCCL; 8 and 64 ranks, of which only this one exists
    python benchmarks/gpu.py --world 8 --contenders bare fsdp2 ours --blocks 32 --batch 1

One process has the device and plays rank 0. With one rank the group is NCCL's, and the losses of the first steps are compared;
FSDP1 then shards nothing, FSDP2 and ours skip the collectives. With more it is torch's fake one, which sends nothing: a gather
copies this rank's shard to everybody's place, W copies for each. That takes time on the host and on the device, the same for all
contenders, and is part of what is measured: it moves ratios towards one. Values mean nothing there. Gradients are set to zero
before the optimizer, for all alike, so that the weights stay finite: the power that a product takes, and so its speed, depends on
them.

*Step*: forward, backward, AdamW (fused), fp32 parameters, bf16 compute, fp32 reduction. All contenders share a process and take
turns, each time beginning with another. A turn's first step is not timed, so that the device has work when the timed ones begin;
CUDA events before and after tell the time of the device, the clock beside it when the host had launched everything, which
includes waiting where a contender waits (FSDP1 for gathers) or the queue is full. Tokens per second and the share of the peak
(MFU) follow: operations are counted as llama.py says, the peak is that of an H200 in dense bf16 (--peak-tflops).

*Memory*: each contender in a process of its own, because the allocator belongs to the process. The module is on the device
before it is wrapped; then what is not used is given back, and peaks count from there, over five steps of full length. Again over
as many steps as `--varying` says, with sequences between a quarter and the full length, drawn with a seed: what is allocated and
reserved, what is lost to fragmentation (inactive parts of blocks that were split), and how often the allocator started over.

*Host time*: units of twelve small tensors, as in host.py but on the device, which is idle when a phase begins; by the clock,
nothing waits for the device. *Added* is forward and backward, minus those of the bare model.
"""

import argparse
import importlib.metadata
import importlib.util
import os
from dataclasses import asdict, replace
from typing import Any

import torch
from common import Bar, Sample, add_sizes, arguments, begin, elsewhere, print_table, sizes_of, write
from device_runs import Settings, measure, measure_memory
from engines import contenders
from llama import Sizes, operations
from step import compare_losses

NAMES = ("bare", "fsdp1", "fsdp1_orig", "fsdp2", "fairscale", "ours")
SIZES = Sizes(blocks=12, width=2048, vocabulary=32000, sequence=2048, batch=4)
PEAK_TFLOPS = 989.0
TOLERANCE = 2e-2
"""How far losses, which begin near log(vocabulary), may be apart: bare rounds what lies between layers elsewhere, by autocast."""


def summarise(found: dict[str, Any], settings: Settings, peak_tflops: float) -> dict[str, dict[str, Any]]:
    """Per contender: samples of a step, of launching it, and of host time added per unit; and what follows from the first."""
    figures: dict[str, dict[str, Any]] = {}
    both = {
        name: Sample.of([1e6 * s / settings.host_units for s in one["host_seconds_of_all_units"]["forward_by_the_clock"]])
        + Sample.of([1e6 * s / settings.host_units for s in one["host_seconds_of_all_units"]["backward_by_the_clock"]])
        for name, one in found.items()
        if one["host_seconds_of_all_units"]
    }
    for name, one in found.items():
        step = Sample.of(one["seconds_per_step"])
        figures[name] = {
            "step": step,
            "launching": Sample.of(one["launching_seconds_per_step"]),
            "tokens_per_second": settings.sizes.tokens / step.median,
            "mfu": operations(settings.sizes, settings.sizes.sequence) / (step.median * peak_tflops * 1e12),
        }
        if name in both and "bare" in both:
            figures[name]["added"] = both[name] - both["bare"]
    return figures


def judge(figures: dict[str, dict[str, Any]], memory: dict[str, dict[str, Any]], label: str) -> list[Bar]:
    """Host time is held to the faster form of FSDP1 as well; what the allocator takes is held to what it has given out."""
    if "ours" not in figures:
        return []
    bars, ours = [], figures["ours"]
    if "fsdp2" in figures:
        bars.append(Bar.ratio("CUDA: step, ours / FSDP2", 0.97, ours["step"], figures["fsdp2"]["step"], label))
        if "added" in ours:
            bars.append(Bar.ratio("CUDA: added on the host, ours / FSDP2", 0.25, ours["added"], figures["fsdp2"]["added"], label))
    fsdp1 = [figures[name]["added"] for name in ("fsdp1", "fsdp1_orig") if "added" in figures.get(name, {})]
    if fsdp1:
        bars.append(Bar.ratio("CUDA: added on the host, ours / the faster FSDP1", 0.40, ours["added"], Sample.best(fsdp1), label))
    held_by_ours, held_by_fsdp2 = memory.get("ours", {}), memory.get("fsdp2", {})
    if held_by_ours.get("fixed") and held_by_fsdp2.get("fixed"):
        ratio = held_by_ours["fixed"]["peak_allocated"] / held_by_fsdp2["fixed"]["peak_allocated"]
        bars.append(Bar("CUDA: peak allocated, ours / FSDP2", 0.90, ratio, label))
    for lengths in ("fixed", "varying"):
        if held_by_ours.get(lengths):
            ratio = held_by_ours[lengths]["reserved_to_allocated"]
            bars.append(Bar("CUDA: reserved / allocated, ours", 1.05, ratio, f"{label}, {lengths} lengths"))
    return bars


def show(figures: dict[str, dict[str, Any]], memory: dict[str, dict[str, Any]], label: str) -> None:
    rows = []
    for name, one in figures.items():
        step, added = one["step"], one.get("added")
        times = [*(f"{1e3 * s:.1f}" for s in (step.median, step.least, step.most, one["launching"].median))]
        times.append(f"{added.median:.0f}" if added else "")
        rows.append([name, *times, f"{one['tokens_per_second']:.0f}", f"{100 * one['mfu']:.1f}"])
    print_table([label, "step ms", "min", "max", "launched ms", "added µs a unit", "tokens/s", "MFU %"], rows)
    rows = []
    for name, bytes_of in memory.items():
        for lengths in ("fixed", "varying"):
            if statistics := bytes_of.get(lengths):
                sizes = [f"{statistics[what] / 1e9:.2f}" for what in ("peak_allocated", "peak_reserved", "inactive_split")]
                ratio, retries = statistics["reserved_to_allocated"], statistics["allocation_retries"]
                rows.append([f"{name}, {lengths}", *sizes, f"{ratio:.3f}", str(retries)])
    if rows:
        print_table([label, "GB allocated", "reserved", "inactive split", "reserved / allocated", "retries"], rows)


def run(options: argparse.Namespace, kind: str) -> None:
    """Every number of ranks, and the file with what was found."""
    report, names = begin("cuda", options, NAMES, contenders(kind))
    report["machine"] |= accelerator(kind)
    report["peak_tflops"] = options.peak_tflops
    report["cases"] = []
    bars: list[Bar] = []
    wrong: list[str] = []
    sizes = sizes_of(options, SIZES)
    for world in options.world:
        settings = Settings(names, world, sizes, options.steps, options.repeats, options.varying, options.host_units, kind)
        case = elsewhere(measure, settings, options.timeout)
        found = case["contenders"]
        memory = {name: elsewhere(measure_memory, replace(settings, contenders=(name,)), options.timeout) for name in found}
        figures = summarise(found, settings, options.peak_tflops)
        show(figures, memory, settings.label)
        for name, why in [*case["failed"].items(), *((name, of["failed"]) for name, of in memory.items() if of["failed"])]:
            print(f"{name} failed: {why}")
        if settings.backend != "fake":
            case["largest_loss_difference"], complaints = compare_losses(found, TOLERANCE)
            wrong += [f"{settings.label}: {complaint}" for complaint in complaints]
        bars += judge(figures, memory, settings.label)
        summary = {
            name: {what: asdict(one) if isinstance(one, Sample) else one for what, one in samples.items()}
            for name, samples in figures.items()
        }
        report["cases"].append({"settings": asdict(settings), **case, "memory": memory, "figures": summary})
    write(report, bars, options.out)
    if wrong:
        raise SystemExit("the losses differ: " + "; ".join(wrong))


def accelerator(kind: str) -> dict[str, Any]:
    """What else a reader needs, where there is a device."""
    facts: dict[str, Any] = {}
    if importlib.util.find_spec("fairscale"):
        facts["fairscale"] = importlib.metadata.version("fairscale")
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "device_memory": properties.total_memory, "cuda": torch.version.cuda}
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        given = [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
        facts["allocator"] = next((one for one in given if one), "as by default")
    return facts


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 8, 64], help="ranks: 1 over NCCL, more of the fake group")
    add_sizes(parser, SIZES)
    parser.add_argument("--steps", type=int, default=3, help="steps in one measurement")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each contender")
    parser.add_argument("--varying", type=int, default=200, help="steps with sequences of varying length; 0 for none")
    parser.add_argument("--host-units", type=int, default=48, help="small units, for the host time")
    parser.add_argument(
        "--peak-tflops", type=float, default=PEAK_TFLOPS, help="of the device, dense bf16; H100 SXM and H200: 989"
    )
    return parser.parse_args()


def refusal() -> str | None:
    """Why there is nothing to run on."""
    if torch.cuda.is_available():
        return None
    why = "torch sees none" if torch.version.cuda else f"this torch ({torch.__version__}) is built without CUDA"
    return f"not run: needs a CUDA device, and {why}"


def main() -> None:
    options = parse()
    if reason := refusal():
        raise SystemExit(reason)
    run(options, "cuda")


if __name__ == "__main__":
    main()
