"""Retired words stay out of code and pages. docs/reference/glossary.md lists them; the table below says how each is recognised.

Rule 1: a word that nobody would write by chance is retired everywhere: `ANYWHERE`.
Rule 2: a word that is ordinary English too is retired as a name in code, and in backticks: `NAMES`. So are the words of tables.
Rule 3: people's verbs for code are retired in the docstrings and comments of `fsdp` and `state_machine`: `VERBS`.
Rule 4: all of these are retired in the names of tests and of their files.

python -m tests.docs.test_words [file ...]     counts the retired words by package, and shows those of the files
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
GLOSSARY: Final = ROOT / "docs" / "reference" / "glossary.md"
ANYWHERE: Final[dict[str, str]] = {
    "whole parameter": r"whole[- ]param(eter)?s?",
    "parcel": r"parcels?",
    "pending gradient": r"pending gradients?",
    "counted bucket": r"counted buckets?",
    "second portion": r"second portions?",
    "crossing": r"crossings?",
    "root callback": r"root[- ]callbacks?",
    "lent parameters": r"lent param(eter)?s",
    "lines, hang up": r"(hang|hangs|hanging|hung) up",
    "seat, baton": r"batons?",
    "promptness": r"promptness",
    "bystander, world (of the explorer)": r"bystanders?",
    "give back (memory)": r"(give|gives|gave|given|giving)( \w+){0,3} back",
}
"""Row of the glossary -> the words as they stand in prose, in upper or lower case."""

NAMES: Final[dict[str, str]] = {
    "whole parameter": r"wholes?",
    "face": r"faces?",
    "piece (of one parameter)": r"pieces?",
    "box": r"box(es)?",
    "spread": r"spreads?",
    "channel": r"channels?",
    "parcel": r"parcels?",
    "flight": r"flights?",
    "replay": r"replays?",
    "way (of a backward)": r"ways?",
    "crossing": r"crossings?",
    "listener": r"listeners?",
    "hear (an event)": r"hears?|heard|hearer",
    "edit": r"edits?",
    "stash": r"stash(es)?",
    "usage": r"usages?",
    "lent parameters": r"lent",
    "escape": r"escapes?",
    "trail, watch": r"trails?|watch",
    "lines, hang up": r"hang",
    "era": r"eras?",
    "seat, baton": r"seats?|batons?",
    "promptness": r"promptness",
    "bystander, world (of the explorer)": r"bystanders?",
    "draft": r"drafts?",
}
"""Row of the glossary -> the words as one part of a name: `piece` retires `first_piece` and `Piece`, not `pieced`."""

TABLES: Final = ("NEED, FREE", "REDUCE, FLUSH", "WATCH_OUTPUTS", "LEND", "FORWARD_BEGINS", "REPLAY_BEGINS", "BACKWARD_REACHES")
TABLES_TOO: Final = (
    "GRADIENT_ARRIVES",
    "GRADIENTS_READY",
    "BACKWARD_ENDS",
    "SUMMONED (",
    "WHOLE, KEPT",
    "WANT",
    "LAUNCH",
    "FREE_AFTER",
)
"""How the rows of the glossary begin whose words stood in the tables: they are retired as complete names."""

VERBS: Final = r"hears?|heard|tells?|told|blam(e|es|ed)|promis(e|es|ed)"
"""People's verbs for code. Instead: is notified, is called, reports, names, guarantees."""

STAYS: Final = frozenset({"SUMMONED"})
"""The state is called so; the event was."""


class Hit(NamedTuple):
    """A retired word."""

    path: str
    line: int
    word: str


def retired_rows() -> list[str]:
    """The left column of the glossary's list."""
    _, _, rest = GLOSSARY.read_text(encoding="utf-8").partition("\n## Retired words\n")
    return [row for row in re.findall(r"^\| (.+?) \| .+ \|$", rest, flags=re.MULTILINE) if row not in ("retired", "---")]


@cache
def words_of_tables() -> frozenset[str]:
    """The retired states, events, actions and effects."""
    rows = [row for row in retired_rows() if row.startswith(TABLES + TABLES_TOO)]
    return frozenset(re.findall(r"[A-Z_]{3,}", " ".join(rows))) - STAYS


_PROSE: Final = re.compile("|".join(rf"\b(?:{words})\b" for words in ANYWHERE.values()), re.IGNORECASE)
_PART: Final = re.compile("|".join(f"(?:{words})" for words in NAMES.values()))
_VERB: Final = re.compile(rf"\b(?:{VERBS})\b")
_PARTS: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def retired_name(name: str) -> bool:
    """Whether a name in code, or in backticks, is retired or has a retired part."""
    parts = _PARTS.findall(name.replace("in_flight", "").replace("hugging_face", ""))
    return name.strip("_") in words_of_tables() or any(_PART.fullmatch(part.lower()) for part in parts)


