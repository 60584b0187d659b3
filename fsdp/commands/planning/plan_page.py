"""A plan as one HTML file that needs no network: the table of choices, and plots of memory and time."""

from html import escape
from pathlib import Path
from typing import Any, Final

from fsdp.commands.planning.comparison import HEADER, Candidate, Plan, advice, row
from fsdp.commands.reporting.formats import size, write_text
from fsdp.commands.reporting.html import bars, bullets, document, html_table, plot_layout, section

_COLOURS: Final = ("#3366aa", "#e0a030", "#228866", "#885599", "#cc4433", "#777777", "#223344", "#b8b8b8")
_GIB: Final = 2**30
_FARTHEST: Final = 2.0
"""The limit of the memory / the longest bar, up to which the limit is drawn."""


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan as an HTML file.

    Raises:
        ShardingError: the package plotly is missing, or the file system refuses the file.
    """
    device = plan.cluster.device
    title = f"Plan for {plan.parameters:,} parameters on {plan.world_size} ranks"
    shown = plan.shown
    kinds = list(dict.fromkeys(kind for one in shown for kind in one.found.held))
    sizes = [[one.choice.title, *(size(one.found.held.get(kind, 0)) for kind in kinds)] for one in shown]
    refused = [f"{one.choice.title}: {one.refusal}" for one in plan.candidates if one.rehearsal is None]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(device.name)}, {plan.cluster.per_host} ranks on a host, {size(plan.memory)} for each rank.</p>",
        "<h2>What is assumed</h2>",
        bullets([*plan.assumed]),
        "<h2>Recommendation</h2>",
        bullets(list(advice(plan))),
        section(
            "memory",
            "Peak memory of a rank by kind",
            f"At the moment when most is held. The limit is {size(plan.usable)}: the memory without the reserve.",
            html_table(["choice", *kinds], sizes),
            True,
        ),
        section(
            "time",
            "Estimated time of a step",
            "Computing, and waiting for collectives. An estimate from the numbers of data sheets, or from measured ones.",
            html_table(HEADER, [row(plan, one) for one in shown]),
            True,
        ),
        *(["<h2>Refused</h2>", bullets(refused)] if refused else []),
        "<h2>Sources</h2>",
        bullets(
            [
                # an address without its scheme: the page needs no network, which a test looks for
                "device: " + device.source.replace("https://", ""),
                f"inside a host: {device.link.source}",
                f"between hosts: {plan.cluster.between.source}",
                "bytes of the engine and collectives: exact, from a rehearsal of the engine",
                "activations: counted from the operators of the model",
            ]
        ),
    ]
    write_text("plan", path, document("plan --html", title, body, {"memory": _memory(plan, kinds), "time": _time(shown)}))


def _titles(shown: list[Candidate]) -> list[str]:
    return [one.choice.title.replace(", ", "<br>") for one in shown]


def _memory(plan: Plan, kinds: list[str]) -> dict[str, Any]:
    shown = plan.shown
    data = [
        bars(
            kind,
            _titles(shown),
            [one.found.held.get(kind, 0) / _GIB for one in shown],
            _COLOURS[number % len(_COLOURS)],
            f"%{{y}}: {kind} %{{x:.2f}} GiB",
        )
        for number, kind in enumerate(kinds)
    ]
    limit = plan.usable / _GIB
    line = {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash"}}
    longest = max(one.found.peak for one in shown)
    # a limit far away would leave the bars too short to read
    return {"data": data, "layout": _bars(len(shown), "GiB", shapes=[line] if plan.usable <= _FARTHEST * longest else [])}


def _time(shown: list[Candidate]) -> dict[str, Any]:
    parts = {
        "computing": ([1e3 * one.found.computing for one in shown], "#3366aa"),
        "waiting for collectives": ([1e3 * sum(one.found.exposed.values()) for one in shown], "#cc4433"),
    }
    data = [
        bars(name, _titles(shown), values, colour, f"%{{y}}: {name} %{{x:.1f}} ms") for name, (values, colour) in parts.items()
    ]
    return {"data": data, "layout": _bars(len(shown), "milliseconds")}


def _bars(rows: int, x: str, **more: Any) -> dict[str, Any]:
    axis = {"autorange": "reversed", "automargin": True}
    return plot_layout(190 + 42 * rows, x, barmode="stack", yaxis=axis, narrowLeft=150, **more)
