"""Chooses which module becomes a unit and which unit owns each parameter. Walks modules and changes nothing.

A parameter belongs to the innermost unit that contains all its uses. A parameter that is tied across units belongs to their
innermost common ancestor.

[Note: ties between units that were wrapped before]
The unit of one use owns the parameter, and that of another one borrows it: until a unit around both is made, its root refuses
to be used. Then the parameter belongs to the unit around both. The unit that owned it is regrouped: made anew, with its own
options and the parameters that it keeps. The borrowing unit stays as it is.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fsdp.autograd.pytree import modules_within
from fsdp.building.auto_units import auto_units
from fsdp.building.torch_policies import Choice, CustomPolicy, Fsdp1Policy, custom_choice, fsdp1_choice
from fsdp.errors import ShardingError
from fsdp.params.module_tree import IGNORED
from fsdp.params.param_info import ParamInfo
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.runtime.registry import unit_ref_of
from fsdp.state_dict.fqns import TRANSPARENT

WrapPolicy: TypeAlias = Collection[type[nn.Module]] | Choice | Fsdp1Policy | CustomPolicy | Literal["auto"]
"""Chooses units: by class; by size, for "auto"; by (name, module) -> bool; or a policy of FSDP1."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_bare_container(module: nn.Module) -> bool:
    """Whether the module is a list or a dict without a forward. A subclass of ModuleList may have one."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward and "forward" not in module.__dict__


class Planned(NamedTuple):
    """One unit of a root: a new one, or one that was wrapped before."""

    members: tuple[nn.Module, ...]
    """The modules whose forwards are the unit's: one, or those of a list that is one unit."""
    name: str
    unit: Unit | None
    """The unit itself, if it was wrapped before and stays as it is."""
    regrouped: Unit | None
    """The unit itself, if it was wrapped before and is made anew, because a unit around it gets some of its parameters."""
    param_infos: list[ParamInfo]
    """The parameters that a new unit will own."""
    ancestors: frozenset[int]
    """The indices of the units around it."""
    own_modules: list[nn.Module]
    """The modules of the unit, without those of its inner units and without ignored ones."""
    borrowed: tuple[str, ...]
    """For the root: what it borrows of units that are not inside it, each as the end of a sentence."""

    @property
    def module(self) -> nn.Module:
        """The module that is the unit, or the first of a list."""
        return self.members[0]


def make_plan(
    roots: Sequence[nn.Module], policy: Any, is_wrapper: Callable[[nn.Module], bool], ignored: Any, ignored_params: Any
) -> list[Planned]:
    """Return the units of `roots`, outermost first, in the order of the modules. Several roots are one unit.

    Raises:
        ShardingError: the policy or the module is refused, or a unit elsewhere owns one of the parameters.
    """
    below = {id(inner) for root in roots for inner in root.modules() if inner is not root}
    roots = [root for root in dict.fromkeys(roots) if id(root) not in below]
    for root in roots:
        if isinstance(root, ParametrizationList):
            raise ShardingError(
                "a ParametrizationList computes a parameter of another module and cannot be a unit; wrap that module."
            )
        if is_bare_container(root):
            raise ShardingError(
                f"a {type(root).__name__} has no forward of its own and cannot be a unit; wrap its members, or the "
                "module that contains it."
            )
    left_alone = _modules_to_ignore(roots, ignored)
    meshes = custom_choice(policy, roots[0], left_alone) if _is_custom(policy) else {}
    chosen = chooser(policy, roots[0], left_alone, meshes)
    _check_classes(policy, roots)
    # some of these may be outside the module
    left_out = set(map(id, _members_of("ignored_params", "parameters", ignored_params, nn.Parameter, Tensor)))
    walk = _Walk(roots, chosen, is_wrapper, left_alone, left_out)
    for number, root in enumerate(roots):
        walk.visit(root, str(number) if len(roots) > 1 else "", ())
    plan = walk.planned()
    for one in plan:
        mesh = meshes.get(id(one.module))
        if mesh is not None and one.unit is not None:
            raise ShardingError(f"auto_wrap_policy gives {one.name!r} a mesh, and it was wrapped before: give the mesh there.")
        for info in one.param_infos:
            info.mesh = mesh
    if len(plan) == 1 and _should_choose(policy) and not chosen("", roots[0]):
        warnings.warn(
            "auto_wrap_policy chooses no module, so all is one unit; the classes with parameters are "
            f"{_classes_in(roots)}. Name some of these, or leave auto_wrap_policy out.",
            stacklevel=7,
        )
    return plan


