"""What all machines do alike: change a state by a table, or refuse an event that has no row."""

from collections import deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from state_machine.vocabulary import MachineEnum

S = TypeVar("S", bound=MachineEnum)
E = TypeVar("E", bound=MachineEnum)
A = TypeVar("A", bound=MachineEnum)


class Step(NamedTuple, Generic[S, A]):
    """A row of a table: the state after an event, and what must be done, in order."""

    to: S
    actions: tuple[A, ...] = ()


class Machine(Generic[S, E, A]):
    """A machine of one unit.

    Invariant: `state` changes only in `on`, which either changes it or raises.
    """

    __slots__ = ("_story", "_table", "state", "unit")

    def __init__(self, unit: str, table: Mapping[S, Mapping[E, Step[S, A]]], state: S, kept: int = 0) -> None:
        """`kept`: how many of the last events are kept."""
        self.unit = unit
        self._table = table
        self.state = state
        self._story: deque[E] = deque(maxlen=kept)

    def on(self, event: E) -> tuple[A, ...]:
        """Change the state by the table and return what must be done, in order.

        Raises:
            RuntimeError: the table has no row for the event. No state has changed.
        """
        try:
            self.state, actions = self._table[self.state][event]
        except KeyError:
            raise self._refusal(event) from None
        self._story.append(event)
        return actions

    def _refusal(self, event: E) -> RuntimeError:
        kind = type(self).__name__.lower()
        return RuntimeError(
            f"the {kind} of unit {self.unit!r}: {event.name} is not allowed in {self.state.name}; "
            "this is a bug in fsdp, please report it."
        )
