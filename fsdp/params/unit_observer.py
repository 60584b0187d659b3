"""The calls of a unit to the hooks of the runtime, for uses of its parameters outside its own forward."""

from abc import ABC, abstractmethod


class UnitObserver(ABC):
    """Handles uses of the parameters of a unit outside its own forward."""

    @abstractmethod
    def on_used_outside(self) -> None:
        """A parameter is read outside the unit, and the value requires a gradient."""

    @abstractmethod
    def on_external_grad(self) -> None:
        """A gradient of one parameter is about to come from a use outside the unit."""

    @abstractmethod
    def unshard_for_backward(self) -> bool:
        """Unshard the unit until the end of the backward; return whether its parameters may then be used."""
