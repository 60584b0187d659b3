"""docs/reference/errors.md has a row for each text that a user can meet, and no other."""

import ast
import re

import pytest

from state_machine.lifecycle import REMEDIES
from tools import error_texts

PAGE = error_texts.PAGE.read_text(encoding="utf-8")
REMEDY = "mend docs/reference/errors.md: `python -m tools.error_texts` follows texts that were reworded and names the rest"


def test_every_text_has_a_row() -> None:
    rows = error_texts.quotes(PAGE)
    missing = {place: text for text, place in error_texts.texts().items() if text not in rows}
    assert not missing, REMEDY


def test_no_row_quotes_a_text_that_is_gone() -> None:
    there = error_texts.texts()
    assert not [text for text in error_texts.quotes(PAGE) if text not in there], REMEDY


def test_every_row_is_there_once_and_says_a_cause_and_a_remedy() -> None:
    rows = error_texts.quotes(PAGE)
    assert len(rows) == len(set(rows))
    for line in PAGE.splitlines():
        if line.startswith("| ``"):
            cells = re.split(r"(?<!\\)\|", line)
            assert len(cells) == 5 and all(len(cell.strip()) > 3 for cell in cells[1:-1]), line


def test_every_remedy_of_an_illegal_move_is_there() -> None:
    assert all(remedy in PAGE for remedy in REMEDIES.values())


def test_every_class_of_errors_is_there() -> None:
    tree = ast.parse(next((error_texts.ROOT / "fsdp").rglob("errors.py")).read_text(encoding="utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert classes
    for name in (*classes, "IllegalTransition"):
        assert f"| `fsdp.{name}` |" in PAGE


SOURCE = '''
"""A docstring of more than six words that nobody meets."""
import argparse

WHY = "the loss came through other units on other ranks"
SHORT = "two words"


def refuse(name, kind):
    if name:
        raise ShardingError(f"{name} is gone" + ("; it was there" if kind else ""))
    assert kind, "an assertion of more than six words is a bug"
    argparse.ArgumentParser(description="a text of the command line is no error")
    raise RuntimeError("this cannot be: this is a bug in fsdp, please report it")
'''


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("… is gone", True),
        ("; it was there", True),
        ("the loss came through other units on other ranks", True),
        ("two words", False),
        ("A docstring of more than six words that nobody meets.", False),
        ("an assertion of more than six words is a bug", False),
        ("a text of the command line is no error", False),
        ("this cannot be: this is a bug in fsdp, please report it", False),
    ],
)
def test_texts_that_a_user_meets_are_found_and_no_others(text: str, met: bool) -> None:
    assert (text in [found for _, found in error_texts._texts_of(ast.parse(SOURCE))]) is met


def test_a_text_that_was_reworded_is_followed() -> None:
    text = next(text for text in error_texts.texts() if len(text) > 100)
    old = text.replace(" a ", " the ").replace(" is ", " was ")
    stale = PAGE.replace(error_texts.quote(text), error_texts.quote(old))
    assert stale != PAGE
    assert error_texts.updated(stale) == PAGE
