"""The table of docs/reference/patterns.md, from the table of patterns.

python -m tests.patterns.page
"""

from importlib import import_module

from tests.patterns.every import GROUPS, PATTERNS
from tests.patterns.harness import Pattern


def page() -> str:
    """One table a group: pattern, why it is here, what happens, what it costs."""
    return "\n".join(_table(group) for group in GROUPS)


def _table(group: str) -> str:
    module = import_module(f"tests.patterns.{group}")
    title = (module.__doc__ or "").splitlines()[0].rstrip(".")
    rows = [_row(of) for of in PATTERNS.values() if of.program.__module__ == module.__name__]
    head = [
        "| pattern | why it is here | what happens | gathers | reductions | how that comes about |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([f"### {title}", "", *head, *rows, ""])


def _row(of: Pattern) -> str:
    happens = "right"
    if of.refused:
        happens = f"refused: “{of.refused}”"
    elif of.disagrees:
        happens = "right, or every rank is told that they disagree"
    gathers, reductions = ("" if number is None else str(number) for number in (of.gathers, of.reductions))
    cells = (of.name, of.reason, happens, gathers, reductions, of.cost)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    print(page())
