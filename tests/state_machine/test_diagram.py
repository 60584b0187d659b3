"""The picture in the README is the table."""

import re
from pathlib import Path

from state_machine.__main__ import main
from state_machine.diagram import diagram
from state_machine.table import FREE_AFTER_FORWARD
from state_machine.vocabulary import Event

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_shows_the_diagram_of_the_table() -> None:
    blocks = re.findall(r"^```mermaid\n(.*?)\n```$", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert diagram() in blocks, "replace the ```mermaid block of README.md by the output of `python -m state_machine diagram`"


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
