"""Parts of a page that needs no network: its frame, sections with a plot and its numbers, tables, lists.

Plots are drawn by plotly.js, whose source the package plotly brings along, so that the file can hold it whole.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from fsdp.errors import require_package

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2rem; }
.plot { width: 100%; } details, .scroll { overflow-x: auto; } li { overflow-wrap: anywhere; }
table { border-collapse: collapse; } th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
button { font: inherit; margin: 0 .25rem .25rem 0; padding: .25rem .75rem; min-height: 2.5rem; }
:focus-visible { outline: 3px solid #3366aa; outline-offset: 2px; }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem; padding: 0; list-style: none; }
.numbers li { border: 1px solid #ccc; border-radius: .5rem; padding: .5rem 1rem; }
.numbers strong { display: block; font-size: 1.3rem; }
"""
_SCRIPT: Final = """
for (const [id, plot] of Object.entries(PLOTS)) {
  const target = document.getElementById(id);
  const narrow = window.innerWidth < 600;
  if (narrow) { plot.layout.margin = {l: plot.layout.narrowLeft || 70, r: 10, t: 90, b: 50}; }
  Plotly.newPlot(target, plot.data, plot.layout, {responsive: true, displayModeBar: false, scrollZoom: false});
  for (const button of document.querySelectorAll(`button[data-plot="${id}"]`)) {
    button.addEventListener("click", () => zoom(target, button.dataset.zoom));
  }
}
function zoom(target, how) {
  if (how === "all") { Plotly.relayout(target, {"xaxis.autorange": true}); return; }
  const [from, to] = target._fullLayout.xaxis.range.map(Number);
  const width = to - from, middle = (from + to) / 2;
  if (how === "in" || how === "out") {
    const half = width * (how === "in" ? 0.25 : 1);
    Plotly.relayout(target, {"xaxis.range": [middle - half, middle + half]});
  } else {
    const by = width * (how === "left" ? -0.25 : 0.25);
    Plotly.relayout(target, {"xaxis.range": [from + by, to + by]});
  }
}
"""


def document(command: str, title: str, body: Sequence[str], plots: Mapping[str, Any]) -> str:
    """The whole page, for this command. `plots`: by the name of the section, what plotly.js draws there.

    Raises:
        ShardingError: the package plotly is missing.
    """
    require_package(command, "plotly")
    from plotly.offline import get_plotlyjs

    # `</` would end the script element
    data = json.dumps(plots).replace("</", "<\\/")
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><link rel='icon' href='data:,'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(body)}</main>"
        f"<script>{get_plotlyjs()}</script><script>const PLOTS = {data};{_SCRIPT}</script></body></html>\n"
    )


def section(name: str, title: str, text: str, table: str, zooms: bool) -> str:
    """A section with the plot `name`. `table`: its numbers. `zooms`: it has buttons for a keyboard."""
    labels = {"in": "Zoom in", "out": "Zoom out", "left": "Left", "right": "Right", "all": "All"}
    buttons = "".join(
        f"<button type='button' data-plot='{name}' data-zoom='{how}' aria-controls='{name}'>{label}</button>"
        for how, label in (labels.items() if zooms else ())
    )
    numbers = f"<details><summary>The numbers of this plot</summary><div class='scroll'>{table}</div></details>" if table else ""
    return (
        f"<section aria-labelledby='{name}-title'><h2 id='{name}-title'>{escape(title)}</h2><p>{escape(text)}</p>{buttons}"
        f"<div class='plot' id='{name}' role='img' aria-labelledby='{name}-title'></div>{numbers}</section>"
    )


def bullets(items: Sequence[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""

    def cells(kind: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in row)}</tr>"

    return f"<table><thead>{cells('th', header)}</thead><tbody>{''.join(cells('td', row) for row in rows)}</tbody></table>"


def bars(name: str, y: Sequence[str], x: Sequence[float], colour: str, hover: str) -> dict[str, Any]:
    """What plotly.js draws as horizontal bars of one colour. `hover`: what the pointer shows, in the words of plotly.js."""
    return {
        **{"type": "bar", "orientation": "h", "name": name, "y": y, "x": x},
        **{"marker": {"color": colour}, "hovertemplate": f"{hover}<extra></extra>"},
    }


def plot_layout(height: int, x: str, **more: Any) -> dict[str, Any]:
    """What plotly.js needs to place a plot. `height`: in pixels. `x`: the title of the lower axis."""
    return {
        "height": height,
        "margin": {"l": 130, "r": 20, "t": 60, "b": 50},
        "xaxis": {"title": {"text": x}},
        "legend": {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0, "traceorder": "normal"},
        "dragmode": "zoom",
        **more,
    }
