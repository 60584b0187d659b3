"""Pictures of the state machine are the table. (Those of the reference pages: tests/docs/test_generated.py.)"""

import re
from pathlib import Path

from state_machine.__main__ import main
from state_machine.diagram import diagram, happy_path, tables
from state_machine.table import FREE_AFTER_FORWARD
from state_machine.vocabulary import Event

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_shows_the_table_or_its_happy_path() -> None:
    blocks = re.findall(r"^```mermaid\n(.*?)\n```$", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert block in (diagram(), happy_path()), "the README may show state_machine.diagram.diagram() or happy_path()"


def test_every_row_is_an_arrow() -> None:
    arrows = [line for line in diagram().splitlines() if " --> " in line]
    for state, row in FREE_AFTER_FORWARD.items():
        for event, step in row.items():
            actions = ", ".join(action.name for action in step.actions)
            drawn = [
                arrow
                for arrow in arrows
                if arrow.strip().startswith(f"{state.name} --> {step.to.name}:")
                and event.name in re.split(r": | / | \[", arrow)
                and (arrow.endswith(f"[{actions}]") if actions else not arrow.endswith("]"))
            ]
            assert len(drawn) == (event is not Event.STEP_ABANDONED)


def test_the_command_prints_it(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["diagram"]) == 0
    assert capsys.readouterr().out == diagram() + "\n"


def test_a_command_prints_the_tables(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["tables"]) == 0
    assert capsys.readouterr().out == tables() + "\n"
