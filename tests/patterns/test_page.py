"""The page has the groups of patterns."""

from pathlib import Path

from tests.patterns.every import PATTERNS
from tests.patterns.page import everything, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "patterns.md"


def test_the_page_has_the_table_of_the_groups() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("## The patterns\n\n")[2].partition("\n\n")[0].strip()
    assert shown == table(), "replace the table below '## The patterns' by the output of `python -m tests.patterns.page groups`"


def test_the_list_has_every_pattern() -> None:
    assert len([line for line in everything().splitlines() if line.startswith("  ")]) == len(PATTERNS)
