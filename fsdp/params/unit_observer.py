"""Calls from a unit up to the hooks of the runtime, when its parameters are used outside its own forward."""

from abc import ABC, abstractmethod


class UnitObserver(ABC):
    """What hears for a unit from torch, and what the unit asks when its parameters are used outside its own forward."""

    @abstractmethod
    def on_external_grad(self) -> None:
        """A gradient of one parameter is about to come from a use outside the unit."""

    @abstractmethod
    def unshard_for_backward(self) -> bool:
        """Have the unsharded parameters until the end of the backward; return whether that will do."""
