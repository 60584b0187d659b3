"""The choices that a plan compares: strategies, meshes, choices of units, with and without activation checkpointing.

If nobody names units, a plan compares several sizes:

Rule 1: the units of `auto_wrap_policy="auto"` are compared first.
Rule 2: larger units are compared where they could be faster. What they save at most is the latencies of collectives.
Rule 3: smaller units are compared where a faster choice does not fit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, Final

from torch import nn

from fsdp.building.auto_units import auto_units
from fsdp.building.choose_units import chooser
from fsdp.commands.rehearsal.rehearse import Dimensions, Rehearsal
from fsdp.config import OffloadPolicy, find_strategy
from fsdp.errors import ShardingError

STRATEGIES: Final = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
"""Those that are compared if nobody asks for others. SHARD_GRADIENTS and SHARD_OPTIMIZER communicate as SHARD_GRAD_OP does."""
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


@dataclass(frozen=True)
class Choice:
    """One way to train the job."""

    strategy: str
    mesh: tuple[int, int] | None
    """(replicas, shards) for HYBRID_SHARD."""
    units: str
    """A name for the choice of units."""
    says_units: bool
    """Whether the title says the choice of units."""
    checkpointing: bool
    """Whether the activations of every inner unit are recomputed in the backward."""
    offload: bool
    """Whether shards, gradients and optimizer state are in host memory."""
    dimensions: Dimensions
    """How many ranks share layers, or experts."""
    options: Mapping[str, Any]
    """The options of `fsdp.fully_shard`. With other dimensions than data, a DeviceMesh has to be added."""

    @property
    def title(self) -> str:
        """The choice in a few words."""
        mesh = "" if self.mesh is None else f" {self.mesh[0]} x {self.mesh[1]}"
        units = f", {ONE if self.units == ONE else f'units {self.units}'}" if self.says_units else ""
        more = f"{', checkpointed' if self.checkpointing else ''}{', offloaded' if self.offload else ''}"
        return f"{self.strategy}{mesh}{self.dimensions}{units}{more}"

    @property
    def unit_names(self) -> list[str]:
        """The names of the inner units, if they were chosen by name."""
        policy = self.options.get("auto_wrap_policy")
        return sorted(policy.names) if isinstance(policy, NamedUnits) else []

    def checkpointed(self) -> Callable[[nn.Module], list[nn.Module]] | None:
        """Of a model, the modules whose activations are recomputed. None: there are none."""
        return self._inner_units if self.checkpointing else None

    def _inner_units(self, model: nn.Module) -> list[nn.Module]:
        policy = self.options.get("auto_wrap_policy")
        if policy == AUTO or isinstance(policy, NamedUnits):  # units of another size change nothing of what is recomputed
            chosen = auto_units(model, ())
            return [module for module in model.modules() if id(module) in chosen and next(module.children(), None) is not None]
        is_chosen = chooser(policy, model, (), ())
        return [module for name, module in model.named_modules() if name and is_chosen(name, module)]


def make_dimensions(tp: Sequence[int], ep: Sequence[int], pp: Sequence[int], world_size: int) -> list[Dimensions]:
    """Every product of these sizes that fits.

    Raises:
        ShardingError: a size is not one, or no product fits.
    """
    for name, sizes in (("tp", tp), ("ep", ep), ("pp", pp)):
        for size in sizes:
            if not isinstance(size, int) or size < 1 or world_size % size:
                raise ShardingError(f"plan: {name} is {size!r}; give sizes that divide {world_size} ranks.")
    found = [one for one in starmap(Dimensions, product(tp, ep, pp)) if world_size % one.ranks == 0]
    if not found:
        raise ShardingError(f"plan: no product of tp, ep and pp divides {world_size} ranks; give other sizes.")
    return found


def make_choices(
    strategies: Sequence[str],
    units: Mapping[str, Any],
    checkpointing: Sequence[bool],
    offload: Sequence[bool],
    world_size: int,
    per_host: int,
    dimensions: Sequence[Dimensions],
    options: Mapping[str, Any],
) -> list[Choice]:
    """Every combination that has a meaning.

    Raises:
        ShardingError: there is none, or a strategy is unknown.
    """
    found = []
    for strategy, shared in product(strategies, dimensions):
        find_strategy(strategy)
        if strategy == "NO_SHARD" and shared.tp * shared.ep > 1:
            continue
        ranks = world_size // shared.pp
        mesh = None
        if strategy == "HYBRID_SHARD":
            tp = shared.tp
            if ranks <= per_host or ranks % per_host or per_host % tp or per_host == tp or shared.ep > 1:
                continue
            mesh = (ranks // per_host, per_host // tp)
        for name, policy in units.items():
            says_units = len(units) > 1 or policy is None or isinstance(policy, NamedUnits)
            for recomputes, offloads in product(checkpointing, offload):
                if recomputes and policy is None:
                    continue  # the whole model as one unit is not recomputed
                own = {**options, "sharding_strategy": strategy, "auto_wrap_policy": policy}
                if mesh is not None:
                    own["mesh"] = mesh
                if offloads:
                    own["offload_policy"] = own.get("offload_policy") or OffloadPolicy()
                has_policy = own.get("offload_policy") is not None
                found.append(Choice(strategy, mesh, name, says_units, recomputes, has_policy, shared, own))
    if not found:
        raise ShardingError(
            f"plan: no choice is left for {world_size} ranks, {per_host} on a host; HYBRID_SHARD needs several full hosts, "
            "checkpointing needs inner units, NO_SHARD has no tensor and expert parallelism, and experts have no HYBRID_SHARD."
        )
    return found


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
    if any(one.seconds < enough for one in found if one.peak > memory):
        add(SMALLER, least_bytes=0)
    return chosen


def names_of(model: nn.Module, *parts: int, **options: int) -> frozenset[str]:
    """The names of the units that `auto_units` chooses."""
    chosen = auto_units(model, (), *parts, **options)
    return frozenset(name for name, module in model.named_modules() if id(module) in chosen)
