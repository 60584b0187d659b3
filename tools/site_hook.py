"""What mkdocs does with a page when the site is built: the tables of the state machine are printed where the page has its mark.

mkdocs.yml names this file; `make docs` puts the root on the path. torch is not needed.
`python -m tools.tables.markdown` prints the same.
"""

from typing import Any, Final

from tools.tables.markdown import tables

PAGE: Final = "reference/state-machine.md"
MARK: Final = "<!-- tables -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page as the site has it."""
    if page.file.src_uri != PAGE:
        return markdown
    if markdown.count(MARK) != 1:
        raise ValueError(f"{PAGE} has the mark {MARK} {markdown.count(MARK)} times; it must be there once.")
    return markdown.replace(MARK, tables())
