"""Which rows of the lifecycle's tables units go through, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from state_machine.lifecycle import Lifecycle
from state_machine.table import TABLES, ReshardPolicy
from state_machine.vocabulary import Action, Event, State


class Turn(NamedTuple):
    """Two rows in a row: a state and what was heard in it, then the state that led to and what was heard there."""

    strategy: ReshardPolicy
    before: tuple[State, Event]
    after: tuple[State, Event]

    def __str__(self) -> str:
        (state, event), (then, other) = self.before, self.after
        return f"{self.strategy.name}: {event.name} in {state.name}, then {other.name} in {then.name}"


@contextmanager
def recorded() -> Iterator[set[Turn]]:
    """Fills the set with what every unit goes through meanwhile. What follows a rest is no turn: there a story may begin."""
    turns: set[Turn] = set()
    last: dict[int, tuple[Lifecycle, tuple[State, Event]]] = {}
    listens = Lifecycle.on

    def on(self: Lifecycle, event: Event) -> tuple[Action, ...]:
        state = self.state
        actions = listens(self, event)
        if id(self) in last and state is not State.IDLE:
            strategy = next(one for one, table in TABLES.items() if table is self._table)
            turns.add(Turn(strategy, last[id(self)][1], (state, event)))
        last[id(self)] = (self, (state, event))
        return actions

    with patch.object(Lifecycle, "on", on):
        yield turns
