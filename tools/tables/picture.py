"""Draws the usual path of a unit through the table as SVG, for docs/figures/lifecycle.svg. A test compares the two.

python -m tools.tables.picture > docs/figures/lifecycle.svg
"""

from typing import Final, NamedTuple

from state_machine.table import RESHARD_AFTER_FORWARD, Step, Table
from state_machine.vocabulary import Event, State


class _Rectangle(NamedTuple):
    """One state in the picture: its centre, its caption, and whether the parameters are unsharded in it."""

    x: int
    y: int
    note: str
    unsharded: bool


class _Arrow(NamedTuple):
    """One transition in the picture: its path and the position of its label."""

    start: State
    end: State
    path: str
    x: int
    y: int
    anchor: str = "middle"


_WIDTH, _HEIGHT = 150, 46
_RECTANGLES: Final = {
    State.IDLE: _Rectangle(405, 225, "only the shard is in memory", False),
    State.FORWARD: _Rectangle(405, 50, "computes", True),
    State.BACKWARD_PRE: _Rectangle(800, 225, "autograd is inside", True),
    State.BACKWARD_POST: _Rectangle(800, 385, "gradients are reduced", False),
    State.SUMMONED: _Rectangle(90, 225, "the user has the full values", True),
}
_ARROWS: Final = (
    _Arrow(State.IDLE, State.FORWARD, "M385 202 V75", 375, 133, "end"),
    _Arrow(State.FORWARD, State.IDLE, "M425 73 V200", 435, 133, "start"),
    _Arrow(State.IDLE, State.BACKWARD_PRE, "M480 225 H723", 602, 198),
    _Arrow(State.BACKWARD_PRE, State.BACKWARD_POST, "M800 248 V360", 790, 300, "end"),
    _Arrow(State.BACKWARD_POST, State.IDLE, "M725 385 H405 V250", 565, 406),
    _Arrow(State.IDLE, State.SUMMONED, "M330 215 H167", 248, 188),
    _Arrow(State.SUMMONED, State.IDLE, "M165 235 H328", 248, 256),
)


def picture(table: Table = RESHARD_AFTER_FORWARD) -> str:
    """Return the picture as SVG.

    If several events lead from one state to another, it shows the first, because the table lists the usual one first.
    """
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 890 445" font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>',
        '<rect width="890" height="445" fill="#ffffff"/>',
    ]
    for arrow in _ARROWS:
        event, step = _first_row(table, arrow.start, arrow.end)
        lines.append(f'<path d="{arrow.path}" fill="none" stroke="#444" stroke-width="1.5" marker-end="url(#tip)"/>')
        lines.append(_text(arrow.x, arrow.y, event.name, arrow.anchor, 'font-weight="bold" fill="#222"'))
        actions = ", ".join(action.name for action in step.actions)
        lines.append(_text(arrow.x, arrow.y + 15, actions, arrow.anchor, 'font-size="10.5" fill="#666"'))
    for state, rectangle in _RECTANGLES.items():
        fill = "#ffe3bd" if rectangle.unsharded else "#d8e8f8"
        corner = f'x="{rectangle.x - _WIDTH // 2}" y="{rectangle.y - _HEIGHT // 2}"'
        lines.append(f'<rect {corner} width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="{fill}" stroke="#444"/>')
        lines.append(_text(rectangle.x, rectangle.y - 2, state.name, "middle", 'font-weight="bold" fill="#111"'))
        lines.append(_text(rectangle.x, rectangle.y + 14, rectangle.note, "middle", 'font-size="10.5" fill="#444"'))
    notes = (("#ffe3bd", "the unit's parameters are unsharded"), ("#d8e8f8", "only this rank's shard"))
    for number, (fill, note) in enumerate(notes):
        y = 350 + 20 * number
        lines.append(f'<rect x="15" y="{y}" width="14" height="14" rx="3" fill="{fill}" stroke="#444"/>')
        lines.append(_text(37, y + 11, note, "start", 'fill="#444"'))
    lines.append(_text(15, 405, "bold: what happened; below it: what the engine does, in order", "start", 'fill="#444"'))
    lines.append(_text(15, 425, f"{Event.STEP_ABANDONED.name} leads to IDLE from every state", "start", 'fill="#444"'))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _first_row(table: Table, start: State, end: State) -> tuple[Event, Step]:
    return next((event, step) for event, step in table[start].items() if step.to is end)


def _text(x: int, y: int, text: str, anchor: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {style}>{text}</text>'


if __name__ == "__main__":
    print(picture(), end="")
