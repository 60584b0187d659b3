"""The page lists the patterns."""

from pathlib import Path

from tests.patterns.page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "patterns.md"


def test_the_page_lists_the_patterns_and_their_collectives() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("## The patterns\n\n")[2]
    assert shown == page(), "replace what follows '## The patterns' by the output of `python -m tests.patterns.page`"