class _Walk:
    """Collects units and their parameters in one walk over the module tree."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        chosen: Callable[[str, nn.Module], bool],
        is_wrapper: Callable[[nn.Module], bool],
        ignored: Collection[int],
        left_out: set[int],
    ) -> None:
        self._roots = tuple(roots)
        self._left_out = left_out
        """The ids of the parameters that are ignored by themselves."""
        self._ignored = ignored
        self._ignored_parameters: dict[int, str] = {}
        self._chosen = chosen
        self._is_wrapper = is_wrapper
        self._inside = {id(module) for root in roots for module in root.modules()}
        self._members: list[tuple[nn.Module, ...]] = []
        self._names: list[str] = []
        self._index: dict[int, int] = {}
        self._ancestors: list[set[int]] = []
        self._param_infos: dict[int, ParamInfo] = {}
        self._borrowed: list[str] = []
        self._chains: dict[int, tuple[int, ...]] = {}

    def visit(self, module: nn.Module, path: str, chain: tuple[int, ...]) -> None:
        """Visit one module at one path, inside the units of `chain`. A shared module is visited once for each path."""
        if id(module) in self._ignored or IGNORED in module.__dict__:
            self._ignored_parameters.update({id(p): _join(path, name) for name, p in module.named_parameters()})
            return
        if self._is_unit(module, path):
            members = self._members_of(module)
            index = self._index.get(id(members[0]))
            if index is None:
                index = self._index[id(members[0])] = len(self._members)
                self._members.append(members)
                self._names.append(path)
                self._ancestors.append(set())
            self._ancestors[index].update(chain)
            chain = (*chain, index)
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self._left_out:
                self._note(module, name, parameter, _join(path, name), chain)
        for name, child in module._modules.items():
            if child is not None:
                transparent = name in TRANSPARENT or (name == "module" and self._is_wrapper(module))
                self.visit(child, path if transparent else _join(path, name), chain)

    def planned(self) -> list[Planned]:
        """Return the units that were found, outermost first.

        Raises:
            ShardingError: an existing unit has a new parameter, or an ignored parameter is used by a module that is not ignored.
        """
        regrouped = self._find_regrouped()
        for key, info in self._param_infos.items():
            if key in self._ignored_parameters:
                raise ShardingError(
                    f"parameter {info.names[0]!r} is also {self._ignored_parameters[key]!r}, in a module of ignored_modules; "
                    "ignore every module that uses it, or none."
                )
        others = {*(id(one) for members in self._members for one in members), *self._ignored}
        param_infos: list[list[ParamInfo]] = [[] for _ in self._members]
        for key, info in self._param_infos.items():
            owner = self._chains[key][-1]
            unit = _unit_of(self._members[owner][0])
            if unit is None or owner in regrouped:
                param_infos[owner].append(info)
            elif owning_unit(info.parameter) is not unit:
                raise ShardingError(
                    f"parameter {info.names[0]!r} is new in unit {unit.name!r}, which was wrapped before; add "
                    "parameters before wrapping."
                )
        order = self._outermost_first()
        position = {i: new for new, i in enumerate(order)}
        return [
            Planned(
                members,
                ("" if len(self._roots) > 1 and not i else self._names[i]) or type(members[0]).__name__,
                None if i in regrouped else _unit_of(members[0]),
                regrouped.get(i),
                param_infos[i],
                frozenset(position[outer] for outer in self._ancestors[i]),
                [one for member in members for one in modules_within(member, others)],
                () if self._ancestors[i] else tuple(self._borrowed),
            )
            for i, members in ((i, self._members[i]) for i in order)
        ]

    def _outermost_first(self) -> list[int]:
        """The indices of the units in the order in which they were found, except that no unit comes before one around it.

        A shared module may be found before one of the units around it.
        """
        order: dict[int, None] = {}
        for i, ancestors in enumerate(self._ancestors):
            order |= dict.fromkeys((*sorted(ancestors - order.keys(), key=lambda outer: len(self._ancestors[outer])), i))
        return list(order)

    def _members_of(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """The modules of the unit to which a unit's module belongs."""
        unit = _unit_of(module)
        if unit is not None:
            return unit.modules
        return self._roots if any(module is root for root in self._roots) else (module,)

    def _is_unit(self, module: nn.Module, path: str) -> bool:
        if any(module is root for root in self._roots) or _unit_of(module) is not None:
            return True
        if self._is_wrapper(module) or not self._chosen(path, module):
            return False
        if isinstance(module, ParametrizationList):
            raise ShardingError(
                f"auto_wrap_policy chose {path!r}, a ParametrizationList, which computes a parameter of another module; choose "
                "that module."
            )
        if is_bare_container(module):
            raise ShardingError(
                f"auto_wrap_policy chose {path!r}, a {type(module).__name__}, which has no forward; choose its members."
            )
        return next(module.parameters(), None) is not None

    def _note(self, module: nn.Module, attribute: str, parameter: nn.Parameter, name: str, chain: tuple[int, ...]) -> None:
        key = id(parameter)
        owner = owning_unit(parameter)
        if isinstance(owner, Unit) and not any(id(one) in self._inside for one in owner.modules[:1]):
            self._borrow(module, attribute, owner, name)
            return
        info = self._param_infos.setdefault(key, ParamInfo(parameter))
        info.add(name, module, attribute)
        # a shared module stands at different depths of two chains, so a position in one says nothing about the other
        self._chains[key] = tuple(one for one in self._chains.get(key, chain) if one in chain)

    def _borrow(self, module: nn.Module, attribute: str, owner: Unit, name: str) -> None:
        """Note that a module uses a parameter of a unit that is not inside the root."""
        if any(module is one and attribute == slot for info in owner.param_infos for one, slot in info.slots):
            is_around = any(one is self._roots[0] for around in owner.modules for one in around.modules())
            remedy = (
                "is around this module. Wrap inner units before outer ones, or let auto_wrap_policy choose them."
                if is_around
                else "shares it and is not around this module. Wrap one module that contains both."
            )
            raise ShardingError(f"parameter {name!r} is already owned by unit {owner.name!r}, which {remedy}")
        self._borrowed.append(f"parameter {name!r} of unit {owner.name!r}, which is not inside it")

    def _find_regrouped(self) -> dict[int, Unit]:
        """The units, by index, that lose parameters to a unit around them. Raise ShardingError if one cannot be made anew."""
        found: dict[int, Unit] = {}
        for key, info in self._param_infos.items():
            owner = owning_unit(info.parameter)
            if isinstance(owner, Unit) and self._members[self._chains[key][-1]][0] is not owner.module:
                refuse_regrouping(owner, info.names[0])
                found[self._index[id(owner.module)]] = owner
        return found


