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
        self.add_record: AddRecord | None = None
        """Records the phases for a trace."""
        self._first = 0
        """The number of the first unit in records."""
        self.named = False
        """Whether phases are named for a profiler."""

    def set_named(self, named: bool) -> None:
        """From now on, name the phases for a profiler, or do not."""
        self.named = named
        self._replace_handlers()

    def set_recorder(self, add_record: AddRecord | None, first: int = 0) -> None:
        """From now on, call `add_record` after every phase, with units numbered from `first` on. None: call nothing."""
        self.add_record, self._first = add_record, first
        self._replace_handlers()

    def _replace_handlers(self) -> None:
        for action, plain in self._plain_actions.items():
            self._actions[action] = self._around(plain, action.name.lower(), 0)
        for unit, effects in enumerate(self._plain_effects):
            for effect, handler in effects.items():
                self._effects[unit][effect] = self._around(handler, effect.name.lower(), unit)

    def _around(self, handler: Callable[..., Any], phase: str, first: int) -> Callable[..., Any]:
        """`handler`, with a name around it if a profiler runs, and with its times recorded if a trace is made.

        That of an action is called with the number of a unit. That of an effect, of unit `first`, with none: a sum of 0.
        """
        if self.named:
            handler = partial(_name, handler, [f"fsdp::{phase} {name}" for name in self._units[first:]])
        if self.add_record is not None and phase not in _BRIEF:
            handler = partial(_record, handler, self.add_record, phase, self._first + first)
        return handler


def _name(handler: Callable[..., Any], names: Sequence[str], *unit: int) -> Any:
    with _NAMED(names[sum(unit)]):
        return handler(*unit)


def _record(handler: Callable[..., Any], add_record: AddRecord, phase: str, first: int, *unit: int) -> Any:
    began = perf_counter_ns()
    try:
        return handler(*unit)
    finally:
        add_record((began, perf_counter_ns(), phase, first + sum(unit)))
