"""Full parameters, lent to the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fsdp.runtime.registry import Sharded, units_in
from state_machine import Event


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Inside, the parameters of `model` are the full ones: same objects, full shapes, their own precision.

    With `writeback`, each rank keeps its part of what was changed inside. Memory: the whole model on
    every rank. `.grad` is set aside meanwhile. A forward under `torch.no_grad()` works and does not
    communicate. Communicates on entry: every rank must call it alike.

    Raises:
        IllegalTransition: inside a forward, a backward, or another summon.
    """
    lent: list[Sharded] = []
    kept = False
    try:
        for sharded in units_in(model, "summon_full_params"):
            sharded.hear(Event.SUMMONED)
            lent.append(sharded)
        yield
        kept = writeback
    finally:
        for sharded in lent:
            sharded.hear(Event.RETURNED if kept else Event.DISCARDED)
