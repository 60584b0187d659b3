"""Tables as text, so that each can be written a second time by hand."""

from collections.abc import Mapping
from typing import Any


def written(text: str) -> list[str]:
    return sorted(line.strip() for line in text.strip().splitlines())


def cells_of(table: Mapping[Any, Mapping[Any, Any]]) -> list[str]:
    """For each row "STATE EVENT -> STATE: ACTION, ACTION"."""
    return sorted(
        f"{state.name} {event.name} -> {step.to.name}: {', '.join(action.name for action in step.actions)}".rstrip()
        for state, row in table.items()
        for event, step in row.items()
    )