def hits_in_prose(path: str, first_line: int, text: str, verbs: bool) -> Iterator[Hit]:
    """Retired words in sentences, and retired names in backticks."""
    for number, line in enumerate(text.splitlines(), first_line):
        for found in _PROSE.finditer(line):
            yield Hit(path, number, found.group())
        for quoted in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            yield from (Hit(path, number, name) for name in re.findall(r"[A-Za-z_]\w*", quoted) if retired_name(name))
        if verbs:
            yield from (Hit(path, number, found.group()) for found in _VERB.finditer(line))


def hits_in_code(path: str, source: str) -> Iterator[Hit]:
    """Retired words in docstrings, other texts and comments, and retired names where they are defined."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                names = [name]
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names = [name]
            case ast.Constant(value=str() as text):
                yield from hits_in_prose(path, node.lineno, text, id(node) in texts)
            case _:
                continue
        yield from (Hit(path, node.lineno, name) for name in names if retired_name(name))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from hits_in_prose(path, token.start[0], token.string, True)


def hits_in_test_names(path: Path) -> Iterator[Hit]:
    """Retired words in the name of a file of tests, and in the names of its tests."""
    name = path.relative_to(ROOT).as_posix()
    tests = [one for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(one, ast.FunctionDef)]
    names = [(1, path.stem), *((one.lineno, one.name) for one in tests if one.name.startswith("test_"))]
    for line, one in names:
        yield from (Hit(name, line, found.group()) for found in retired_in_sentence(one.replace("_", " ")))
        if retired_name(one):
            yield Hit(name, line, one)


def retired_in_sentence(text: str) -> Iterator[re.Match[str]]:
    """Retired words and people's verbs for code in a sentence."""
    yield from _PROSE.finditer(text)
    yield from _VERB.finditer(text)


def scanned() -> list[Path]:
    """Every file that the rules hold for."""
    code = [path for package in ("fsdp", "state_machine") for path in (ROOT / package).rglob("*.py")]
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sorted(path for path in (*code, *pages) if path.exists())


def hits_in(path: Path) -> list[Hit]:
    """The retired words of one file. The list in the glossary is left out."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    if path == GLOSSARY:
        text = text.partition("\n## Retired words\n")[0]
    return [*(hits_in_code(name, text) if path.suffix == ".py" else hits_in_prose(name, 1, text, False))]


@pytest.mark.parametrize("path", scanned(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_retired_word_is_in_use(path: Path) -> None:
    assert not hits_in(path)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_test_is_named_by_a_retired_word(path: Path) -> None:
    assert not list(hits_in_test_names(path))


def test_a_test_that_is_named_by_a_retired_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "test_replays.py"
    file.write_text("def test_who_is_told(): ...\ndef test_a_whole_parameter(): ...\ndef whole(): ...\n")
    assert [(hit.line, hit.word) for hit in hits_in_test_names(file)] == [
        (1, "test_replays"),
        (1, "told"),
        (2, "whole parameter"),
        (2, "test_a_whole_parameter"),
    ]


def test_every_retired_word_of_the_glossary_has_a_pattern() -> None:
    rows = retired_rows()
    assert len(rows) > 30
    assert not [row for row in rows if row not in ANYWHERE and row not in NAMES and not row.startswith(TABLES + TABLES_TOO)]
    assert not [row for row in (*ANYWHERE, *NAMES) if row not in rows]
    assert all(any(row.startswith(head) for row in rows) for head in TABLES + TABLES_TOO)


SOURCE: Final = """
class ModuleFace:
    def f(self, first_piece):
        \'\'\'Gathers the whole
        parameters. The `box` hears nothing of `GRADIENTS_READY`.\'\'\'
        self._listener = other.channel  # gives the memory back
        FORWARD_BEGINS = "a whole parameter"
"""


def test_each_kind_of_retired_word_is_found() -> None:
    found = [(hit.line, hit.word) for hit in hits_in_code("a.py", SOURCE.replace("whole\n        p", "whole p"))]
    assert sorted(found) == [
        (2, "ModuleFace"),
        (3, "first_piece"),
        (4, "GRADIENTS_READY"),
        (4, "box"),
        (4, "hears"),
        (4, "whole parameters"),
        (5, "_listener"),
        (5, "gives the memory back"),
        (6, "FORWARD_BEGINS"),
        (6, "whole parameter"),
    ]


@pytest.mark.parametrize("text", ["The whole model, the way there, and SUMMONED.", "`pieced` and `facet`", "a box of lines"])
def test_ordinary_english_is_not_found(text: str) -> None:
    assert not list(hits_in_prose("a.md", 1, text, True))


def main() -> None:
    """Print the number of retired words by package, and each of them in the files named on the command line."""
    found = [hit for path in scanned() for hit in hits_in(path)]
    for package, count in Counter("/".join(hit.path.split("/")[:2]) for hit in found).most_common():
        print(f"{count:5} {package}")
    for hit in found:
        if any(hit.path.startswith(name) for name in sys.argv[1:]):
            print(f"{hit.path}:{hit.line}: {hit.word}")


if __name__ == "__main__":
    main()
