"""The figures of docs/development/benchmarks.md, each from the raw numbers of one benchmark.

Needs matplotlib: pip install 'fsdp[bench]'.

Rule 1: one figure has one message. Its title says the message, with numbers computed from the results.
Rule 2: a contender has the same colour and marker in every figure. The colours are those of Okabe and Ito, which readers who
        are colour-blind can tell apart; no figure relies on colour alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from engines import TITLES
from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image
from result_file import Report

LOOKS = {
    "bare": ("#777777", "x"),
    "ddp": ("#009E73", "D"),
    "fsdp1": ("#E69F00", "^"),
    "fsdp2": ("#D55E00", "s"),
    "fsdp2_prefetch": ("#CC79A7", "v"),
    "ours": ("#0072B2", "o"),
    "ours_no_shard": ("#0072B2", "o"),
    "ours_over_nccl": ("#56B4E9", "o"),
}
"""Colour and marker of a contender."""
STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "legend.frameon": False,
}
COLOURS = 64
"""In a PNG: a palette makes it a third as large, and nobody sees the difference."""
OPTIONS = {"plain": "plain", "checkpoint": "checkpointing", "bf16": "bf16", "accumulate": "accumulation", "lora": "LoRA"}
"""Options of step.py, as a figure calls them."""


def draw(results: Mapping[str, Report], folder: Path) -> list[Path]:
    """One PNG, 900 pixels wide, for each figure whose benchmark has been run, with ours and the peer that its title names."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (benchmark, drawing) in FIGURES.items():
        if benchmark not in results:
            continue
        with pyplot.rc_context(STYLE):
            figure = drawing(results[benchmark])
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=100)
            pyplot.close(figure)
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
        written.append(path)
    return written


def _figure(title: str, height: float, rows: int = 1, columns: int = 1, sharex: bool = True) -> tuple[Any, Any]:
    """A figure with its message on top, and its panels, which share the vertical axis."""
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(9, height), layout="constrained", sharex=sharex, sharey=True, squeeze=False
    )
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure, panels.flatten()


def _line(axes: Any, name: str, x: Sequence[float], y: Sequence[float], **more: Any) -> None:
    """A contender's line, which the legend calls by the contender's title."""
    colour, marker = LOOKS[name]
    axes.plot(x, y, **{"color": colour, "marker": marker, "label": TITLES[name], **more})


