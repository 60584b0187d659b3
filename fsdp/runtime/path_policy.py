"""What the passes of a root ask where ranks may go different ways, and what calls them back inside `fsdp.join`."""

from typing import Any

import torch

from fsdp.params.flat_buffer import FlatBuffer
from fsdp.reduction.reducer import Exchange
from fsdp.reduction.used_params import UsedParams
from fsdp.runtime.prefetch import PrefetchSchedule


class PathPolicy:
    """How the ranks of a root agree on the order of their gathers. This one: all take the same path, and nothing is agreed on."""

    same_for_all = True
    """Whether all ranks call the same units in the same order, so that they end each pass together."""

    exchange_used: Exchange = staticmethod(UsedParams.exchange)
    """Called at the end of a backward that reduces."""

    def __init__(self, forward: PrefetchSchedule, backward: PrefetchSchedule) -> None:
        self.forward = forward
        self.backward = backward

    def on_step_completed(self) -> None:
        """All ranks have reduced all gradients of a step."""
        self.forward.on_step_completed()
        self.backward.on_step_completed()

    def forget(self) -> None:
        """Forget the passes that run, and the records of both, unless units share gathers."""
        self.forward.forget()
        self.backward.forget()

    def forward_begins(self, records_graph: bool) -> None:
        """A forward of the root begins."""

    def agree_on_gather(self, index: int) -> None:
        """A unit is about to be gathered: first take part in what comes before it in the order of all ranks."""

    def before_copy(self, flat: FlatBuffer, dtype: torch.dtype) -> None:
        """A copy of a flat buffer is about to be gathered in a dtype: the same for it."""

    def forward_ends(self, index: int, makes_graph: bool) -> None:
        """A forward of the root has returned. `index`: the unit of the last event."""

    def backward_ends(self, succeeds: bool) -> None:
        """A backward is about to end."""

    def step_failed(self) -> None:
        """A forward or a backward has failed, or the step was abandoned."""


class PassWatcher:
    """What the engine calls before each forward of the root, and before and after each backward: a `fsdp.join`, or this."""

    is_join = False
    """Whether it is a `fsdp.join`."""
    known_grads: Any = None
    """In a `fsdp.join`, the gradients of this rank after the last backward or step."""
    source = 0
    """The rank whose buffers a forward gives to all ranks, if the model broadcasts buffers."""

    def before_forward(self, records_graph: bool) -> None:
        """A forward of the root begins."""

    def before_backward(self, reduces: bool) -> None:
        """A backward begins outside any forward. `reduces`: whether it reduces its gradients."""

    def after_backward(self) -> None:
        """A backward is over. Its gradients are where the user sees them, and the user's hooks have run."""
