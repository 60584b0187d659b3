"""Writes docs/development/benchmarks.md with its figures from the files in results/.

    python benchmarks/report.py

Rule 1: nothing is measured here, and no number is typed: what the page says is what the files say.
Rule 2: every bar is on the page, also those that are missed. All cases are in the files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import result_file
from common import markdown
from engines import TITLES as PEERS
from result_file import Report

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "development" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"

TITLES = {
    "step": "Training steps over gloo",
    "doors": "By the names of other engines",
    "hosts": "Hosts apart",
    "accelerator": "On the pretend accelerator",
}
"""Benchmarks of which the page has a section."""
WIDTH = 140
SHOWN_LOAD = "1.0"
"""The load for which the page shows computed steps: communication takes as long as computing."""
OTHERS = (
    "host",
    "instructions",
    "dimensions",
    "memory",
    "wire",
    "overlap",
    "scale",
    "offload",
    "plan",
    "tracing",
    "units",
    "uneven",
)
"""Benchmarks of which the page shows the bars alone. The figures of some are on the page about performance."""
SOAK = result_file.RESULTS / "soak.json"
SIZE = (
    "`python -m tools.code_size` counts files, lines and classes of the package and of its core (without `compat`, `commands` "
    "and `integrations`), and the files and calls of one step. Some numbers may only go down: a test compares them with "
    "`tools/code_size.json`."
)
PICTURES = ("step_sharded", "step_replicated")
"""The figures of the steps."""


def load(folder: Path = result_file.RESULTS) -> dict[str, Report]:
    """By benchmark, in the order of the page; who has not been run is not there."""
    paths = {name: folder / f"{name}.json" for name in (*TITLES, *OTHERS)}
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
        "`benchmarks/README.md` says how everything is measured, [Performance](../explanation/performance.md) what it means; "
        "figures of host time, memory, the wire, overlap and growth are there.",
        f"## The bars\n\n{bars_table(results)}",
        f"## When they were measured\n\n{_measured(results)}",
    ]
    for name, title in TITLES.items():
        parts.append(f"## {title}")
        if name not in results:
            parts.append(f"Not measured yet: `python benchmarks/{name}.py`.")
            continue
        report = results[name]
        parts += SECTIONS[name](report)
        if name == "step":
            parts += [f"![{title}](../figures/{picture}.png)" for picture in PICTURES]
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
        "were 20,000 programs beside 913 faults on four ranks. What was found is mended and tested: "
        "[soak](soak.md).",
    ]


def _measured(results: Mapping[str, Report]) -> str:
    """When and where each benchmark ran, and what else the machine did; those that ran on one day beside as much are a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, report in results.items():
        facts = report["machine"]
        loads = [f"{facts[when][0]:.1f}" for when in ("load_average", "load_average_after")]
        processor = f"{facts['processor']}, " if facts.get("processor") else ""
        where = f"{processor}{facts['cores']} cores, Python {facts['python']}, torch {facts['torch']}"
        rows.setdefault((facts["date"], where, " and ".join(loads)), []).append(name)
    return markdown(
        ["benchmarks", "date", "on", "load before and after"],
        [[", ".join(names), *facts] for facts, names in sorted(rows.items())],
    )


def _step(report: Report) -> list[str]:
    names = list(report["options"])
    medians = []
    for case in report["cases"]:
        of = case["settings"]
        if of["option"] == "plain":
            milliseconds = [case["milliseconds"].get(name) for name in names]
            what = [of["model"], f"{of['ranks']}{' *' if case['oversubscribed'] else ''}"]
            medians.append([*what, *(f"{one['median']:.1f}" if one else "" for one in milliseconds)])
    models = {case["settings"]["model"]: case["model"] for case in report["cases"]}
    skipped = {(name, why) for case in report["cases"] for name, why in case["skipped"].items()}
    apart = max(case["largest_loss_difference"] for case in report["cases"])
    return [
        "\n".join(f"- `{name}`: {what}" for name, what in models.items()),
        "ms of a step without options, medians:",
        markdown(["model", "ranks", *(PEERS[name] for name in names)], medians),
        "\\* More ranks than cores: they take turns, and nothing can be hidden behind computing. With all options the losses of "
        f"all contenders are at most {apart:.0e} apart."
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


SECTIONS: Mapping[str, Callable[[Report], list[str]]] = {
    "step": _step,
    "doors": _doors,
    "hosts": _hosts,
    "accelerator": _accelerator,
}
"""Benchmarks of which the page has a table."""


def main() -> None:
    results = load()
    PAGE.write_text(page(results))
    # imported late: the page can be compared where matplotlib is not installed
    from figures import draw

    for path in (PAGE, *draw(results, FIGURES)):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
