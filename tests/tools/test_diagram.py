"""The diagram is the table, and commands print both. (The reference pages: tests/docs/test_generated.py.)"""

import re

from state_machine.table import RESHARD_AFTER_FORWARD
from state_machine.vocabulary import Event
from tools.tables import diagram as diagram_command
from tools.tables import markdown
from tools.tables.diagram import diagram
from tools.tables.markdown import tables


def test_every_row_is_an_arrow() -> None:
    arrows = [line for line in diagram().splitlines() if " --> " in line]
    for state, row in RESHARD_AFTER_FORWARD.items():
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
    diagram_command.main()
    assert capsys.readouterr().out == diagram() + "\n"


def test_a_command_prints_the_tables(capsys) -> None:  # type: ignore[no-untyped-def]
    markdown.main()
    assert capsys.readouterr().out == tables() + "\n"
