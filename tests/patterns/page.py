"""The list of patterns in docs/reference/patterns.md, from the table of patterns.

python -m tests.patterns.page
"""

from importlib import import_module
from textwrap import fill

from tests.patterns.every import GROUPS, PATTERNS
from tests.patterns.harness import Pattern

WIDTH = 190


def page() -> str:
    """The patterns of each group: name, collectives, and what is said where they are refused."""
    return "\n".join(_group(group) for group in GROUPS)


def _group(group: str) -> str:
    module = import_module(f"tests.patterns.{group}")
    title = (module.__doc__ or "").splitlines()[0].rstrip(".")
    said = "; ".join(_said(of) for of in PATTERNS.values() if of.program.__module__ == module.__name__)
    return f"### {title}\n\n{fill(f'{said}.', WIDTH, break_long_words=False, break_on_hyphens=False)}\n"


def _said(of: Pattern) -> str:
    happens = f" refused: “{of.refused}”" if of.refused else " every rank may be told that they disagree" if of.disagrees else ""
    counts = ", ".join("-" if number is None else str(number) for number in (of.gathers, of.reductions))
    return f"*{of.name.replace('*', '')}* ({counts}){happens}"


if __name__ == "__main__":
    print(page(), end="")
