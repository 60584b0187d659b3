"""Prints the tables as Markdown, for docs/reference/state-machine.md. A test compares the two.

Rule 1: all output is read from the tables, from the docstrings of their enums and from the comments above their rows.
Rule 2: `MACHINES` lists every table. A table that is added there appears on the page.
"""

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from state_machine import residency, table
from state_machine.lifecycle import REMEDIES
from state_machine.residency import RESIDENCES, Effect, Request, ResidencyState
from state_machine.table import BACKWARD, RESHARD_AFTER_FORWARD, TABLES, BackwardEvent, BackwardState, ReshardPolicy
from state_machine.vocabulary import Action, Event, MachineEnum, State


class Machine(NamedTuple):
    """One table, with everything that is needed to print it."""

    title: str
    rows: Mapping[Any, Mapping[Any, Any]]
    source: tuple[Any, str]
    """The module of the table and its name there. The comments above its rows are the reasons."""
    words: tuple[type[MachineEnum], ...]
    """The enums of the table's states, events and actions."""
    like: Mapping[Any, Mapping[Any, Any]] | None = None
    """The table from which this one is derived, if any. Only the rows that differ are printed then."""


MACHINES: Final = (
    Machine(
        "The lifecycle of a unit", RESHARD_AFTER_FORWARD, (table, "RESHARD_AFTER_FORWARD"), (ReshardPolicy, State, Event, Action)
    ),
    *(
        Machine(f"The lifecycle of a unit: `{name.name}`", rows, (table, f"RESHARD_{name.name}"), (), RESHARD_AFTER_FORWARD)
        for name, rows in TABLES.items()
        if rows is not RESHARD_AFTER_FORWARD
    ),
    Machine("The residency of a unit", RESIDENCES, (residency, "RESIDENCES"), (ResidencyState, Request, Effect)),
    Machine("The backward of a root", BACKWARD, (table, "BACKWARD"), (BackwardState, BackwardEvent)),
)


def tables() -> str:
    """Return every machine as Markdown: its enums, and one table for each of its states."""
    parts: list[str] = []
    for machine in MACHINES:
        parts.append(f"## {machine.title}")
        parts += [_words(word) for word in machine.words]
        reasons = _reasons(*machine.source)
        for state, row in machine.rows.items():
            shown = {event: step for event, step in row.items() if machine.like is None or machine.like[state].get(event) != step}
            if shown:
                cells = [
                    (_code(event.name), *_step(step), reasons.get((state.name, event.name), "")) for event, step in shown.items()
                ]
                parts.append(f"In `{state.name}`:\n\n{_markdown(('event', 'leads to', 'does, in order', 'why'), cells)}")
    return "\n\n".join(parts)


def remedies() -> str:
    """Return the remedies for refused events as Markdown."""
    cells = [(_code(state.name), _code(event.name), remedy) for (state, event), remedy in REMEDIES.items()]
    return _markdown(("state of the unit", "event that is refused", "what to do"), cells)


def _step(step: Any) -> tuple[str, str]:
    """The state to which a row leads, and its actions in order; then the name of each flag that is True."""
    names: list[str] = []
    for field, does in zip(step._fields[1:], step[1:], strict=True):
        if isinstance(does, MachineEnum):
            names.append(does.name)
        elif isinstance(does, tuple):
            names += [word.name for word in does]
        elif does:
            names.append(field)
    return _code(step.to.name), ", ".join(map(_code, names))


def _code(name: str) -> str:
    return f"`{name}`"


def _words(words: type[MachineEnum]) -> str:
    said = _said(words)
    head = f"**{words.__name__}.** {inspect.getdoc(words)}"
    return f"{head}\n\n{_markdown(('word', 'meaning'), [(_code(word.name), said.get(word.name, '')) for word in words])}"


def _said(words: type[Enum]) -> dict[str, str]:
    """The docstring below each member. Python keeps it in the source only."""
    tree = ast.parse(inspect.getsource(words)).body[0]
    assert isinstance(tree, ast.ClassDef), "the source of a class"
    found: dict[str, str] = {}
    for member, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(member.targets[0], ast.Name), "a member of an enum"
            found[member.targets[0].id] = " ".join(str(below.value.value).split())
    return found


def _reasons(module: Any, name: str) -> dict[tuple[str, str], str]:
    """The comments above the rows of a table that is a literal, by the names of state and event."""
    source = inspect.getsource(sys.modules[module.__name__])
    lines = source.splitlines()
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name and isinstance(node.value, ast.Dict):
            for state, row in zip(node.value.keys, node.value.values, strict=True):
                for event in row.keys if isinstance(state, ast.Attribute) and isinstance(row, ast.Dict) else ():
                    if isinstance(state, ast.Attribute) and isinstance(event, ast.Attribute):
                        found[state.attr, event.attr] = _comment_above(lines, event.lineno)
    return found


def _comment_above(lines: list[str], line: int) -> str:
    said: list[str] = []
    above = line - 2
    while lines[above].lstrip().startswith("# "):
        said.insert(0, lines[above].strip().removeprefix("# "))
        above -= 1
    return " ".join(said)


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)
