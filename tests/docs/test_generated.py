"""The tables in the reference pages are the tables of the state machine."""

import importlib
import inspect
import pkgutil
import re
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import pytest

import state_machine
from state_machine import bucket, residency, staleness, table
from state_machine.lifecycle import REMEDIES
from state_machine.vocabulary import Action, Event, MachineEnum, State
from tools import site_hook
from tools.generated import PARTS, REFERENCE, generated
from tools.tables.markdown import MACHINES, _step, remedies, tables


@pytest.mark.parametrize("page", PARTS)
def test_the_page_shows_the_tables(page: str) -> None:
    shown = (REFERENCE / page).read_text(encoding="utf-8")
    assert shown == generated(page, shown), "run: python -m tools.generated"


def test_the_site_shows_the_tables_of_the_state_machine_and_leaves_other_pages_alone() -> None:
    source = (REFERENCE / "state-machine.md").read_text(encoding="utf-8")
    shown = site_hook.on_page_markdown(source, page=page_of("reference/state-machine.md"), config=None, files=None)
    assert shown == source.replace(site_hook.MARK, tables()) and "## The lifecycle of a unit" in shown
    assert site_hook.on_page_markdown(source, page=page_of("reference/errors.md")) == source
    with pytest.raises(ValueError, match="0 times"):
        site_hook.on_page_markdown("no mark", page=page_of("reference/state-machine.md"))
    configured = (REFERENCE.parents[1] / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\nhooks:\n  - tools/site_hook.py\n" in configured


def page_of(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def test_every_table_of_the_package_is_listed() -> None:
    """A table is a constant that maps words to rows, and a row maps words to tuples: where a word leads, and what it does."""
    listed = {id(machine.rows) for machine in MACHINES}
    found: dict[str, int] = {}
    for module in pkgutil.walk_packages(state_machine.__path__, "state_machine."):
        if not module.name.endswith("__main__"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if name.isupper() and not name.startswith("_") and is_table(value):
                    found[name] = id(value)
    assert len(set(found.values())) >= 5
    assert not {name for name, table in found.items() if table not in listed}, "list it in tools/tables/markdown.py"


def is_table(value: object) -> bool:
    return is_map_of_words(value) and all(
        is_map_of_words(row) and all(isinstance(step, tuple) for step in row.values()) for row in value.values()
    )


def is_map_of_words(value: object) -> TypeGuard[dict[MachineEnum, Any]]:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, MachineEnum) for key in value)


def test_every_row_and_every_word_is_printed_with_its_meaning() -> None:
    printed = tables()
    for machine in MACHINES:
        for words in machine.words:
            for word in words:
                assert f"| `{word.name}` | " in printed
        if machine.like is None:
            for row in machine.rows.values():
                for event, step in row.items():
                    assert f"| `{event.name}` | `{step.to.name}` | " in printed


def test_a_derived_table_shows_the_rows_that_differ_and_no_other() -> None:
    for machine in (machine for machine in MACHINES if machine.like is not None):
        part = tables().partition(f"## {machine.title}\n")[2].partition("\n## ")[0]
        differing = [
            (state, event)
            for state in {*machine.rows, *machine.like}
            for event in {*machine.rows.get(state, {}), *machine.like.get(state, {})}
            if machine.rows.get(state, {}).get(event) != machine.like.get(state, {}).get(event)
        ]
        assert part.count("\n| `") == len(differing)


def test_reasons_are_the_comments_above_the_rows() -> None:
    printed = tables()
    for module in (table, residency, staleness, bucket):
        reasons = re.findall(r"# (.+)\n +\w+\.(\w+): ", inspect.getsource(module))
        assert reasons
        for reason, word in reasons:
            said = re.escape(reason)
            assert re.search(rf"\| `{word}` \| .*{said} \||^In `{word}` \(.*{said}\):", printed, re.MULTILINE), reason


def test_every_remedy_is_printed() -> None:
    assert all(f"| {remedy} |" in remedies() for remedy in REMEDIES.values())


def test_a_row_is_printed_with_its_words_and_the_facts_that_are_true() -> None:
    class Row(NamedTuple):
        to: State
        told: Event | None = None
        actions: tuple[Action, ...] = ()
        queue_callback: bool = False

    state, event, action = (next(iter(words)) for words in (State, Event, Action))
    assert _step(Row(state)) == (f"`{state.name}`", "")
    assert _step(Row(state, event, (action, action), True)) == (
        f"`{state.name}`",
        f"`{event.name}`, `{action.name}`, `{action.name}`, `queue_callback`",
    )
