"""Prints a table as a Mermaid diagram.

python -m tools.tables.diagram
"""

from collections import defaultdict

from state_machine.table import RESHARD_AFTER_FORWARD, Table
from state_machine.vocabulary import Event, State


def diagram(table: Table = RESHARD_AFTER_FORWARD) -> str:
    """Return the table as a Mermaid state diagram, with one arrow for each pair of states and list of actions."""
    arrows: dict[tuple[State, State, str], list[Event]] = defaultdict(list)
    for state, row in table.items():
        for event, step in row.items():
            if event is not Event.STEP_ABANDONED:
                arrows[state, step.to, ", ".join(a.name for a in step.actions)].append(event)
    lines = ["stateDiagram-v2", "    [*] --> IDLE"]
    for (state, to, actions), events in arrows.items():
        label = " / ".join(event.name for event in events)
        lines.append(f"    {state.name} --> {to.name}: {label}" + (f" [{actions}]" if actions else ""))
    lines.append("    note right of IDLE: STEP_ABANDONED leads here from everywhere")
    return "\n".join(lines)


def main() -> None:
    """Print the diagram."""
    print(diagram())


if __name__ == "__main__":
    main()
