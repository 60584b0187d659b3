"""The parts of pages that are printed from the tables of the state machine.

python -m tools.generated     writes them
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from state_machine.markdown import remedies, tables

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
MARK: Final = "<!-- {}: written by tools/generated.py -->\n{}<!-- /{} -->"


PARTS: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "state-machine.md": {"tables": tables},
    "errors.md": {"illegal moves": remedies},
}
"""By page and by the name of the marks."""


def generated(page: str, text: str) -> str:
    """`text` with its parts as they are printed today."""
    for name, printed in PARTS[page].items():
        begin, end = MARK.format(name, "\0", name).split("\0")
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"{page} has no {begin} ... {end} to write between"
        text = f"{before}{begin}\n{printed()}\n\n{end}{after}"
    return text


def main() -> None:
    for page in PARTS:
        path = REFERENCE / page
        path.write_text(generated(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
