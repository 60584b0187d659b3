"""Changes every row of every table, one at a time, and reports which of the changes no test notices.

A row is deleted, sent to every other state, robbed of each action, has neighbouring actions swapped; every missing pair
gets a row that silently ignores it. The changed table is put into the running process, and the pure tests are run on it,
the fastest first, until one fails. `test_pairs.py` reads the tables and is blind by design, so it is not among them.

    python -m tools.mutate_tables                     all tests together
    python -m tools.mutate_tables --tests explorer    what the explorer alone would notice
    python -m tools.mutate_tables --tables EARLY      changes of one table alone
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from state_machine.bucket import BUCKETS, UNITS, BucketEvent, UnitEvent
from state_machine.explorer.explore import TREES, explore
from state_machine.explorer.explore_buckets import SCENES, explore_buckets
from state_machine.residency import RESIDENCES, Request
from state_machine.staleness import COPY_TABLES, FROM_PASS_TO_PASS, GATHERS, WITHIN_A_PASS, CopyEvent
from state_machine.table import BACKWARD, TABLES, BackwardEvent, BackwardStep
from state_machine.vocabulary import Event
from tests.state_machine_tests import stories, test_bucket, test_properties, test_residency, test_root, test_staleness

UNIT_EVENTS = sorted(
    {step.event for row in BACKWARD.values() for step in row.values() if step.event}, key=lambda event: event.value
)
"""The events that a backward sends to its units."""
Row = MutableMapping[Any, Any]


class Mutant(NamedTuple):
    """One changed row."""

    table: str
    kind: str
    what: str
    planted: AbstractContextManager[Any]
    """A context in which the row is changed."""


# the changes


def changed_rows(rows: Mapping[Any, Mapping[Any, Any]], words: Sequence[Any]) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """Every change: its kind, its description, the state, the event, and the new step (None deletes the row)."""
    rows = {**rows}  # the tables are changed between two of them
    for state, row in rows.items():
        template = next(step for one in rows.values() for step in one.values())
        for word in words:
            step = row.get(word)
            name = f"{state.name} {word.name}"
            if step is None:
                yield "silent row", name, state, word, type(template)(state)
                continue
            yield "deleted", name, state, word, None
            for other in rows:
                if other is not step.to:
                    yield "redirected", f"{name} -> {other.name}", state, word, step._replace(to=other)
            yield from changed_actions(name, state, word, step)


def changed_actions(name: str, state: Any, word: Any, step: Any) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """The changes of what a row asks for."""
    if isinstance(step, BackwardStep):
        yield "callback flipped", name, state, word, step._replace(queue_callback=not step.queue_callback)
        for event in (None, *UNIT_EVENTS):
            if event is not step.event:
                yield "other event", f"{name}: {event and event.name}", state, word, step._replace(event=event)
        return
    field, asked = step._fields[1], step[1]
    if isinstance(asked, bool):
        yield "flag flipped", name, state, word, step._replace(**{field: not asked})
        return
    for i, action in enumerate(asked):
        yield "action removed", f"{name} without {action.name}", state, word, step._replace(**{field: asked[:i] + asked[i + 1 :]})
    for i in range(len(asked) - 1):
        swapped = (*asked[:i], asked[i + 1], asked[i], *asked[i + 2 :])
        yield "actions swapped", f"{name}: {asked[i + 1].name} first", state, word, step._replace(**{field: swapped})


def with_step(row: Mapping[Any, Any], word: Any, step: Any) -> Row:
    """The row with one step changed or, for None, without it."""
    return {w: s for w, s in {**row, word: step}.items() if s is not None}


def copy_mutants() -> Iterator[Mutant]:
    """Those of the tables of the copies, which strategies share, and of the event that a gather is."""
    tables = cast(Row, COPY_TABLES)
    for name, rows in (("WITHIN_A_PASS", WITHIN_A_PASS), ("FROM_PASS_TO_PASS", FROM_PASS_TO_PASS)):
        for kind, what, state, word, step in changed_rows(rows, tuple(CopyEvent)):
            for strategy, table in tuple(COPY_TABLES.items()):
                if table is rows:
                    changed = {**rows, state: with_step(rows[state], word, step)}
                    yield Mutant(name, kind, f"{strategy.name}: {what}", patch.dict(tables, {strategy: changed}))
    for backward, event in GATHERS.items():
        for other in {one: None for one in GATHERS.values()}:
            if other is not event:
                change = patch.dict(cast(Row, GATHERS), {backward: other})
                yield Mutant("GATHERS", "other event", f"{backward.name}: {other.name}", change)


def mutants() -> Iterator[Mutant]:
    """Every change of every table, in order."""
    for bucket_kind, bucket_table in tuple(BUCKETS.items()):
        for kind, what, state, word, step in changed_rows(bucket_table, tuple(BucketEvent)):
            changed_table = {**bucket_table, state: with_step(bucket_table[state], word, step)}
            yield Mutant(bucket_kind.name, kind, what, patch.dict(cast(Row, BUCKETS), {bucket_kind: changed_table}))
    tables = cast(Row, TABLES)
    for strategy, table in tuple(TABLES.items()):
        for kind, what, state, word, step in changed_rows(table, tuple(Event)):
            changed = {**table, state: with_step(table[state], word, step)}
            yield Mutant(strategy.name, kind, what, patch.dict(tables, {strategy: changed}))
    for name, rows, words in (
        ("RESIDENCES", RESIDENCES, tuple(Request)),
        ("BACKWARD", BACKWARD, tuple(BackwardEvent)),
        ("UNITS", UNITS, tuple(UnitEvent)),
    ):
        table = cast(Row, rows)
        for kind, what, state, word, step in changed_rows(table, words):
            yield Mutant(name, kind, what, patch.dict(table, {state: with_step(table[state], word, step)}))
    yield from copy_mutants()


# the tests


def cases(module: Any) -> Iterator[Callable[[], None]]:
    """The test functions of a module, once per parameter."""
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        names = [mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],) for mark in marks]
        for values in itertools.product(*(list(mark.args[1]) for mark in marks)):
            given: dict[str, Any] = {}
            for argument, value in zip(names, values, strict=True):
                given.update(zip(argument, value if len(argument) > 1 else (value,), strict=True))
            yield partial(function, **given)


def run_stories() -> None:
    for story, strategy in stories.TOLD:
        stories.tell(story, strategy)


def run_cases(module: Any) -> None:
    for case in cases(module):
        case()


def run_buckets() -> None:
    test_bucket.check_units()
    for kind in BUCKETS:
        test_bucket.check_cells(kind)


def run_bucket_explorer() -> None:
    for scene in SCENES:
        if scene.ranks == 1 or scene.name in QUICK:
            found = explore_buckets(scene)
            assert not found.violations, found.story


def run_properties() -> None:
    quick = settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=25,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
    )
    for machine in test_properties.WANDERERS:
        run_state_machine_as_test(machine, settings=quick)


def run_explorer() -> None:
    for tree in TREES:
        if len(tree.units) == 1 or tree.name in ("pair-frozen", "chain-frozen"):
            found = explore(tree)
            assert not found.violations, found.story


QUICK = ("ordinary-shared", "ordinary-kept", "early", "early-kept")
TESTS: Mapping[str, Callable[[], None]] = {
    "buckets": run_buckets,
    "stories": run_stories,
    "root": partial(run_cases, test_root),
    "residency": partial(run_cases, test_residency),
    "staleness": partial(run_cases, test_staleness),
    "bucket-explorer": run_bucket_explorer,
    "explorer": run_explorer,
    "properties": run_properties,
}


def noticed_by(names: Sequence[str]) -> str | None:
    """The first of the tests that fails, or None."""
    for name in names:
        try:
            TESTS[name]()
        except (Exception, pytest.fail.Exception):
            return name
    return None


def main() -> int:
    """Run it, print the tables, return 1 if a change went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS), help="which tests may notice")
    parser.add_argument("--tables", nargs="+", metavar="TABLE", help="the tables to change; all by default")
    options = parser.parse_args()
    names, tables = options.tests, options.tables
    if (broken := noticed_by(names)) is not None:
        print(f"the {broken} fail on the tables as they are; nothing can be learnt")
        return 2
    began = time.perf_counter()
    total: Counter[tuple[str, str]] = Counter()
    killed: Counter[tuple[str, str]] = Counter()
    first: Counter[str] = Counter()
    survivors: list[Mutant] = []
    for mutant in mutants():
        if tables is not None and mutant.table not in tables:
            continue
        total[mutant.table, mutant.kind] += 1
        with mutant.planted:
            name = noticed_by(names)
        if name is None:
            survivors.append(mutant)
        else:
            killed[mutant.table, mutant.kind] += 1
            first[name] += 1
    for (table, kind), number in total.items():
        print(f"{table:<20} {kind:<16} {killed[table, kind]:>4} / {number}")
    print(f"{'together':<37} {killed.total():>4} / {total.total()}   in {time.perf_counter() - began:.0f} s")
    print("noticed first by: " + ", ".join(f"{name} {number}" for name, number in first.items()))
    for mutant in survivors:
        print(f"survived: {mutant.table}: {mutant.kind}: {mutant.what}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