def refuse_regrouping(unit: Unit, name: str) -> None:
    """Raise ShardingError if `unit`, of which the parameter `name` is tied to others, cannot be made anew."""
    unit.check_shards()
    if any(info.names[0] in unit.config.reduction.triggers for info in unit.param_infos):
        reason = (
            "moves to the unit around both, while reduction.triggers names parameters of this unit; give the triggers to the "
            "outermost unit, or wrap all at once with auto_wrap_policy."
        )
    elif unit.config.plain_shards and unit.versions.changed_since_made:
        reason = (
            "moves to the unit around both, after the shards were changed, so that an optimizer may have state that is cut like "
            "them; wrap all units before the first step, or leave plain_shards out."
        )
    elif unit.replaces_params or len(unit.modules) > 1:
        what = "has DTensors as shards" if unit.replaces_params else "is a list of modules"
        reason = f"such a unit, which {what}, cannot be made anew without it; wrap the module that contains both uses instead."
    elif any(p.grad is not None and p.grad.is_sparse for p in unit.sharded_params):
        reason = (
            "moves to the unit around both, while a gradient of the unit is sparse; step the optimizer and set the gradient to "
            "None first."
        )
    else:
        return
    raise ShardingError(f"parameter {name!r} of unit {unit.name!r} is used outside it as well, and {reason}")


def _unit_of(module: nn.Module) -> Unit | None:
    sharded = unit_ref_of(module)
    return None if sharded is None else sharded.unit


def buffers_of(one: Planned) -> list[tuple[str, Tensor]]:
    """The buffers of a unit and of all below it, with their names."""
    return [entry for module in one.members for entry in module.named_buffers()]


def _modules_to_ignore(roots: Sequence[nn.Module], ignored: Any) -> set[int]:
    """Check `ignored` and return the ids of its modules."""
    modules = _members_of("ignored_modules", "modules", ignored, nn.Module, nn.Module)
    inside = {id(module) for root in roots for module in root.modules()}
    for module in modules:
        if id(module) not in inside or any(module is root for root in roots):
            raise ShardingError(f"ignored_modules: this {type(module).__name__} is not a part of the module that is wrapped.")
        if any(unit_ref_of(one) is not None for one in module.modules()):
            raise ShardingError(f"ignored_modules: this {type(module).__name__} contains a unit already.")
    return set(map(id, modules))


