"""The groups of patterns in docs/reference/patterns.md, and a list of all patterns, from the table of patterns.

python -m tests.patterns.page            prints each pattern with its gathers and reductions
python -m tests.patterns.page groups     prints the table of the page
"""

import sys
from importlib import import_module

from tests.patterns.every import GROUPS, PATTERNS
from tests.patterns.harness import Pattern


def table() -> str:
    """A row for each group: what its patterns are about, how many there are, and what is said where they are refused."""
    rows = ["| what the patterns are about | patterns | refused, by what the error says |", "| --- | ---: | --- |"]
    for group in GROUPS:
        refused = "; ".join(f"*{_name(one)}*: “{one.refused}”" for one in _patterns_of(group) if one.refused)
        rows.append(f"| {_title(group)} | {len(_patterns_of(group))} | {refused or '–'} |")
    return "\n".join(rows)


def everything() -> str:
    """The patterns of each group: name, collectives, and what is said where they are refused."""
    return "\n\n".join(f"{_title(group)}\n" + "\n".join(map(_said, _patterns_of(group))) for group in GROUPS)


def _title(group: str) -> str:
    return (import_module(f"tests.patterns.{group}").__doc__ or "").splitlines()[0].rstrip(".")


def _patterns_of(group: str) -> list[Pattern]:
    return [of for of in PATTERNS.values() if of.program.__module__ == f"tests.patterns.{group}"]


def _name(of: Pattern) -> str:
    return of.name.replace("*", "")


def _said(of: Pattern) -> str:
    happens = f" refused: “{of.refused}”" if of.refused else " every rank may be told that they disagree" if of.disagrees else ""
    counts = ", ".join("-" if number is None else str(number) for number in (of.gathers, of.reductions))
    return f"  {_name(of)} ({counts}){happens}"


if __name__ == "__main__":
    print(table() if sys.argv[1:] == ["groups"] else everything())
