"""The report as one HTML file that needs no network: the numbers as tables, and the same numbers as plots."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from fsdp.commands.reporting.advice import Advice
from fsdp.commands.reporting.clocks import Offset
from fsdp.commands.reporting.formats import milliseconds, size
from fsdp.commands.reporting.html import bullets, document, html_table, plot_layout, plotly_source, section
from fsdp.commands.reporting.numbers import RankNumbers, StepNumbers, slowest
from fsdp.commands.reporting.rank_trace import RankTrace, Slice
from fsdp.commands.reporting.text import advice_line, exposed_units
from fsdp.file_errors import file_errors

COLOURS: Final = {
    "computing": "#3366aa",
    "exposed communication": "#cc4433",
    "host of the engine": "#e0a030",
    "rest": "#b8b8b8",
    "gathers": "#228866",
    "reductions": "#885599",
    "other collectives": "#777777",
}
"""Told apart also without red and green: they differ in brightness."""
_MOST_BARS: Final = 40


def write_page(
    path: Path,
    traces: Sequence[RankTrace],
    numbers: Sequence[RankNumbers],
    offsets: Sequence[Offset],
    missing: Sequence[int],
    advice: Sequence[Advice],
) -> None:
    """Write the report as an HTML file.

    Raises:
        ShardingError: the package plotly is missing, or the file system refuses the file.
    """
    text = page_of(plotly_source("report --html"), traces, numbers, offsets, missing, advice)
    with file_errors(f"report: {path}", path):
        path.write_text(text, encoding="utf-8")


def page_of(
    plotly: str,
    traces: Sequence[RankTrace],
    numbers: Sequence[RankNumbers],
    offsets: Sequence[Offset],
    missing: Sequence[int],
    advice: Sequence[Advice],
) -> str:
    """The whole page. `plotly`: the source of plotly.js."""
    shown = slowest(numbers)[0] if len(numbers) > 1 else numbers[0]
    trace = next(one for one in traces if one.rank == shown.rank)
    step = shown.typical
    plots = {
        "parts": _parts(numbers),
        "exposed": _exposed(numbers),
        "timeline": _timeline(trace, step),
        "memory": _memory(trace, step),
    }
    title = f"Report of {len(numbers)} of {traces[0].world_size} ranks"
    absent = f"<p role='alert'>No trace of ranks {', '.join(map(str, missing))}.</p>" if missing else ""
    body = [
        f"<h1>{title}</h1>{absent}",
        _headline(numbers, offsets),
        "<h2>Advice</h2>",
        bullets([advice_line(one) for one in advice] or ["No option is expected to save 2 % of a step."]),
        section("parts", "What a step consists of", "The step of median length on each rank.", _parts_table(numbers), False),
        section("exposed", "Exposed communication by unit", "Mean over the ranks.", _exposed_table(numbers), False),
        section(
            "timeline",
            f"Timeline of step {step.number} on rank {shown.rank}",
            "Zoom by dragging over a stretch, or with the buttons.",
            "",
            True,
        ),
        section("memory", f"Bytes held in step {step.number} on rank {shown.rank}", "By kind.", _memory_table(step), True),
    ]
    return document(plotly, title, body, plots)


def _headline(numbers: Sequence[RankNumbers], offsets: Sequence[Offset]) -> str:
    step = max((one.typical for one in numbers), key=lambda step: step.length)
    peak = max(step.peak for one in numbers for step in one.steps)
    told = [
        ("step", f"{milliseconds(step.length)} ms"),
        ("computing", f"{step.computing / step.length:.0%}"),
        ("exposed communication", f"{step.waiting / step.length:.0%}"),
        ("host of the engine", f"{step.engine / step.length:.0%}"),
        ("peak of the engine's memory", size(peak)),
    ]
    if len(numbers) > 1:
        rank, excess = slowest(numbers)
        told.append((f"slowest rank: {rank.rank}", f"+{milliseconds(excess)} ms"))
    items = "".join(f"<li><strong>{escape(value)}</strong>{escape(name)}</li>" for name, value in told)
    return f"<ul class='numbers'>{items}</ul>"


def _shares(step: StepNumbers) -> dict[str, float]:
    return {
        "computing": step.computing,
        "exposed communication": step.waiting,
        "host of the engine": step.engine,
        "rest": step.rest,
    }


def _parts(numbers: Sequence[RankNumbers]) -> dict[str, Any]:
    ranks = [f"rank {one.rank}" for one in numbers]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": ranks,
            "x": [_shares(one.typical)[name] / 1e3 for one in numbers],
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"%{{y}}: {name} %{{x:.2f}} ms<extra></extra>",
        }
        for name in _shares(numbers[0].typical)
    ]
    height = 190 + 28 * len(ranks)
    return {
        "data": data,
        "layout": plot_layout(height, "milliseconds of a step", barmode="stack", yaxis={"autorange": "reversed"}),
    }


def _parts_table(numbers: Sequence[RankNumbers]) -> str:
    names = list(_shares(numbers[0].typical))
    rows = [[f"rank {one.rank}", *(milliseconds(part) for part in _shares(one.typical).values())] for one in numbers]
    return html_table(["", *(f"{name}, ms" for name in names)], rows)


def _exposed(numbers: Sequence[RankNumbers]) -> dict[str, Any]:
    found = exposed_units(numbers)[:_MOST_BARS]
    units = list(dict.fromkeys(unit for _, unit, _ in found))
    data = []
    for lane in dict.fromkeys(lane for lane, _, _ in found):
        waits = {unit: waited / 1e3 for one, unit, waited in found if one == lane}
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": lane,
                "y": units,
                "x": [waits.get(unit, 0) for unit in units],
                "marker": {"color": COLOURS[lane]},
                "hovertemplate": f"{lane} of %{{y}}: %{{x:.3f}} ms<extra></extra>",
            }
        )
    layout = plot_layout(210 + 24 * len(units), "milliseconds waited in a step", barmode="stack")
    return {
        "data": data,
        "layout": {**layout, "yaxis": {"type": "category", "autorange": "reversed", "automargin": True}, "narrowLeft": 110},
    }


def _exposed_table(numbers: Sequence[RankNumbers]) -> str:
    return html_table(
        ["unit", "lane", "ms"], [[unit, lane, milliseconds(waited)] for lane, unit, waited in exposed_units(numbers)]
    )


def _timeline(trace: RankTrace, step: StepNumbers) -> dict[str, Any]:
    lanes: dict[str, list[Slice]] = {
        "computing": list(trace.computing),
        "host of the engine": list(trace.engine),
        "gathers": [one for one in trace.collectives if one.args["collective"] == "all_gather"],
        "reductions": [one for one in trace.collectives if one.args["collective"] == "reduce_scatter"],
        "other collectives": [one for one in trace.collectives if one.args["collective"] not in ("all_gather", "reduce_scatter")],
    }
    data = []
    for lane, slices in lanes.items():
        inside = [one for one in slices if step.began <= one.began < step.ended]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": lane,
                "showlegend": False,
                "y": [lane] * len(inside),
                "base": [(one.began - step.began) / 1e3 for one in inside],
                "x": [one.length / 1e3 for one in inside],
                "customdata": [_told(one) for one in inside],
                "opacity": 0.75,
                "marker": {"color": COLOURS[lane], "line": {"color": "#ffffff", "width": 0.5}},
                "hovertemplate": "%{customdata}<br>at %{base:.3f} ms, for %{x:.3f} ms<extra></extra>",
            }
        )
    layout = plot_layout(
        360, "milliseconds since the step began", barmode="overlay", yaxis={"autorange": "reversed", "automargin": True}
    )
    return {"data": data, "layout": {**layout, "narrowLeft": 110}}


def _told(one: Slice) -> str:
    parts = [escape(one.name)]
    if "received" in one.args:
        parts.append(f"{one.args['received']:,} bytes received")
    if one.args.get("waited"):
        parts.append(f"the host waited {milliseconds(one.args['waited'])} ms")
    return "<br>".join(parts)


def _memory(trace: RankTrace, step: StepNumbers) -> dict[str, Any]:
    points = [(time, held) for time, held in trace.memory if step.began <= time < step.ended]
    kinds = sorted({kind for _, held in points for kind in held})
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0.5},
            "stackgroup": "held",
            "name": kind,
            "x": [(time - step.began) / 1e3 for time, _ in points],
            "y": [held.get(kind, 0) / 2**20 for _, held in points],
            "hovertemplate": f"{kind}: %{{y:.3f}} MiB<extra></extra>",
        }
        for kind in kinds
    ]
    layout = plot_layout(340, "milliseconds since the step began", hovermode="x unified", yaxis={"title": {"text": "MiB"}})
    return {"data": data, "layout": layout}


def _memory_table(step: StepNumbers) -> str:
    rows = [[kind, f"{count:,}"] for kind, count in sorted(step.held_at_peak.items(), key=lambda one: -one[1])]
    return html_table(["kind", "bytes at the peak"], rows)
