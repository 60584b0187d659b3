"""The figures of docs/benchmarks.md, each from the raw numbers of one benchmark. Needs matplotlib: pip install 'fsdp[bench]'."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Report = Mapping[str, Any]
COLOURS = {
    "bare": "black",
    "ddp": "tab:green",
    "fsdp1": "tab:orange",
    "fsdp1_orig": "tab:brown",
    "fsdp2": "tab:red",
    "fsdp2_prefetch": "tab:pink",
    "ours": "tab:blue",
    "ours_no_shard": "tab:cyan",
    "ours_over_nccl": "tab:purple",
}
"""A contender looks the same in every figure."""


def draw(results: Mapping[str, Report], folder: Path) -> list[Path]:
    """One PNG for each benchmark that has been run and has a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (name for name in FIGURES if name in results):
        figure, axes = pyplot.subplots(figsize=(9, 4.5) if name == "step" else (7, 4.5), layout="constrained")
        FIGURES[name](axes, results[name])
        axes.legend(fontsize="small")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=100, metadata={"Software": None})
        pyplot.close(figure)
        written.append(path)
    return written


def _step(axes: Any, report: Report) -> None:
    """Medians relative to the bare model's, with least and most as whiskers."""
    names = [name for name in report["options"] if name != "bare"]
    labels = []
    for position, case in enumerate(report["cases"]):
        of, milliseconds = case["settings"], case["milliseconds"]
        labels.append(f"{of['model']}\n{of['option']}, {of['ranks']}")
        if "bare" not in milliseconds:
            continue
        unit = milliseconds["bare"]["median"]
        for number, name in enumerate(names):
            if name not in milliseconds:
                continue
            least, median, most = (milliseconds[name][what] / unit for what in ("least", "median", "most"))
            axes.bar(
                position + (number + 0.5) / (len(names) + 1) - 0.5,
                median,
                width=1 / (len(names) + 1),
                yerr=[[median - least], [most - median]],
                error_kw={"elinewidth": 0.6},
                color=COLOURS[name],
                label=name if position == 0 else None,
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels, rotation=60, fontsize="x-small")
    axes.set(ylabel="step / the same without communication", yscale="log", title="Training steps over gloo")


def _host(axes: Any, report: Report) -> None:
    world = min(case["settings"]["world"] for case in report["cases"])
    cases = [case for case in report["cases"] if case["settings"]["world"] == world]
    for name in report["options"]:
        if name != "bare":
            added = [case["microseconds_per_unit"][name]["added"]["median"] for case in cases]
            axes.plot([case["settings"]["tensors"] for case in cases], added, marker="o", color=COLOURS[name], label=name)
    axes.set(xscale="log", yscale="log", xlabel="tensors in a unit", ylabel="µs a unit")
    axes.set_title(f"Host time that forward and backward add, {world} ranks")


def _memory(axes: Any, report: Report) -> None:
    cases = report["cases"]
    worlds = [case["settings"]["world"] for case in cases]
    for name in cases[0]["contenders"]:
        if name != "bare":
            sizes = [case["contenders"][name]["engine"] / 1e6 for case in cases]
            axes.plot(worlds, sizes, marker="o", color=COLOURS[name], label=name)
    axes.plot(worlds, [case["floor"] / 1e6 for case in cases], color="black", linestyle=":", label="floor")
    axes.set(xscale="log", xlabel="ranks", ylabel="MB", ylim=(0, None), title="Engine bytes at the peak of a step")


def _wire(axes: Any, report: Report) -> None:
    beside = report["beside"]
    for model, marker in zip(dict.fromkeys(one["model"] for one in beside), "osd", strict=False):
        mine = [one for one in beside if one["model"] == model]
        for name in ("ours", "fsdp2"):
            worlds, padding = [one["world"] for one in mine], [100 * one[name]["padding"] for one in mine]
            axes.plot(worlds, padding, marker=marker, color=COLOURS[name], label=f"{model}, {name}")
    axes.set(xscale="log", xlabel="ranks", ylabel="padding, %", title="Padding of what is gathered")
    axes.axhline(3, color="grey", linestyle=":")


def _overlap(axes: Any, report: Report) -> None:
    lines, computing = report["lines"], report["settings"]["computing"]
    loads = list(dict.fromkeys(line["load"] for line in lines))
    for name in dict.fromkeys(line["contender"] for line in lines):
        if name != "bare":
            steps = [line["seconds"] / computing for line in lines if line["contender"] == name]
            axes.plot(loads, steps, marker="o", color=COLOURS[name], label=name)
    axes.plot(loads, [max(1.0, load) for load in loads], color="black", linestyle=":", label="ideal of FULL_SHARD")
    axes.set(xscale="log", yscale="log", xlabel="communication of FULL_SHARD / computing", ylabel="step / computing")
    axes.set_title("A step over a simulated wire")


def _scale(axes: Any, report: Report) -> None:
    world = report["cases"][0]["settings"]["world"]
    for name in dict.fromkeys(case["settings"]["contender"] for case in report["cases"]):
        mine = [case for case in report["cases"] if case["settings"]["contender"] == name and case["settings"]["world"] == world]
        units = [case["settings"]["units"] for case in mine]
        steady = [1e6 * median(case["steady_step_seconds"]) / case["settings"]["units"] for case in mine]
        axes.plot(units, steady, marker="o", color=COLOURS[name], label=f"{name}, steady step")
        if name != "bare":
            wrap = [1e6 * median(case["wrap_seconds"]) / case["settings"]["units"] for case in mine]
            axes.plot(units, wrap, marker="s", linestyle="--", color=COLOURS[name], label=f"{name}, wrap")
    axes.set(xscale="log", xlabel="units", ylabel="processor µs a unit", ylim=(0, None), title=f"Cost of a unit, {world} ranks")


FIGURES: Mapping[str, Callable[[Any, Report], None]] = {
    "step": _step,
    "host": _host,
    "memory": _memory,
    "wire": _wire,
    "overlap": _overlap,
    "scale": _scale,
}
