"""The one callback of a backward."""

from typing import Protocol

from state_machine import Root


class Closing(Protocol):
    """What closes a backward: an engine."""

    root: Root

    def backward_ends(self) -> None:
        """The backward has come to its end."""

    def backward_fails(self) -> None:
        """The backward that runs is dying."""


class FinalCallback:
    """Runs when the backward is over. Dropped uncalled, it says that the backward failed."""

    __slots__ = ("_called", "_engine", "_number")

    def __init__(self, engine: Closing) -> None:
        self._engine = engine
        self._number = engine.root.number
        self._called = False

    def __call__(self) -> None:
        self._called = True
        if self._runs():
            self._engine.backward_ends()

    def __del__(self) -> None:
        if not self._called and self._runs():
            self._engine.backward_fails()

    def _runs(self) -> bool:
        # it may have been closed from elsewhere: by an abandoned step, or by the next forward
        return self._engine.root.number == self._number
