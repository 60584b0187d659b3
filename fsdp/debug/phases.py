"""Names and records what an engine executes, by replacing the handlers in its tables. Without a profiler and a trace it costs
one comparison a pass.

A CUDA profile then shows `fsdp::all_gather blocks.3` beside the kernels of the unit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

import torch

from state_machine import Action, Effect

_NAMED: Final[Any] = torch._C._profiler._RecordFunctionFast
_BRIEF: Final = ("use_unsharded", "use_sharded", "free_unsharded", "drop_stale", "keep_unsharded", "intercept_reads")
"""Phases that take about as long as a record of them. A trace has none; most are parts of a phase that it has."""
Record = tuple[int, int, str, int]
"""A phase: when it began and ended (`time.perf_counter_ns`), its name, and the number of its unit."""
AddRecord = Callable[[Record], None]


class Phases:
    """The handlers of one engine: as they are, named for torch.profiler, or recorded for a trace.

    A phase is the execution of one action or effect for one unit.
    """

    def __init__(
        self,
        units: Sequence[str],
        actions: dict[Action, Callable[[int], object]],
        effects: Sequence[dict[Effect, Callable[[], None]]],
    ) -> None:
        self._units = units
        self._actions = actions
        self._effects = effects
        self._plain_actions = dict(actions)
        self._plain_effects = [dict(one) for one in effects]
        self._add_record: AddRecord | None = None
        self._first = 0
        """The number of the first unit in records."""
        self.named = False
        """Whether phases are named for a profiler."""

    @property
    def is_recorded(self) -> bool:
        """Whether a trace records the phases."""
        return self._add_record is not None

    def set_named(self, named: bool) -> None:
        """From now on, name the phases for a profiler, or do not."""
        self.named = named
        self._replace_handlers()

    def set_recorder(self, add_record: AddRecord | None, first: int = 0) -> None:
        """From now on, call `add_record` after every phase, with units numbered from `first` on. None: call nothing."""
        self._add_record, self._first = add_record, first
        self._replace_handlers()

    def _replace_handlers(self) -> None:
        for action, handler in self._plain_actions.items():
            phase = action.name.lower()
            if self.named:
                names = [self._name_of(phase, unit) for unit in range(len(self._units))]
                handler = partial(_name_action, handler, names)
            if self._add_record is not None and phase not in _BRIEF:
                handler = _recorded_action(handler, self._add_record, phase, self._first)
            self._actions[action] = handler
        for unit, effects in enumerate(self._plain_effects):
            for effect, plain in effects.items():
                self._effects[unit][effect] = self._around(plain, effect.name.lower(), unit)

    def _around(self, handler: Callable[[], Any], phase: str, unit: int) -> Callable[[], Any]:
        """`handler`, with a name around it if a profiler runs, and with its times recorded if a trace is made."""
        if self.named:
            handler = partial(_name, handler, self._name_of(phase, unit))
        if self._add_record is not None and phase not in _BRIEF:
            handler = _recorded(handler, self._add_record, phase, self._first + unit)
        return handler

    def _name_of(self, phase: str, unit: int) -> str:
        return f"fsdp::{phase} {self._units[unit]}"


def _name(handler: Callable[[], Any], name: str) -> Any:
    with _NAMED(name):
        return handler()


def _name_action(handler: Callable[[int], Any], names: Sequence[str], unit: int) -> Any:
    with _NAMED(names[unit]):
        return handler(unit)


def _recorded(handler: Callable[[], Any], add_record: AddRecord, phase: str, unit: int) -> Callable[[], Any]:
    def call() -> Any:
        began = perf_counter_ns()
        try:
            return handler()
        finally:
            add_record((began, perf_counter_ns(), phase, unit))

    return call


def _recorded_action(handler: Callable[[int], Any], add_record: AddRecord, phase: str, first: int) -> Callable[[int], Any]:
    def call(unit: int) -> Any:
        began = perf_counter_ns()
        try:
            return handler(unit)
        finally:
            add_record((began, perf_counter_ns(), phase, first + unit))

    return call
