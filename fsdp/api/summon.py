"""Full parameters for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fsdp.runtime.registry import UnitRef, units_in
from state_machine import Event


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Give the parameters of `model` their full values inside: same Parameter objects, full shapes, the dtype of the shards.

    With `writeback`, each rank keeps its part of every change that was made inside; without it, changes are dropped. `.grad` is
    not there inside and comes back at the end. A forward under `torch.no_grad()` works and does not communicate. Communicates
    on entry: every rank must call it alike.

    Memory: the full model, on every rank.

    Raises:
        IllegalTransition: a forward, a backward or another summon is running.
        ShardingError: `model` contains no unit.
    """
    entered: list[UnitRef] = []
    writes_back = False
    try:
        for unit in units_in(model, "summon_full_params"):
            unit.on_event(Event.SUMMON)
            entered.append(unit)
        yield
        writes_back = writeback
    finally:
        for unit in entered:
            unit.on_event(Event.UNSUMMON_WRITEBACK if writes_back else Event.UNSUMMON_DISCARD)


@contextmanager
def summoned_unit(unit: UnitRef, writeback: bool) -> Iterator[None]:
    """Give the parameters of one unit their full values inside; see `summon_full_params`. Communicates on entry."""
    unit.on_event(Event.SUMMON)
    writes_back = False
    try:
        yield
        writes_back = writeback
    finally:
        unit.on_event(Event.UNSUMMON_WRITEBACK if writes_back else Event.UNSUMMON_DISCARD)
