"""Prints the tables as Markdown, for docs/reference/state-machine.md. A test compares the two.

python -m tools.tables.markdown

Rule 1: all output is read from the tables, from the docstrings of their enums and from the comments above their rows.
Rule 2: `MACHINES` lists every table. A table that is added there appears on the page.
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from state_machine import bucket, residency, staleness, table
from state_machine.bucket import (
    BUCKETS,
    ORDINARY,
    UNITS,
    BucketAction,
    BucketEvent,
    BucketKind,
    BucketState,
    UnitEvent,
    UnitState,
)
from state_machine.lifecycle import REMEDIES
from state_machine.residency import RESIDENCES, Effect, Request, ResidencyState
from state_machine.staleness import FROM_PASS_TO_PASS, GATHERS, WITHIN_A_PASS, CopyAction, CopyEvent, CopyState
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
    Machine(
        "The unsharded copy of a unit: `AFTER_FORWARD` and `AFTER_BACKWARD`",
        WITHIN_A_PASS,
        (staleness, "WITHIN_A_PASS"),
        (CopyState, CopyEvent, CopyAction),
    ),
    Machine("The unsharded copy of a unit: `NEVER`", FROM_PASS_TO_PASS, (staleness, "FROM_PASS_TO_PASS"), (), WITHIN_A_PASS),
    Machine("A bucket of gradients", ORDINARY, (bucket, "ORDINARY"), (BucketKind, BucketState, BucketEvent, BucketAction)),
    *(
        Machine(f"A bucket of gradients: `{kind.name}`", rows, (bucket, kind.name), (), ORDINARY)
        for kind, rows in BUCKETS.items()
        if rows is not ORDINARY
    ),
    Machine("The gradients of a unit in one backward", UNITS, (bucket, "UNITS"), (UnitState, UnitEvent)),
)

REFUSED: Final = "not allowed"
"""Printed for a row of the original table that the derived table lacks."""


def tables() -> str:
    """Return every machine as Markdown: its enums, and one table for each of its states."""
    parts: list[str] = []
    for machine in MACHINES:
        parts.append(f"## {machine.title}")
        parts += [_words(word) for word in machine.words]
        reasons = _reasons(*machine.source)
        for state in dict.fromkeys((*(machine.like or ()), *machine.rows)):
            cells = [
                (_code(event.name), *_step(step), reasons.get((state.name, event.name), ""))
                for event, step in changed(machine, state)
            ]
            reason = reasons.get((state.name, ""))
            head = f"In `{state.name}`" + (f" ({reason})" if reason else "")
            if cells:
                parts.append(f"{head}:\n\n{table_of(('event', 'leads to', 'does, in order', 'why'), cells)}")
            elif not machine.rows.get(state, {}) and machine.like is None:
                parts.append(f"{head}: no event is allowed.")
    parts.append("## The gather of a copy, by the state of the backward")
    parts.append(
        table_of(("backward of the root", "event"), [(_code(of.name), _code(event.name)) for of, event in GATHERS.items()])
    )
    return "\n\n".join(parts)


def changed(machine: Machine, state: MachineEnum) -> list[tuple[MachineEnum, Any]]:
    """The rows of a state that are printed. In a derived table: those that differ, and None for those that it lacks."""
    row = machine.rows.get(state, {})
    if machine.like is None:
        return list(row.items())
    original = machine.like.get(state, {})
    return [(event, row.get(event)) for event in dict.fromkeys((*original, *row)) if row.get(event) != original.get(event)]


def remedies() -> str:
    """Return the remedies for refused events as Markdown."""
    cells = [(_code(state.name), _code(event.name), remedy) for (state, event), remedy in REMEDIES.items()]
    return table_of(("state of the unit", "event that is refused", "what to do"), cells)


def _step(step: Any) -> tuple[str, str]:
    """The state to which a row leads, and its actions in order; then the name of each flag that is True."""
    if step is None:
        return REFUSED, ""
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
    return f"{head}\n\n{table_of(('word', 'meaning'), [(_code(word.name), said.get(word.name, '')) for word in words])}"


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
    """The comments above the rows of a table, by the names of state and event.

    A comment above a state belongs to the state and the event "". The rows of a state may also be written in a function.
    """
    source = inspect.getsource(sys.modules[module.__name__])
    lines = source.splitlines()
    body = ast.parse(source).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    found: dict[tuple[str, str], str] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name and node.value is not None:
            for rows in (one for one in ast.walk(node.value) if isinstance(one, ast.Dict)):
                for state, row in zip(rows.keys, rows.values, strict=True):
                    function = functions.get(getattr(row.func, "id", "")) if isinstance(row, ast.Call) else None
                    if isinstance(state, ast.Attribute) and (isinstance(row, ast.Dict) or function is not None):
                        found[state.attr, ""] = _comment_above(lines, state.lineno)
                        for event in _keys(row if function is None else function):
                            found[state.attr, event.attr] = _comment_above(lines, event.lineno)
    return found


def _keys(node: ast.AST) -> list[ast.Attribute]:
    """The keys of every mapping that is written in `node`, in order."""
    mappings = [one for one in ast.walk(node) if isinstance(one, ast.Dict)]
    return [key for one in mappings for key in one.keys if isinstance(key, ast.Attribute)]


def _comment_above(lines: list[str], line: int) -> str:
    said: list[str] = []
    above = line - 2
    while lines[above].lstrip().startswith("# "):
        said.insert(0, lines[above].strip().removeprefix("# "))
        above -= 1
    return " ".join(said)


def table_of(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)


def main() -> None:
    """Print the tables."""
    print(tables())


if __name__ == "__main__":
    main()
