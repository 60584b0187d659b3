"""Writes docs/development/benchmarks.md with its figures from the files in results/.

    python benchmarks/report.py

Rule 1: nothing is measured here, and no number is typed: what the page says is what the files say.
Rule 2: every bar is on the page, also those that are missed. Of the cases the page has those that decide; all are in the files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import result_file
from common import markdown
from counting import COUNTERS
from engines import TITLES as PEERS
from host import ONCE, PHASES
from result_file import Report

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "development" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"

TITLES = {
    "step": "Training steps over gloo",
    "doors": "By the names of other engines",
    "host": "Host time",
    "instructions": "Instructions",
    "memory": "Memory",
    "wire": "The wire",
    "overlap": "Overlap",
    "scale": "Growth",
    "hosts": "Hosts apart",
    "accelerator": "On the pretend accelerator",
    "offload": "Shards in host memory",
}
WIDTH = 140
SHOWN_TENSORS = 12
"""The size of units, in tensors, that the page shows; a layer of a transformer has about as many."""
SHOWN_WORLDS = (64, 512)
"""The numbers of ranks for which the page shows the bytes of each model, beside the number with the most padding."""
SHOWN_GROWTH = ((200, 64), (200, 4096), (1000, 1024))
"""The numbers of units and ranks for which the page shows times of the host."""
SHOWN_LOAD = "1.0"
"""The load for which the page shows computed steps: communication takes as long as computing."""
BARS_ALONE = ("plan", "tracing", "units", "uneven")
"""Benchmarks of which the page shows the bars and nothing else."""
SOAK = result_file.RESULTS / "soak.json"
SIZE = (
    "`python -m tools.code_size` counts files, lines and classes of the package and of its core (without `compat`, `commands` "
    "and `integrations`), and the files and calls of one step. Some numbers may only go down: a test compares them with "
    "`tools/code_size.json`. An aim of 5,000 lines for all files that training needs was missed three times (7,213, 8,968 and "
    "12,524 on 2026-11-24), and is given up."
)
PICTURES = {
    "step": ("step_sharded", "step_replicated"),
    "doors": (),
    "instructions": (),
    "hosts": (),
    "accelerator": (),
    "offload": (),
}
"""The figures of a benchmark, where it has another number of them than the one of its name."""


def load(folder: Path = result_file.RESULTS) -> dict[str, Report]:
    """By benchmark, in the order of the page; who has not been run is not there."""
    paths = {name: folder / f"{name}.json" for name in (*TITLES, *BARS_ALONE)}
    return {name: result_file.read(path) for name, path in paths.items() if path.exists()}


def bars_table(results: Mapping[str, Report]) -> str:
    """A line for each measure: what it came to from the best case to the worst, and in how many it holds."""
    by_measure: dict[str, list[dict[str, Any]]] = {}
    for report in results.values():
        for bar in report["bars"]:
            by_measure.setdefault(bar["measure"], []).append(bar)
    rows = []
    for measure, bars in by_measure.items():
        values = [bar["value"] for bar in bars]
        best, worst = min(values), max(values)
        found = _number(best) if len(bars) == 1 or best == worst else f"{_number(best)} to {_number(worst)}"
        case = max(bars, key=lambda bar: bar["value"])["case"]
        held = sum(bar["holds"] for bar in bars)
        verdict = "holds" if held == len(bars) else "missed" if held == 0 else f"holds in {held} of {len(bars)}"
        rows.append([measure, f"{bars[0]['limit']:g}", found, case if len(bars) > 1 or case else "", verdict])
    return markdown(["measure", "at most", "found", "worst case", ""], rows)


def _number(value: float) -> str:
    """Three digits, and of what is near one three decimals: a bar is missed by 1.104 and held by 1.096."""
    return f"{value:.3f}" if 0.9995 <= value < 2 else f"{value:.3g}"


def page(results: Mapping[str, Report]) -> str:
    parts = [
        "# Benchmarks",
        "Written by `python benchmarks/report.py` from the raw numbers in `benchmarks/results/`. "
        "`benchmarks/README.md` says how everything is measured, [Performance](../explanation/performance.md) what it means.",
        f"## The bars\n\n{bars_table(results)}",
    ]
    for name, title in TITLES.items():
        parts.append(f"## {title}")
        if name not in results:
            parts.append(f"Not measured yet: `python benchmarks/{name}.py`.")
            continue
        report = results[name]
        parts += [_machine(report), *SECTIONS[name](report)]
        parts += [f"![{title}](../figures/{picture}.png)" for picture in PICTURES.get(name, (name,))]
        if name == "step":
            options = [(PEERS[one], options) for one, options in report["options"].items()]
            parts += ["Options of the contenders; where another benchmark has others, its file says so:"]
            parts.append(markdown(["contender", "options"], options))
    parts += [*_soak(result_file.read(SOAK)), "## Size", SIZE]
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def _wrapped(part: str) -> str:
    """A paragraph in lines that can be read; tables, lists and figures as they are."""
    return part if part[0] in "#|!-" else fill(part, WIDTH, break_long_words=False, break_on_hyphens=False)


def _soak(report: Report) -> list[str]:
    """What random runs came to. `results/soak.json` has each run with its seeds and its result."""
    counts = {kind: sum(run["count"] for run in report["runs"] if run["kind"] == kind) for kind in ("programs", "faults")}
    return [
        "## Soak runs",
        f"{len(report['runs'])} runs of `make soak` are in `benchmarks/results/soak.json`, with their seeds: "
        f"{counts['programs']:,} random programs and {counts['faults']:,} random faults over gloo. The longest without a finding "
        "were 20,000 programs beside 913 faults on four ranks. What was found is mended, and each finding has a test: "
        "[soak](soak.md).",
    ]


def _machine(report: Report) -> str:
    facts = report["machine"]
    loads = f"load {facts['load_average'][0]:.1f} before, {facts['load_average_after'][0]:.1f} after"
    processor = f"{facts['processor']}, " if facts.get("processor") else ""
    return f"{facts['date']}: {processor}{facts['cores']} cores, Python {facts['python']}, torch {facts['torch']}; {loads}."


def _step(report: Report) -> list[str]:
    names = list(report["options"])
    bars = {(bar["measure"].removeprefix("step: "), bar["case"]): bar for bar in report["bars"]}
    judged = list(dict.fromkeys(measure for measure, _ in bars))
    worst = {
        bar["measure"]: max(one["value"] for one in bars.values() if one["measure"] == bar["measure"]) for bar in bars.values()
    }
    medians, ratios = [], []
    for case in report["cases"]:
        of = case["settings"]
        what = [of["model"], of["option"], f"{of['ranks']}{' *' if case['oversubscribed'] else ''}"]
        milliseconds = [case["milliseconds"].get(name) for name in names]
        if of["option"] == "plain":
            medians.append([*what, *(f"{one['median']:.1f}" if one else "" for one in milliseconds)])
        here = [bars.get((measure, f"{of['model']}, {of['option']}, {of['ranks']} ranks")) for measure in judged]
        verdict = f"{sum(bar['holds'] for bar in here if bar)} of {sum(bar is not None for bar in here)}"
        agree = f"{case['largest_loss_difference']:.0e}"
        if of["option"] == "plain" or any(bar and bar["value"] == worst[bar["measure"]] for bar in here):
            ratios.append([*what, *map(_judged, here), verdict, agree])
    limits = {measure: next(bar["limit"] for (one, _), bar in bars.items() if one == measure) for measure in judged}
    head = ["model", "option", "ranks"]
    models = {case["settings"]["model"]: case["model"] for case in report["cases"]}
    skipped = {(name, why) for case in report["cases"] for name, why in case["skipped"].items()}
    return [
        "\n".join(f"- `{name}`: {what}" for name, what in models.items()),
        "ms of a step without options, medians:",
        markdown([*head, *(PEERS[name] for name in names)], medians),
        "Ratios of the medians, without options and where a ratio is the worst of all, with the most that the bar allows, and "
        "how far the losses of all contenders are apart at most:",
        markdown([*head, *(f"{measure} (≤ {limits[measure]:.2f})" for measure in judged), "hold", "losses"], ratios),
        "\\* More ranks than cores: they take turns, and nothing can be hidden behind computing."
        + "".join(f" {PEERS[name]} is left out where {why}." for name, why in sorted(skipped)),
    ]


def _doors(report: Report) -> list[str]:
    rows = []
    for case in report["cases"]:
        for name, times in case["milliseconds"].items():
            processor = case["contenders"][name]["processor_seconds_per_step"]
            rows.append([PEERS[name], *(f"{times[what]:.1f}" for what in ("median", "least")), f"{1e3 * median(processor):.1f}"])
    of = report["cases"][0]["settings"]
    return [
        f"A step of {of['model']} on {of['ranks']} ranks, by this engine's own names and by those of its peers with the peers' "
        "options, beside the peers. ms of a step, and of the processors of all ranks:",
        markdown(["contender", "median", "least", "processors, median"], rows),
    ]


def _judged(bar: Mapping[str, Any] | None) -> str:
    """A ratio, set off where the bar is missed."""
    if bar is None:
        return ""
    return f"{bar['value']:.3f}" if bar["holds"] else f"**{bar['value']:.3f}**"


def _host(report: Report) -> list[str]:
    columns = ("forward", "backward", "added", "clip", "step", *ONCE)
    rows = []
    for case in report["cases"]:
        of = case["settings"]
        if of["tensors"] != SHOWN_TENSORS:
            continue
        for name, phases in case["microseconds_per_unit"].items():
            found = case["contenders"][name]["operations"]
            counts = [" / ".join(f"{found[kind][phase]['per_unit']:g}" for phase in PHASES) for kind in COUNTERS]
            times = [f"{phases[what]['median']:.0f}" if what in phases else "" for what in columns]
            rows.append([str(of["world"]), str(of["tensors"]), PEERS[name], *times, *counts])
    operations = [f"{kind}: {' / '.join(PHASES)}" for kind in COUNTERS]
    return [
        "Processor µs per unit, medians, and exact operations per unit:",
        markdown(["ranks", "tensors", "contender", *columns, *operations], rows),
    ]


def _instructions(report: Report) -> list[str]:
    rows = [
        [PEERS[name], *(f"{phases[phase] / 1e3:.0f}" for phase in PHASES)]
        for name, phases in report["instructions_per_unit"].items()
    ]
    of = report["settings"]
    head = f"Thousands of instructions a unit of {of['tensors']} tensors, {of['world']} ranks, by callgrind:"
    return [head, markdown(["contender", *PHASES], rows)]


def _memory(report: Report) -> list[str]:
    names = list(report["options"])
    rows = []
    for case in report["cases"]:
        engines = [case["contenders"][name]["engine"] for name in names]
        kinds = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in case["contenders"]["ours"]["kinds"].items())
        sizes = [f"{size / 1e6:.2f}" for size in (case["floor"], *engines)]
        rows.append([str(case["settings"]["world"]), *sizes, kinds])
    head = ["ranks", "reckoned", *(PEERS[name] for name in names), "of ours the ledger names"]
    activations = max(case["activations"] for case in report["cases"]) / 1e6
    return [
        f"Engine bytes at the peak of a step, MB; beside them, for everybody, {activations:.2f} of activations and gradients on "
        "their way. Reckoned are the shards, as many reduced gradients, a unit that computes, one that is gathered ahead and a "
        "bucket, all at once (the bars call it floor); an engine that never has all of them at once takes less:",
        markdown(head, rows),
    ]


def _wire(report: Report) -> list[str]:
    beside = {(one["model"], one["world"]): one for one in report["beside"]}
    most = sorted(report["beside"], key=lambda one: one["ours"]["padding"])
    worst = {one["model"]: one["world"] for one in most}
    rows = []
    for row in report["rows"]:
        if row["strategy"] != "FULL_SHARD" or row["world"] not in {*SHOWN_WORLDS, worst[row["model"]]}:
            continue
        one = beside[row["model"], row["world"]]
        padding = [f"{100 * one[name]['padding']:.2f}" for name in ("ours", "fsdp1", "fsdp2")]
        misaligned = [f"{100 * one[name]['misaligned']:.0f}" for name in ("ours", "fsdp1", "fsdp2")]
        sent = [f"{row['received'] / 1e9:.2f}", f"{row['received'] / row['floor']:.4f}", str(row["collectives"])]
        rows.append([row["model"], str(row["world"]), *sent, *padding, *misaligned])
    head = ["model", "ranks", "GB a step", "/ floor", "collectives", "padding %: ours", "FSDP1", "FSDP2"]
    return [
        "What one rank receives in a step of FULL_SHARD, gathered in bf16 and reduced in fp32; on 64 and 512 "
        "ranks, and on the number with the most padding:",
        markdown([*head, "units not at 16 bytes %: ours", "FSDP1", "FSDP2"], rows),
    ]


def _overlap(report: Report) -> list[str]:
    names = list(report["options"])
    by = {(line["load"], line["contender"]): line for line in report["lines"]}
    rows = []
    for load in dict.fromkeys(line["load"] for line in report["lines"]):
        here = [by[load, name] for name in names]
        rows.append([f"{load:g}", *(f"{1e3 * line['seconds']:.0f} ({line['to_ideal']:.2f})" for line in here)])
    return [
        "ms of the median step, and relative to max(computing, communication) of what this contender sends; load is how long "
        "FULL_SHARD communicates, in terms of computing:",
        markdown(["load", *(PEERS[name] for name in names)], rows),
    ]


def _scale(report: Report) -> list[str]:
    rows = []
    for case in report["cases"]:
        of = case["settings"]
        if (of["units"], of["world"]) not in SHOWN_GROWTH or of["contender"] == "bare":
            continue
        seconds = case["wrap_seconds"], case["first_step_seconds"], case["steady_step_seconds"]
        times = [f"{1e6 * median(one) / of['units']:.0f}" for one in seconds]
        rows.append(
            [PEERS[of["contender"]], str(of["units"]), str(of["world"]), *times, f"{case['dispatched'] / of['units']:.1f}"]
        )
    head = ["contender", "units", "ranks", "wrap", "first step", "steady step", "dispatched"]
    return ["Per unit, processor µs, medians, and dispatched operations:", markdown(head, rows)]


def _hosts(report: Report) -> list[str]:
    of, lines = report["settings"], report["lines"]
    rows = []
    for line in lines:
        times = [f"{1e3 * line[what]:.0f}" for what in ("seconds", "least", "most")]
        rows.append([PEERS[line["contender"]], *times, f"{line['sent'] / 1e6:.1f}", f"{line['loss']:.6f}"])
    return [
        f"{of['hosts']} network namespaces on this one machine, with {of['ranks']} ranks each, joined by a bridge. `tc` (tbf) "
        f"limits what a host sends to the other to {of['megabits']:g} Mbit/s, and what its ranks send each other to "
        f"{of['times']:g} x as much. They share the processors, and no delay is added. It is no cluster: it shows what the order "
        f"and the amount of communication do. ms of a step of {of['blocks']} blocks of two {of['width']} x {of['width']} weights "
        "in float32, and what all hosts sent each other in it, with the headers of all protocols and what torch's barriers send:",
        markdown(["contender", "median", "least", "most", "MB between hosts", "loss"], rows),
    ]


def _accelerator(report: Report) -> list[str]:
    rows = []
    for case in report["cases"]:
        sizes = [f"{case[what] / 1e6:.3f}" for what in ("at_rest", "training", "peak")]
        counts = [str(case[what]) for what in ("waits", "clipping")]
        name, agree = PEERS[case["settings"]["contender"]], f"{case['largest_loss_difference']:.0e}"
        rows.append([name, *sizes, *counts, agree])
    of = report["cases"][0]["settings"]
    names = ["contender", "between steps", "forward and backward", "step", "host waits", "for the norm", "losses"]
    parts = "step", "gathers", "reductions", "copies", "apart"
    times = [
        [PEERS[case["settings"]["contender"]], *(f"{case['times'][SHOWN_LOAD][part]:.3f}" for part in parts)]
        for case in report["cases"]
    ]
    return [
        "**Not a GPU.** The [pretend accelerator](pretend-accelerator.md) is a device type of torch in the memory of the host. "
        "Its allocator counts as torch's does for CUDA, and it counts how often the host waits for a stream. "
        f"The most of {of['world']} ranks, MB: between steps, at the peak of forward and backward, and at the peak "
        "of a step with AdamW (foreach). Then how often the host waits in a step, how often of these for the norm of gradients, "
        "and how far losses are from those of the last line at most:",
        markdown(names, rows),
        "**Computed, not timed:** what a forward and a backward take, as multiples of what the bare model takes. Kernels take as "
        "long as their bytes or products of matrices, with 4,096 tokens a rank, collectives as long as the bytes that a rank "
        "receives, and a host none. The traffic of a fully sharded step takes as long as the bare model computes. "
        "Communicators that are active at the same time share the link of their rank. A step is 1 and three parts: waits of the "
        "computing stream for gathers, its waits for reductions (at the end those of the host), and copies of the engine, with "
        "other kernels of its own. The last column is the step if each communicator had a link of its own, which would be twice "
        "the bandwidth for ours. [Where a step waits](pretend-accelerator.md#where-a-step-waits) explains the differences:",
        markdown(["contender", "step", "gathers", "reductions", "copies", "a link for each communicator"], times),
    ]


def _offload(report: Report) -> list[str]:
    of = report["settings"]
    names = "step", "ideal", "to_ideal", "to_by_pass"
    lines = [line for line in report["lines"] if line["ranks"] > 1]
    rows = [[str(line["ranks"]), f"{line['load']:g}", *(f"{line[name]:.2f}" for name in names)] for line in lines]
    return [
        "**Computed, not timed.** The engine's own streams run on the [pretend accelerator](pretend-accelerator.md) over "
        "queues that keep a clock: copies between host and device go one after another on a wire each way, a block's forward "
        f"takes 1 and its backward 2, and hosts and collectives cost nothing. {of['blocks']} blocks, "
        f"`prefetch={of['prefetch']}`. Load is how long the copies to the device take, in terms of computing. The ideal is "
        "max(computing, transfers). Around load 1 the forward waits for copies and the backward for computing, one after the "
        "other, so no engine that copies each shard twice reaches it. The last column has the sum of the ideals of both "
        "passes:",
        markdown(["ranks", "load", "step", "ideal", "step / ideal", "step / ideals of the passes"], rows),
    ]


SECTIONS: Mapping[str, Callable[[Report], list[str]]] = {
    "step": _step,
    "doors": _doors,
    "host": _host,
    "instructions": _instructions,
    "memory": _memory,
    "wire": _wire,
    "overlap": _overlap,
    "scale": _scale,
    "hosts": _hosts,
    "accelerator": _accelerator,
    "offload": _offload,
}


def main() -> None:
    results = load()
    PAGE.write_text(page(results))
    # imported late: the page can be compared where matplotlib is not installed
    from figures import draw

    for path in (PAGE, *draw(results, FIGURES)):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