def _ticks(axis: Any, at: Iterable[float]) -> None:
    """Ticks at these values alone, written as plain numbers."""
    axis.set_major_locator(FixedLocator(sorted(set(at))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _range(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the greatest value, in words."""
    found = [f"{value:{form}}" for value in values]
    least, most = min(found, key=float), max(found, key=float)
    return least if least == most else f"{least} to {most}"


def _coincide(one: Sequence[float], other: Sequence[float], apart: float) -> bool:
    """Whether two lines differ so little that only one of them would be seen."""
    return bool(one) and all(abs(x / y - 1) <= apart for x, y in zip(one, other, strict=True))


def _steps(report: Report, title: str, names: Sequence[str], ticks: Sequence[float]) -> Any:
    """Medians relative to the bare model's: a panel for each option and number of ranks, a row for each model."""
    cases = report["cases"]
    settings = [case["settings"] for case in cases]
    kinds = list(dict.fromkeys((one["option"], one["ranks"]) for one in settings))
    models = list(dict.fromkeys(one["model"] for one in settings))
    figure, panels = _figure(title, 0.6 + 2.4 * -(-len(kinds) // 3), -(-len(kinds) // 3), 3)
    for axes, (option, ranks) in zip(panels, kinds, strict=False):
        for case in cases:
            if (case["settings"]["option"], case["settings"]["ranks"]) == (option, ranks):
                _step(axes, case["milliseconds"], models.index(case["settings"]["model"]), names)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_title(f"{OPTIONS[option]}, {ranks} ranks")
        axes.set(xscale="log", ylim=(len(models) - 0.5, -0.5))
        axes.set_yticks(range(len(models)), models)
        _ticks(axes.xaxis, ticks)
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    panels[-2].set_xlabel("time of a step / time of the same step without communication (log scale)")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(names))
    return figure


def _step(axes: Any, milliseconds: Mapping[str, Any], row: int, names: Sequence[str]) -> None:
    """The contenders of one case, in one row. Peers' markers are hollow, so that one that lies behind another shows."""
    hollow = {"markerfacecolor": "none", "markeredgewidth": 2}
    if "bare" not in milliseconds:
        return
    for name in names:
        found = [milliseconds[form]["median"] for form in (name, f"{name}_orig") if form in milliseconds]
        if found:
            label = "FSDP1, the faster form" if name == "fsdp1" else TITLES[name]
            more = {} if name.startswith("ours") else hollow
            _line(axes, name, [min(found) / milliseconds["bare"]["median"]], [row], linestyle="none", label=label, **more)


def _ratios(report: Report, mine: str, theirs: str) -> list[float]:
    """In every case, the median of one contender over that of another."""
    both = [case["milliseconds"] for case in report["cases"] if {mine, theirs} <= case["milliseconds"].keys()]
    return [one[mine]["median"] / one[theirs]["median"] for one in both]


def _step_sharded(report: Report) -> Any:
    found = _range(_ratios(report, "ours", "fsdp2"))
    title = f"Sharded training: a step of ours takes {found} of FSDP2's time"
    return _steps(report, title, ("fsdp1", "fsdp2", "ours"), (1, 2, 5, 10, 30))


def _step_replicated(report: Report) -> Any:
    found = _range(_ratios(report, "ours_no_shard", "ddp"))
    title = f"Without sharding: a step of ours takes {found} of DDP's time"
    return _steps(report, title, ("ddp", "ours_no_shard"), (1, 1.2, 1.5, 2))


def _host(report: Report) -> Any:
    world = min(case["settings"]["world"] for case in report["cases"])
    cases = [case for case in report["cases"] if case["settings"]["world"] == world]
    added = {
        name: {case["settings"]["tensors"]: case["microseconds_per_unit"][name]["added"]["median"] for case in cases}
        for name in ("fsdp1", "fsdp2", "ours")
        if name in report["options"]
    }
    ratios = [added["ours"][tensors] / added["fsdp2"][tensors] for tensors in added["ours"]]
    figure, (axes,) = _figure(f"Host time: ours adds {_range(ratios)} of what FSDP2 adds, on {world} ranks", 4.6)
    for name, of in added.items():
        _line(axes, name, [*of], [*of.values()], label="FSDP1, flat parameters" if name == "fsdp1" else TITLES[name])
    axes.set(xscale="log", yscale="log", xlabel="tensors in a unit (log scale)")
    axes.set_ylabel("processor µs a unit, forward and backward,\nmore than the bare model (log scale)")
    _ticks(axes.xaxis, added["ours"])
    _ticks(axes.yaxis, (200, 500, 1000, 2000, 5000))
    axes.legend(loc="upper left")
    return figure


def _memory(report: Report) -> Any:
    cases = report["cases"]
    worlds = [case["settings"]["world"] for case in cases]
    engine = {name: [case["contenders"][name]["engine"] / 1e6 for case in cases] for name in cases[0]["contenders"]}
    ratios = [mine / theirs for mine, theirs in zip(engine["ours"], engine["fsdp2"], strict=True)]
    title = f"Peak memory: ours over gloo takes {_range(ratios)} of FSDP2's, on {worlds[0]} to {worlds[-1]:,} ranks"
    figure, (axes,) = _figure(title, 4.8)
    looks: dict[str, Any] = {"ours": {"label": "ours over gloo"}, "fsdp2": {"markerfacecolor": "none", "markersize": 12}}
    if "ours_over_nccl" in engine:
        looks["ours_over_nccl"] = {"label": "ours, reduced by the backend as on CUDA"}
        same = _coincide(engine["fsdp1"], engine["ours_over_nccl"], 0.02)
        looks["ours_over_nccl"]["label"] += "; FSDP1 takes as much (2 %)" if same else ""
    else:
        same = False
    for name in ("fsdp2", "ours_over_nccl", "ours") if same else ("fsdp1", "fsdp2", "ours_over_nccl", "ours"):
        if name in engine:
            _line(axes, name, worlds, engine[name], **looks.get(name, {}))
    axes.set(xscale="log", ylim=(0, None), xlabel="ranks (log scale)")
    axes.set_ylabel("MB of shards, parameters, gradients\nand buffers at the peak of a step")
    _ticks(axes.xaxis, worlds)
    axes.legend(loc="lower center", ncols=2)
    return figure


def _wire(report: Report) -> Any:
    beside = report["beside"]
    models = list(dict.fromkeys(one["model"] for one in beside))
    worst = {name: 100 * max(one[name]["padding"] for one in beside) for name in ("ours", "fsdp2")}
    title = f"Padding: ours adds at most {worst['ours']:.1f} % to what is gathered, FSDP2 {worst['fsdp2']:.1f} %"
    figure, panels = _figure(title, 4.2, columns=len(models))
    for axes, model in zip(panels, models, strict=True):
        mine = sorted((one for one in beside if one["model"] == model), key=lambda one: one["world"])
        for name in ("fsdp2", "ours"):
            _line(axes, name, [one["world"] for one in mine], [100 * one[name]["padding"] for one in mine], linewidth=1)
        axes.set_title(model)
        axes.set(xscale="log", xlabel="ranks (log scale)")
        _ticks(axes.xaxis, (8, 32, 128, 512))
    panels[0].set(ylim=(0, None), ylabel="padding, % of the parameters")
    panels[0].legend(loc="upper left")
    return figure


def _overlap(report: Report) -> Any:
    lines, computing = report["lines"], report["settings"]["computing"]
    loads = list(dict.fromkeys(line["load"] for line in lines))
    worst = {name: max(line["to_ideal"] for line in lines if line["contender"] == name) for name in ("ours", "fsdp2")}
    title = f"Overlap: a step of ours takes at most {worst['ours']:.2f} of the ideal, of FSDP2 {worst['fsdp2']:.2f}"
    figure, (axes,) = _figure(title, 4.8)
    axes.plot(
        loads, [max(1.0, load) for load in loads], color="black", linestyle=":", label="ideal: max(computing, communication)"
    )
    steps = {
        name: [line["seconds"] / computing for line in lines if line["contender"] == name]
        for name in ("fsdp1", "fsdp2", "fsdp2_prefetch", "ours")
    }
    same = _coincide(steps["fsdp1"], steps["fsdp2"], 0.02)
    for name, found in steps.items():
        if found and not (same and name == "fsdp1"):
            _line(
                axes,
                name,
                loads,
                found,
                label="FSDP1 and FSDP2 (at most 2 % apart)" if same and name == "fsdp2" else TITLES[name],
            )
    axes.set(xscale="log", yscale="log", xlabel="communication / computing (log scale)", ylabel="step / computing (log scale)")
    _ticks(axes.xaxis, loads)
    _ticks(axes.yaxis, (1, 1.5, 2, 3, 4, 5))
    axes.legend(loc="upper left")
    return figure


def _scale(report: Report) -> Any:
    """Dispatched operations, which are exact: times of single cases are unsteady."""
    first = report["cases"][0]["settings"]["world"]
    cases = [(case["settings"], case["dispatched"] / case["settings"]["units"]) for case in report["cases"]]
    few = min(of["units"] for of, _ in cases if of["world"] != first)
    panels_of = {
        f"among units, {first} ranks": {"units": [one for one in cases if one[0]["world"] == first]},
        f"among ranks, {few} units": {"world": [one for one in cases if one[0]["units"] == few]},
    }
    most = {name: max(count for of, count in cases if of["contender"] == name) for name in ("ours", "fsdp1")}
    title = f"Growth: a unit of ours dispatches at most {most['ours']:.0f} operations a step, of FSDP1 {most['fsdp1']:,.0f}"
    figure, panels = _figure(title, 4.4, columns=2, sharex=False)
    for axes, (what, of_panel) in zip(panels, panels_of.items(), strict=True):
        ((key, points),) = of_panel.items()
        for name in ("fsdp1", "fsdp2", "ours"):
            mine = sorted((of[key], count) for of, count in points if of["contender"] == name)
            _line(axes, name, [at for at, _ in mine], [count for _, count in mine])
        axes.set_title(what)
        axes.set(xscale="log", yscale="log", xlabel=f"{'units in the model' if key == 'units' else 'ranks'} (log scale)")
        _ticks(axes.xaxis, {at[key] for at, _ in points} - {1000})  # there is no room for its number beside the last one
        _ticks(axes.yaxis, (20, 50, 200, 1000, 5000))
    panels[0].set_ylabel("operations a unit and step (log scale)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


FIGURES: Mapping[str, tuple[str, Callable[[Report], Any]]] = {
    "step_sharded": ("step", _step_sharded),
    "step_replicated": ("step", _step_replicated),
    "host": ("host", _host),
    "memory": ("memory", _memory),
    "wire": ("wire", _wire),
    "overlap": ("overlap", _overlap),
    "scale": ("scale", _scale),
}
"""By file name: the benchmark it shows, and the drawing."""
