"""What the engine and its units ask of those above them, who are attached once, when the model is wrapped."""

from abc import ABC, abstractmethod


class HookActions(ABC):
    """What the hooks of the units do for their engine."""

    @abstractmethod
    def hook_outputs(self, index: int) -> None:
        """Put pre-backward hooks on what the forward of a unit has just returned."""

    @abstractmethod
    def reset_backward_progress(self) -> None:
        """A backward is over, and what arrived in it is no concern of the next."""

    @abstractmethod
    def abandon_calls(self) -> None:
        """The calls that run have been given up."""

    @abstractmethod
    def write_back_inplace_of_forward(self) -> None:
        """A backward begins inside a forward, which may have changed parameters in place."""


class PassWatcher(ABC):
    """Is told of each pass before it begins."""

    @abstractmethod
    def before_forward(self, trains: bool) -> None:
        """A forward of the root begins; `trains`: it records a graph."""

    @abstractmethod
    def before_backward(self, reduces: bool) -> None:
        """A backward begins outside any forward; `reduces`: it reduces its gradients."""
