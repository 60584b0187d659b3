"""The texts of the errors a user can meet, read from the sources without importing them.

python -m tools.error_texts     mends the quotes on docs/reference/errors.md whose texts were reworded; prints the rest
"""

import ast
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "errors.md"
HOLE: Final = "…"
"""Stands for a value that is filled in when the error is raised."""
OUR_BUG: Final = "this is a bug in fsdp"
"""Errors that say so are one paragraph of the page, and no row."""
RAISED_WORDS: Final = 2
OTHER_WORDS: Final = 6
"""Texts with fewer words, outside `raise`, are parts of other texts."""
HELP: Final = ("ArgumentParser", "add_parser", "add_argument", "disable", "info", "warning")
"""Calls whose texts are no errors: help, and the log."""
PRINTS: Final = tuple(ROOT / "fsdp" / name for name in ("reporting", "planning", "rehearsal"))
"""The packages that print reports. Their errors are in `raise`."""
_WORD: Final = re.compile(r"[A-Za-z']{2,}")


@cache
def texts() -> dict[str, str]:
    """Each text, with the first place in the sources that has it: `file:line`."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "fsdp").rglob("*.py")):
        for line, text in _texts_of(ast.parse(path.read_text(encoding="utf-8")), raised_only=path.parent in PRINTS):
            found.setdefault(text, f"{path.relative_to(ROOT)}:{line}")
    return found


def quotes(page: str) -> list[str]:
    """The texts that the page quotes: the first cell of each row of an error."""
    return [row.replace("\\|", "|") for row in re.findall(r"^\| ``(.+?)`` \| ", page, flags=re.MULTILINE)]


def quote(text: str) -> str:
    """A text as the page shows it."""
    return f"| ``{text.replace('|', chr(92) + '|')}`` | "


def updated(page: str) -> str:
    """The page with each stale quote replaced by the nearest text that the page lacks."""
    there, wanted = texts(), quotes(page)
    missing = [text for text in there if text not in wanted]
    for old in (text for text in wanted if text not in there):
        for new in get_close_matches(old, missing, n=1, cutoff=0.5):
            page = page.replace(quote(old), quote(new))
            missing.remove(new)
    return page


def _texts_of(tree: ast.Module, raised_only: bool = False) -> Iterator[tuple[int, str]]:
    skipped = _docstrings_and_help(tree)
    raised = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    for node in ast.walk(tree):
        text = "" if id(node) in skipped or (raised_only and id(node) not in raised) else _rendered(node)
        words = len(_WORD.findall(text))
        if words >= (RAISED_WORDS if id(node) in raised else OTHER_WORDS) and " " in text and OUR_BUG not in text:
            yield node.lineno, text.strip()  # type: ignore[attr-defined]


def _docstrings_and_help(tree: ast.Module) -> set[int]:
    """The ids of nodes that are no text of an error: docstrings, texts of the command line, of `assert`, parts of f-strings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            found.update(id(part) for value in node.values if isinstance(value, ast.Constant) for part in ast.walk(value))
            # short pieces of text inside a hole are shown as the hole
            found.update(id(part) for value in node.values if isinstance(value, ast.FormattedValue) for part in ast.walk(value))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            found.update(id(part) for part in ast.walk(node.msg))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in HELP:
                found.update(id(part) for part in ast.walk(node))
        elif isinstance(node, ast.AnnAssign):
            found.update(id(part) for part in ast.walk(node.annotation))
    return found


def _rendered(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [str(value.value) if isinstance(value, ast.Constant) else HOLE for value in node.values]
        return re.sub(rf"{HOLE}+", HOLE, "".join(parts))
    return ""


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    page = quotes(PAGE.read_text(encoding="utf-8"))
    for text, place in texts().items():
        if text not in page:
            print(f"no row on the page: {place}: {text}")
    for text in page:
        if text not in texts():
            print(f"no longer raised: {text}")


if __name__ == "__main__":
    main()
