"""`copy.deepcopy` of a sharded model: a second sharded model with shards and hooks of its own, on the same ranks.

A copy communicates nothing. Its parameters are first stand-ins with full shapes and the memory of one element. New units cut them
as wrapping does, and the shards are then copied.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import Tensor, nn

from fsdp.building.conversions import Converter
from fsdp.building.dissolve import refuse_losses
from fsdp.comm.context import CommContext
from fsdp.errors import ShardingAssertion, ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.module_tree import ModuleTree
from fsdp.params.placement import place_again
from fsdp.params.unit import RefuseCopy, Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import KEEPS_ENGINE, UnitRef, refuse_unless_resting

Attach: TypeAlias = Callable[[Sequence[Unit], Sequence[frozenset[int]], CommContext], Engine]
Memo: TypeAlias = dict[int, Any]
"""The copies that one `copy.deepcopy` has made, by the ids of the originals."""
_HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
"""The dicts of a module in which an engine has hooks."""

_ABOUT_HOOKS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""The dicts of a module that say something about a hook by its key."""


class Copier(RefuseCopy):
    """The `__deepcopy__` of the module of one unit, which Python looks for on the object. Only a root can be copied."""

    ATTRIBUTE: ClassVar = "__deepcopy__"

    def __init__(self, engine: Engine, index: int, attach: Attach) -> None:
        super().__init__(engine.units[index])
        self._engine = engine
        self._attach = attach

    def __call__(self, memo: Memo) -> nn.Module:
        """Return the copy of the module.

        Raises:
            ShardingError: the unit is no root; a forward, a backward or a summon is going on; gradients are kept under `no_sync`;
                there is a communication hook; it is inside `fsdp.join`; or another parameter was put in.
        """
        engine = self._engine
        root = engine.units[0]
        if self._unit is not root:
            raise ShardingError(f"copy.deepcopy: unit {self._unit.name!r} is a part of root {root.name!r}; copy the root.")
        _refuse_losses(engine)
        for unit in engine.units:
            unit.check_shards()
            for flat in unit.flats:
                for number, parameter in enumerate(flat.sharded_params):
                    # one that was found before its module, in an optimizer for example, is in `memo` already
                    stand_in = flat.placements[number].stand_in
                    memo[id(parameter)] = stand_in(parameter, _without_memory(flat, number), memo.get(id(parameter)))
        for module in root.module.modules():
            memo.update({id(found): found for found in _engine_hooks(module).values()})
        with _laid_aside(engine):
            copied: nn.Module = copy.deepcopy(root.module, memo)
        stale = {id(module): _engine_hooks(module) for module in copied.modules()}
        self._attach([_copy_unit(unit, memo) for unit in engine.units], engine.descendants, engine.comms)
        for module in copied.modules():
            _take_places(module, stale[id(module)])
        return copied


def _refuse_losses(engine: Engine) -> None:
    """Check that the engine has nothing that a copy would lack."""
    engine.clean_up_dead_forward()
    refuse_unless_resting("copy.deepcopy", engine)
    name = engine.units[0].name
    if len(engine.units[0].modules) > 1:
        raise ShardingError(
            f"copy.deepcopy: unit {name!r} is a list of modules, which are copied one by one; copy a model that contains them."
        )
    if any(unit.replaces_params and hasattr(module, KEEPS_ENGINE) for unit in engine.units for module in unit.modules):
        raise ShardingAssertion(
            f"copy.deepcopy: FSDP does not support deepcopy of {name!r}, which FSDP2's fully_shard has wrapped. Copy the plain "
            "model before you wrap it, and load the state dict into the copy."
        )
    ModuleTree.of(engine.units[0].module).check(engine.units)
    refuse_losses(engine, "copy.deepcopy")
    if not engine.synchronises:
        raise ShardingError(
            f"copy.deepcopy: unit {name!r} does not reduce its gradients, by no_sync or set_requires_gradient_sync, and the copy "
            "would; copy the model while it does."
        )
    if engine.reducer.reductions.hook is not None:
        raise ShardingError(
            f"copy.deepcopy: unit {name!r} has a communication hook, whose state belongs to one model; copy the model before you "
            "register the hook, and register another one on the copy."
        )


