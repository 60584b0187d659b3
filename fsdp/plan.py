"""Which module becomes a unit, and which unit owns each parameter. Walks modules, moves nothing.

A parameter belongs to the lowest unit that contains every place it is used from, so one that is
tied across units belongs to their lowest common ancestor.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from fsdp.errors import ShardingError
from fsdp.unit import Place, Unit, owner_of

# Wrappers whose name is no part of a plain parameter name.
TRANSPARENT = frozenset({"_checkpoint_wrapped_module"})
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Planned(NamedTuple):
    """One unit of a root: new, or wrapped by hand before."""

    module: nn.Module
    name: str
    unit: Unit | None
    """The unit it is already."""
    places: list[Place]
    """What a new unit will own."""
    ancestors: frozenset[int]
    """Indices of the units around it."""


def make_plan(
    root: nn.Module, policy: Any, unit_of: Callable[[nn.Module], Unit | None], is_wrapper: Callable[[nn.Module], bool]
) -> list[Planned]:
    """The units of `root`, outermost first, in the order of the modules.

    Raises:
        ShardingError: an impossible policy or module, or a parameter that is owned elsewhere.
    """
    if isinstance(root, CONTAINERS):
        raise ShardingError(
            f"a {type(root).__name__} has no forward of its own and cannot be a unit; wrap its members, or the "
            "module that contains it."
        )
    chosen = _chooser(policy)
    walk = _Walk(root, chosen, unit_of, is_wrapper)
    walk.visit(root, "", ())
    return walk.planned()


class _Walk:
    """Collects units and the places of their parameters on one walk over the module tree."""

    def __init__(
        self,
        root: nn.Module,
        chosen: Callable[[str, nn.Module], bool],
        unit_of: Callable[[nn.Module], Unit | None],
        is_wrapper: Callable[[nn.Module], bool],
    ) -> None:
        self._root = root
        self._chosen = chosen
        self._unit_of = unit_of
        self._is_wrapper = is_wrapper
        self._modules: list[nn.Module] = []
        self._names: list[str] = []
        self._index: dict[int, int] = {}
        self._ancestors: list[set[int]] = []
        self._places: dict[int, Place] = {}
        self._chains: dict[int, tuple[int, ...]] = {}

    def visit(self, module: nn.Module, path: str, chain: tuple[int, ...]) -> None:
        """One module at one path, inside the units of `chain`. A shared module is visited once a path."""
        if self._is_unit(module, path):
            index = self._index.get(id(module))
            if index is None:
                index = self._index[id(module)] = len(self._modules)
                self._modules.append(module)
                self._names.append(path)
                self._ancestors.append(set())
            self._ancestors[index].update(chain)
            chain = (*chain, index)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ShardingError(
                f"{path or type(module).__name__!r} gives sparse gradients, which cannot be reduced yet; set sparse=False."
            )
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._note(module, name, parameter, _join(path, name), chain)
        for name, child in module._modules.items():
            if child is not None:
                transparent = name in TRANSPARENT or (name == "module" and self._is_wrapper(module))
                self.visit(child, path if transparent else _join(path, name), chain)

    def planned(self) -> list[Planned]:
        """What was found, outermost first."""
        places: list[list[Place]] = [[] for _ in self._modules]
        for key, place in self._places.items():
            owner = self._chains[key][-1]
            unit = self._unit_of(self._modules[owner])
            if unit is None:
                places[owner].append(place)
            elif owner_of(place.parameter) is not unit:
                raise ShardingError(
                    f"parameter {place.names[0]!r} is new in unit {unit.name!r}, which was wrapped before; add "
                    "parameters before wrapping."
                )
        return [
            Planned(
                module, self._names[i] or type(module).__name__, self._unit_of(module), places[i], frozenset(self._ancestors[i])
            )
            for i, module in enumerate(self._modules)
        ]

    def _is_unit(self, module: nn.Module, path: str) -> bool:
        if module is self._root or self._unit_of(module) is not None:
            return True
        if self._is_wrapper(module) or not self._chosen(path, module):
            return False
        if isinstance(module, CONTAINERS):
            raise ShardingError(
                f"auto_wrap_policy chose {path!r}, a {type(module).__name__}, which has no forward; choose its members."
            )
        return next(module.parameters(), None) is not None

    def _note(self, module: nn.Module, slot: str, parameter: nn.Parameter, name: str, chain: tuple[int, ...]) -> None:
        key = id(parameter)
        owner = owner_of(parameter)
        if owner is not None and all(self._unit_of(self._modules[index]) is not owner for index in chain):
            raise ShardingError(
                f"parameter {name!r} is already owned by unit {owner.name!r}, but is used outside it as well. "
                "Wrap inner units before outer ones. Tied parameters must live in one unit: wrap the module that contains "
                "both uses instead, or let auto_wrap_policy choose."
            )
        if parameter.is_meta:
            raise ShardingError(
                f"parameter {name!r} is on the meta device; give it memory (`module.to_empty(device=...)` and an "
                "init) before wrapping."
            )
        place = self._places.setdefault(key, Place(parameter))
        place.names.append(name)
        place.slots.append((module, slot))
        known = self._chains.setdefault(key, chain)
        common = [a for a, b in zip(known, chain, strict=False) if a == b]
        self._chains[key] = tuple(common)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _chooser(policy: Any) -> Callable[[str, nn.Module], bool]:
    """A policy as one function of a module's name and the module."""
    if policy is None:
        return lambda name, module: False
    classes = getattr(policy, "_module_classes", policy)  # torch's ModuleWrapPolicy
    if isinstance(classes, Collection) and not isinstance(classes, str):
        members = tuple(classes)
        wrong = [one for one in members if not (isinstance(one, type) and issubclass(one, nn.Module))]
        if wrong or not members:
            raise ShardingError(
                f"auto_wrap_policy must name nn.Module classes; this is not one: {wrong[0]!r}."
                if wrong
                else "auto_wrap_policy is empty; leave it out to make the whole module one unit."
            )
        return lambda name, module: isinstance(module, members)
    if isinstance(policy, type):
        raise ShardingError(f"auto_wrap_policy is the class {policy.__name__}; put it in a set: {{{policy.__name__}}}.")
    if callable(policy):
        try:
            inspect.signature(policy).bind("", None)
        except (TypeError, ValueError) as error:
            raise ShardingError(
                f"auto_wrap_policy must be callable as policy(name, module) -> bool; {policy!r} is not ({error})."
            ) from None
        return lambda name, module: bool(policy(name, module))
    raise ShardingError(
        "auto_wrap_policy must be a set of module classes, a callable(name, module) -> bool, or torch's "
        f"ModuleWrapPolicy, not {policy!r}."
    )