def _members_of(option: str, what: str, given: Any, kind: type, single: type) -> Collection[Any]:
    """Check that an option is None or a collection of objects of a kind, and return these. `single`: the class of one alone."""
    if given is None:
        return ()
    if not isinstance(given, Collection) or isinstance(given, str | Tensor | single):
        raise ShardingError(f"{option} must be a collection of {what}, not {given!r}.")
    for one in given:
        if not isinstance(one, kind):
            raise ShardingError(f"{option} must name {what}; this is not one: {one!r}.")
    return given


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_classes(policy: Any, roots: Sequence[nn.Module]) -> None:
    """Raise ShardingError if the policy names classes, and none of the modules has one of them."""
    modules = [module for root in roots for module in root.modules()]
    if isinstance(policy, Collection) and policy != "auto" and not any(isinstance(one, tuple(policy)) for one in modules):
        named = ", ".join(sorted(one.__name__ for one in policy))
        raise ShardingError(
            f"auto_wrap_policy names {named}, and no module is one; the classes with parameters are {_classes_in(roots)}. "
            "Name some of these, or leave auto_wrap_policy out to make one unit of all."
        )


def _should_choose(policy: Any) -> bool:
    """Whether a policy that chooses nothing is probably a mistake. Sets are refused then, and sizes may choose nothing."""
    return not (policy is None or isinstance(policy, Collection)) and (
        hasattr(policy, "_run_policy")
        or "transformer_layer_cls" in getattr(policy, "keywords", {})
        or "recurse" not in inspect.signature(policy).parameters
    )


def _classes_in(roots: Sequence[nn.Module]) -> str:
    """The names of the classes of modules that have parameters."""
    modules = [module for root in roots for module in root.modules()]
    return ", ".join(sorted({type(module).__name__ for module in modules if next(module.parameters(), None) is not None}))


def _is_custom(policy: Any) -> bool:
    """Whether a policy is FSDP1's `CustomPolicy`, or the like."""
    return hasattr(policy, "_run_policy") and not hasattr(policy, "_module_classes")


def chooser(policy: Any, root: nn.Module, ignored: Collection[int], custom: Collection[int]) -> Choice:
    """Return the policy as one function of a module's name and the module. `custom`: what a `CustomPolicy` chooses."""
    if policy is None:
        return lambda name, module: False
    if policy == "auto":
        chosen = auto_units(root, ignored)
        return lambda name, module: id(module) in chosen
    classes = getattr(policy, "_module_classes", policy)  # torch's ModuleWrapPolicy
    if isinstance(classes, Collection) and not isinstance(classes, str | Tensor):
        members = tuple(classes)
        wrong = [one for one in members if not (isinstance(one, type) and issubclass(one, nn.Module))]
        if wrong or not members:
            raise ShardingError(
                f"auto_wrap_policy must name nn.Module classes; this is not one: {wrong[0]!r}."
                if wrong
                else "auto_wrap_policy is empty; leave it out to make the whole module one unit."
            )
        return lambda name, module: isinstance(module, members)
    if _is_custom(policy):
        return lambda name, module: id(module) in custom
    if isinstance(policy, type):
        raise ShardingError(f"auto_wrap_policy is the class {policy.__name__}; put it in a set: {{{policy.__name__}}}.")
    if callable(policy):
        try:
            arguments = inspect.signature(policy.forward if isinstance(policy, nn.Module) else policy)
            as_fsdp1 = "recurse" in arguments.parameters
            if as_fsdp1:
                arguments.bind(module=root, recurse=True, nonwrapped_numel=0)
            else:
                arguments.bind("", root)
        except (TypeError, ValueError) as error:
            raise ShardingError(
                "auto_wrap_policy must be callable as policy(name, module) -> bool, or as FSDP1's policy(module, recurse, "
                f"nonwrapped_numel) -> bool; {policy!r} is not ({error})."
            ) from None
        return fsdp1_choice(policy, root, ignored) if as_fsdp1 else lambda name, module: bool(policy(name, module))
    raise ShardingError(
        "auto_wrap_policy must be 'auto', a set of module classes, a callable(name, module) -> bool, or a policy of FSDP1, not "
        f"{policy!r}."
    )
