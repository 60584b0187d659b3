"""The report as one HTML file that needs no network: the numbers as tables, and the same numbers as plots."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from fsdp.commands.reporting.advice import Advice
from fsdp.commands.reporting.clocks import Offset
from fsdp.commands.reporting.formats import milliseconds, size, write_text
from fsdp.commands.reporting.html import bars, bullets, document, html_table, plot_layout, section
from fsdp.commands.reporting.numbers import GATHERS, OTHERS, PARTS, REDUCTIONS, RankNumbers, StepNumbers, inside, lane_of, slowest
from fsdp.commands.reporting.rank_trace import RankTrace, Slice
from fsdp.commands.reporting.text import advice_line, exposed_units

COLOURS: Final = {
    "computing": "#3366aa",
    "exposed communication": "#cc4433",
    "host of the engine": "#e0a030",
    "rest": "#b8b8b8",
    GATHERS: "#228866",
    REDUCTIONS: "#885599",
    OTHERS: "#777777",
}
"""Told apart also without red and green: they differ in brightness."""
_MOST_BARS: Final = 40
_WAITED: Final = "milliseconds waited in a step"
_SINCE: Final = "milliseconds since the step began"


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
    write_text("report", path, document("report --html", title, body, plots))


def _headline(numbers: Sequence[RankNumbers], offsets: Sequence[Offset]) -> str:
    step = max((one.typical for one in numbers), key=lambda step: step.length)
    peak = max(step.peak for one in numbers for step in one.steps)
    told = [
        ("step", f"{milliseconds(step.length)} ms"),
        *((name, f"{part / step.length:.0%}") for name, part in step.parts.items() if name != "rest"),
        ("peak of the engine's memory", size(peak)),
    ]
    if len(numbers) > 1:
        rank, excess = slowest(numbers)
        told.append((f"slowest rank: {rank.rank}", f"+{milliseconds(excess)} ms"))
    items = "".join(f"<li><strong>{escape(value)}</strong>{escape(name)}</li>" for name, value in told)
    return f"<ul class='numbers'>{items}</ul>"


def _parts(numbers: Sequence[RankNumbers]) -> dict[str, Any]:
    ranks = [f"rank {one.rank}" for one in numbers]
    parts = [one.typical.parts for one in numbers]
    data = [
        bars(name, ranks, [one[name] / 1e3 for one in parts], COLOURS[name], f"%{{y}}: {name} %{{x:.2f}} ms") for name in PARTS
    ]
    layout = plot_layout(190 + 28 * len(ranks), "milliseconds of a step", barmode="stack", yaxis={"autorange": "reversed"})
    return {"data": data, "layout": layout}


def _parts_table(numbers: Sequence[RankNumbers]) -> str:
    rows = [[f"rank {one.rank}", *map(milliseconds, one.typical.parts.values())] for one in numbers]
    return html_table(["", *(f"{name}, ms" for name in PARTS)], rows)


def _exposed(numbers: Sequence[RankNumbers]) -> dict[str, Any]:
    found = exposed_units(numbers)[:_MOST_BARS]
    units = list(dict.fromkeys(unit for _, unit, _ in found))
    data = []
    for lane in dict.fromkeys(lane for lane, _, _ in found):
        waits = {unit: waited / 1e3 for one, unit, waited in found if one == lane}
        x = [waits.get(unit, 0) for unit in units]
        data.append(bars(lane, units, x, COLOURS[lane], f"{lane} of %{{y}}: %{{x:.3f}} ms"))
    axis = {"type": "category", "autorange": "reversed", "automargin": True}
    height = 210 + 24 * len(units)
    return {"data": data, "layout": plot_layout(height, _WAITED, barmode="stack", yaxis=axis, narrowLeft=110)}


def _exposed_table(numbers: Sequence[RankNumbers]) -> str:
    return html_table(
        ["unit", "lane", "ms"], [[unit, lane, milliseconds(waited)] for lane, unit, waited in exposed_units(numbers)]
    )


def _timeline(trace: RankTrace, step: StepNumbers) -> dict[str, Any]:
    lanes: dict[str, list[Slice]] = {
        "computing": list(trace.computing),
        "host of the engine": list(trace.engine),
        **{lane: [one for one in trace.collectives if lane_of(one) == lane] for lane in (GATHERS, REDUCTIONS, OTHERS)},
    }
    data = []
    for lane, slices in lanes.items():
        found = inside(slices, step)
        hover = "%{customdata}<br>at %{base:.3f} ms, for %{x:.3f} ms"
        shown = bars(lane, [lane] * len(found), [one.length / 1e3 for one in found], COLOURS[lane], hover)
        shown["marker"]["line"] = {"color": "#ffffff", "width": 0.5}
        shown |= {"base": [(one.began - step.began) / 1e3 for one in found], "customdata": [_told(one) for one in found]}
        data.append({**shown, "showlegend": False, "opacity": 0.75})
    axis = {"autorange": "reversed", "automargin": True}
    return {"data": data, "layout": plot_layout(360, _SINCE, barmode="overlay", yaxis=axis, narrowLeft=110)}


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
    return {"data": data, "layout": plot_layout(340, _SINCE, hovermode="x unified", yaxis={"title": {"text": "MiB"}})}


def _memory_table(step: StepNumbers) -> str:
    rows = [[kind, f"{count:,}"] for kind, count in sorted(step.held_at_peak.items(), key=lambda one: -one[1])]
    return html_table(["kind", "bytes at the peak"], rows)
