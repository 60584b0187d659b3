"""How a backward begins and ends: its kind, and its one callback."""

from typing import Protocol

from fsdp.autograd.frames import in_autograd_grad
from state_machine import BackwardEvent, Root


class Closing(Protocol):
    """What closes a backward: an engine."""

    root: Root

    def on_backward_ended(self) -> None:
        """The backward has come to its end."""

    def on_backward_failed(self) -> None:
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
            self._engine.on_backward_ended()

    def __del__(self) -> None:
        if not self._called and self._runs():
            self._engine.on_backward_failed()

    def _runs(self) -> bool:
        # it may have been closed from elsewhere: by an abandoned step, or by the next forward
        return self._engine.root.number == self._number


def kind_of_backward(synchronises: bool) -> BackwardEvent:
    """How the backward that runs has begun; `synchronises`: not under `no_sync`."""
    if not synchronises:
        return BackwardEvent.NO_SYNC_BEGINS
    return BackwardEvent.GRAD_ONLY_BEGINS if in_autograd_grad() else BackwardEvent.SYNC_BEGINS
