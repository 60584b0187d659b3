"""Words that earlier versions used stay out of code, pages and names of tests.

Rule 1: a word that nobody would write by chance is retired everywhere: `ANYWHERE`.
Rule 2: a word that is ordinary English too is retired as part of a name in code and in backticks: `NAMES`; those of tables, too.
Rule 3: people's verbs for code are retired in the docstrings and comments of `fsdp` and `state_machine`: `VERBS`.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
ANYWHERE: Final = re.compile(
    r"\b(?:whole[- ]param(eter)?s?|parcels?|pending gradients?|counted buckets?|second portions?|crossings?|root[- ]callbacks?"
    r"|lent param(eter)?s|(hang|hangs|hanging|hung) up|batons?|promptness|bystanders?"
    r"|(give|gives|gave|given|giving)( \w+){0,3} back)\b",
    re.IGNORECASE,
)
NAMES: Final = re.compile(
    "wholes?|faces?|pieces?|box(es)?|spreads?|channels?|parcels?|flights?|replays?|ways?|crossings?|listeners?|hears?|heard|hearer|edits?"
    "|stash(es)?|usages?|lent|escapes?|trails?|watch|hang|eras?|seats?|batons?|promptness|bystanders?|drafts?"
)
TABLES: Final = re.compile(
    "NEED|FREE|KEEP|REFRESH|REDUCE|FLUSH|DRAIN|DROP|STASH|WATCH_OUTPUTS|GUARD|LEND|RECLAIM|(FORWARD|REPLAY)_(BEGINS|ENDS)|INFERENCE_ENDS"
    "|FORWARD_FAILS|BACKWARD_(REACHES|LEFT|ENDS|ENDS_UNSYNCED|FAILS)|GRADIENT_ARRIVES|GRADIENT_FROM_OUTSIDE|GRADIENTS_(READY|KEPT)"
    "|RETURNED|DISCARDED|WHOLE|KEPT|GATHERING|WANT|LAUNCH|AWAIT|SHOW|HIDE|RELEASE|(FREE|KEEP)_AFTER_FORWARD|KEEP_ALWAYS"
)
VERBS: Final = re.compile(r"\b(?:hears?|heard|tells?|told|blam(e|es|ed)|promis(e|es|ed))\b")
PARTS: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


class Hit(NamedTuple):
    """A retired word."""

    path: str
    line: int
    word: str


def retired_name(name: str) -> bool:
    """Whether a name in code, or in backticks, is retired or has a retired part."""
    parts = PARTS.findall(name.replace("in_flight", "").replace("hugging_face", ""))
    return bool(TABLES.fullmatch(name.strip("_"))) or any(NAMES.fullmatch(part.lower()) for part in parts)


def hits_in_prose(path: str, first_line: int, text: str, verbs: bool) -> Iterator[Hit]:
    """Retired words in sentences, and retired names in backticks."""
    for number, line in enumerate(text.splitlines(), first_line):
        for pattern in (ANYWHERE, VERBS) if verbs else (ANYWHERE,):
            yield from (Hit(path, number, found.group()) for found in pattern.finditer(line))
        for quoted in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            yield from (Hit(path, number, name) for name in re.findall(r"[A-Za-z_]\w*", quoted) if retired_name(name))


def hits_in_code(path: str, source: str) -> Iterator[Hit]:
    """Retired words in docstrings, other texts and comments, and retired names where they are defined."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield from [Hit(path, node.lineno, name)] * retired_name(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield from [Hit(path, node.lineno, name)] * retired_name(name)
            case ast.Constant(value=str() as text):
                yield from hits_in_prose(path, node.lineno, text, id(node) in texts)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from hits_in_prose(path, token.start[0], token.string, True)


def hits_in_test_names(path: Path) -> Iterator[Hit]:
    """Retired words in the name of a file of tests, and in the names of its tests."""
    tests = [one for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(one, ast.FunctionDef)]
    for line, name in [(1, path.stem), *((one.lineno, one.name) for one in tests if one.name.startswith("test_"))]:
        yield from (Hit(path.name, line, hit.word) for hit in hits_in_prose(path.name, line, name.replace("_", " "), True))
        yield from [Hit(path.name, line, name)] * retired_name(name)


def scanned() -> list[Path]:
    """Every file that the first three rules hold for."""
    code = [path for package in ("fsdp", "state_machine") for path in (ROOT / package).rglob("*.py")]
    return sorted([*code, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def test_no_retired_word_is_in_use() -> None:
    found: list[Hit] = []
    for path in scanned():
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        found += hits_in_code(name, text) if path.suffix == ".py" else hits_in_prose(name, 1, text, False)
    for path in (ROOT / "tests").rglob("*.py"):
        found += hits_in_test_names(path)
    assert not found


def test_each_kind_of_retired_word_is_found_and_ordinary_english_is_not(tmp_path: Path) -> None:
    source = """
class ModuleFace:
    def f(self, first_piece):
        '''Gathers whole parameters. The `box` hears nothing of `GRADIENTS_READY`.'''
        self._listener = other.channel  # gives the memory back
        FORWARD_BEGINS = "a whole parameter"
"""
    found = "ModuleFace first_piece whole parameters box hears GRADIENTS_READY _listener gives the memory back FORWARD_BEGINS "
    found += "whole parameter"
    assert sorted(" ".join(hit.word for hit in hits_in_code("a.py", source)).split()) == sorted(found.split())
    for text in ("The whole model, the way there, and SUMMONED.", "`pieced` and `facet`", "a box of lines"):
        assert not list(hits_in_prose("a.md", 1, text, True))
    file = tmp_path / "test_replays.py"
    file.write_text("def test_who_is_told(): ...\ndef test_a_whole_parameter(): ...\ndef whole(): ...\n")
    wanted = [(1, "test_replays"), (1, "told"), (2, "whole parameter"), (2, "test_a_whole_parameter")]
    assert [(hit.line, hit.word) for hit in hits_in_test_names(file)] == wanted
