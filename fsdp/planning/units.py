"""Which sizes of units a plan compares if nobody names units, and units by name.

Rule 1: the units of `auto_wrap_policy="auto"` are compared first.
Rule 2: larger units are compared where they could be faster. What they save at most is the latencies of collectives.
Rule 3: smaller units are compared where a faster choice does not fit and its units hold what is too much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from fsdp.build.auto_units import auto_units
from fsdp.errors import ShardingError
from fsdp.planning.rehearsal import BUCKETS, UNSHARDED, Rehearsal

AUTO: Final = "auto"
ONE: Final = "one unit"
LARGER: Final = (3,)
"""A unit is at most one of so many parts of the parameters. `ONE` is compared with these too."""
SMALLER: Final = (32,)
MARGIN: Final = 0.05
"""The part of a step that must be in reach for more sizes to be compared."""


@dataclass(frozen=True)
class NamedUnits:
    """An `auto_wrap_policy`: the modules with these names."""

    names: frozenset[str]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name in self.names


@dataclass(frozen=True)
class UnitsOfClasses:
    """An `auto_wrap_policy`: the modules of classes with these names."""

    classes: frozenset[str]

    def __call__(self, name: str, module: nn.Module) -> bool:
        return type(module).__name__ in self.classes

    def check(self, model: nn.Module) -> None:
        """Raises:
        ShardingError: the model has no module of one of the classes.
        """
        known = {type(module).__name__ for module in model.modules() if module is not model}
        for name in sorted(self.classes - known):
            raise ShardingError(f"plan: the model has no module of a class {name!r}; its classes are {', '.join(sorted(known))}.")


def other_sizes(model: nn.Module, found: Sequence[Rehearsal], memory: int, may_be_one: bool) -> dict[str, NamedUnits | None]:
    """Other choices of units for a model, by name.

    `found`: what "auto" needs with each strategy. `may_be_one`: whether the whole model may be one unit.
    """
    fitting = [one for one in found if one.peak <= memory]
    best = min((one.seconds for one in fitting), default=float("inf"))
    enough = (1 - MARGIN) * best
    chosen: dict[str, NamedUnits | None] = {}
    seen = {names_of(model)}

    def add(parts: Sequence[int], **options: int) -> None:
        for count in parts:
            names = names_of(model, count, **options)
            if names and names not in seen:
                seen.add(names)
                chosen[f"of at most 1/{count}"] = NamedUnits(names)

    if any(one.seconds - one.latency < enough for one in fitting):
        add(LARGER)
        if may_be_one and names_of(model):
            chosen[ONE] = None
    if any(one.seconds < enough and one.peak - memory <= _in_units(one.held) for one in found if one.peak > memory):
        add(SMALLER, least_bytes=0)
    return chosen


def names_of(model: nn.Module, *parts: int, **options: int) -> frozenset[str]:
    """The names of the units that `auto_units` chooses."""
    chosen = auto_units(model, (), *parts, **options)
    return frozenset(name for name, module in model.named_modules() if id(module) in chosen)


def _in_units(held: Mapping[str, int]) -> int:
    """Bytes that depend on the sizes of units."""
    return held.get(UNSHARDED, 0) + held.get(BUCKETS, 0)
