"""What runs when autograd has accumulated a gradient of one whole parameter: once a parameter and backward, so it is short."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from fsdp.autograd.backward_progress import BackwardProgress
from fsdp.runtime.engine import Engine


class Hearer(Protocol):
    """Who is told."""

    progress: BackwardProgress
    engine: Engine

    def on_first_grad(self) -> None:
        """The first gradient of the unit has come in this backward."""


def on_gradient(reference: "weakref.ref[Hearer]", early: int | None) -> Callable[[Tensor], None]:
    """The hook of the parameters of one bucket, given by its number if it is a counted one.

    Weakly: the collector of garbage does not see hooks of this kind, and the hearer leads back to the tensor.
    """

    def arrives(unsharded: Tensor) -> None:
        hearer = reference()
        if hearer is not None and not hearer.progress.has_grad:
            hearer.on_first_grad()

    def counts(unsharded: Tensor) -> None:
        arrives(unsharded)
        hearer = reference()
        if hearer is not None and early is not None:
            hearer.engine.on_early_grad(early)

    return arrives if early is None else counts


@contextmanager
def thawed(parameter: Tensor) -> Iterator[None]:
    """Hooks are put on frozen parameters as well, which may be thawed later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(not frozen)