def _without_memory(flat: FlatBuffer, number: int) -> Tensor:
    """A tensor like an unsharded parameter, as the flat buffer stores it, with the memory of one element."""
    return torch.empty((), dtype=flat.shard.dtype, device=flat.device).expand(flat.layout.slots[number].shape)


ATTRIBUTES: Final = (Copier.ATTRIBUTE, Converter.ATTRIBUTE, UnitRef.ATTRIBUTE, ModuleTree.ATTRIBUTE)
"""The attributes by which a module is a unit."""


@contextmanager
def _laid_aside(engine: Engine) -> Iterator[None]:
    """Remove inside what a copy of a module must not have: the attributes by which it is a unit, and the copier."""
    aside: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in (module for unit in engine.units for module in unit.modules):
        attributes = module.__dict__
        aside.append((attributes, {name: attributes.pop(name) for name in ATTRIBUTES if name in attributes}))
    try:
        yield
    finally:
        for attributes, removed in aside:
            attributes.update(removed)


@torch.no_grad()
def _copy_unit(unit: Unit, memo: Memo) -> Unit:
    config = unit.config
    flats = []
    for flat in unit.flats:
        infos = [info.copied(memo) for info in flat.param_infos]
        for info in infos:
            for module, slot in info.slots:
                if module._parameters.get(slot) is not info.parameter:
                    raise ShardingError(
                        f"copy.deepcopy: the copy of a {type(module).__name__} in unit {unit.name!r} has another parameter as "
                        f"{slot!r} than the copy of the original's, because of a __deepcopy__ of its own; wrap a copy of the "
                        "plain module instead."
                    )
        numbers, itemsize = range(len(infos)), flat.unsharded.element_size()
        shards = [info.parameter for info in infos]
        for number, (info, placement) in enumerate(zip(infos, flat.placements, strict=True)):
            if placement.replaces_param:
                full = placement.shown(_without_memory(flat, number))
                info.parameter = nn.Parameter(full, info.parameter.requires_grad)
        again = place_again(flat.placements, shards, numbers, flat.shard.dtype, itemsize)
        copied = FlatBuffer(infos, again, flat.comms, flat.unsharded.dtype, config.offload)
        copied.shard.copy_(flat.shard)
        flats.append(copied)
    return Unit([memo[id(module)] for module in unit.modules], unit.name, flats, config, unit.comms, unit.settings)


def _engine_hooks(module: nn.Module) -> dict[int, RefuseCopy]:
    """The objects of the engine of which methods are hooks of `module`, by the keys of the hooks."""
    found: dict[int, RefuseCopy] = {}
    for key, hook in chain.from_iterable(getattr(module, name, {}).items() for name in _HOOKS):
        method = getattr(hook, "hook", hook)  # torch wraps the hooks that run before a load
        owner = getattr(getattr(method, "func", method), "__self__", None)
        if isinstance(owner, RefuseCopy):
            found[key] = owner
    return found


def without_engine(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without the unit and the hooks of the engine: what pickle may save of it."""
    stale, attributes = _engine_hooks(module), dict(module.__dict__)
    for name in ATTRIBUTES:
        attributes.pop(name, None)
    for name in (*_HOOKS, *_ABOUT_HOOKS):
        attributes[name] = copy.copy(attributes[name])
        for key in stale:
            attributes[name].pop(key, None)
    return {**attributes, "_parameters": dict(module._parameters)}


def _take_places(module: nn.Module, stale: Collection[int]) -> None:
    """Put the new engine's hooks where those of the original's engine are, and remove these. Hooks of the user stay in place."""
    if not stale:
        return
    fresh = _engine_hooks(module).keys() - stale
    for name in _HOOKS:
        hooks = module.__dict__[name]
        waiting, order = [key for key in hooks if key in fresh], []
        for key in hooks:
            if key in stale:
                order += waiting[:1]
                del waiting[:1]
            elif key not in fresh:
                order.append(key)
        rest = {key: hooks[key] for key in (*order, *waiting)}
        hooks.clear()
        hooks.update(rest)
    for name in _ABOUT_HOOKS:
        for key in stale:
            module.__dict__[name].pop(key, None)
