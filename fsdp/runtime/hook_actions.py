"""The calls of the engine to the layers above it: to its hooks, and to `fsdp.join`."""

from abc import ABC, abstractmethod


class HookActions(ABC):
    """The actions that the hooks of the units execute for their engine."""

    @abstractmethod
    def hook_outputs(self, index: int) -> None:
        """Put pre-backward hooks on the outputs of the forward of a unit that has just returned."""

    @abstractmethod
    def reset_backward_progress(self) -> None:
        """Reset what the hooks recorded in a backward that is over."""

    @abstractmethod
    def abandon_calls(self) -> None:
        """Mark the calls that run as abandoned."""

    @abstractmethod
    def write_back_inplace_of_forward(self) -> None:
        """Write back the in-place updates of a forward inside which a backward begins."""


class PassWatcher(ABC):
    """An object that the engine calls before each forward of the root, and before and after each backward: a `fsdp.join`."""

    @property
    @abstractmethod
    def source(self) -> int:
        """The rank whose buffers a forward gives to all ranks, if the model broadcasts buffers."""

    @abstractmethod
    def before_forward(self, records_graph: bool) -> None:
        """A forward of the root begins."""

    @abstractmethod
    def before_backward(self, reduces: bool) -> None:
        """A backward begins outside any forward. `reduces`: whether it reduces its gradients."""

    @abstractmethod
    def after_backward(self) -> None:
        """A backward is over. Its gradients are where the user sees them, and the user's hooks have run."""
