"""What `state_dict()` and `load_state_dict()` do in the modules of a unit: they give and take parts, under plain names.

Rule 1: no communication, no copy; a value of the state dict is the shard itself (sharded_value.py).
Rule 2: a load that does not fit is refused before anything is loaded.
Rule 3: inside `summon_full_params` the parameters are full, and torch's own way is right.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.frames import loading_call, modules_being_saved
from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.refuse_copy import Uncopied
from fsdp.state_dict.fqns import TRANSPARENT, check_names, check_values, entries, extra_states
from fsdp.state_dict.param_shard import Piece, pieces_of
from state_machine import State


class StateHooks(Uncopied):
    """The state-dict hooks of one unit."""

    def __init__(self, engine: Engine, index: int, around: Sequence[Unit]) -> None:
        super().__init__(engine.units[index])
        self._engine = engine
        self._index = index
        self._around = around
        self._slots: WeakKeyDictionary[nn.Module, dict[str, Piece]] = WeakKeyDictionary()  # see `Unit.module`
        for place, piece in zip(self._unit.places, pieces_of(self._unit), strict=True):
            for owner, slot in place.slots:
                self._slots.setdefault(owner, {})[slot] = piece
        module = self._unit.module
        self.handles: list[RemovableHandle] = [
            module.register_state_dict_pre_hook(self._begin),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._check_load),  # type: ignore[no-untyped-call]
        ]
        # as partials: torch writes an attribute on what it calls after state_dict(), which a bound method has no room for
        for owner in self._slots:
            self.handles += [
                owner.register_state_dict_post_hook(partial(self._show_parts)),  # type: ignore[no-untyped-call]
                owner.register_load_state_dict_pre_hook(self._take_parts),  # type: ignore[no-untyped-call]
            ]
        self.handles.append(module.register_state_dict_post_hook(partial(self._refuse_fragments)))  # type: ignore[no-untyped-call]

    @property
    def _lent(self) -> bool:
        return self._engine.root.lifecycles[self._index].state is State.SUMMONED

    @property
    def _loading(self) -> str:
        return f"load_state_dict of unit {self._unit.name!r}"

    def _begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._lent:
            return
        if keep_vars:
            raise ShardingError(
                f"state_dict(keep_vars=True) of unit {self._unit.name!r}: a part of a parameter cannot stand for the parameter; "
                "use named_parameters(), or state_dict() without it."
            )
        self._unit.check_shards()

    def _show_parts(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._lent:
            return
        for slot, piece in self._slots[module].items():
            if prefix + slot in state_dict:
                state_dict[prefix + slot] = piece.value(prefix + slot, piece.parameter.detach())

    def _refuse_fragments(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        outer = [unit.module for unit in self._around]
        # once for all units inside, or the time would grow with the square of their number
        if self._lent or (outer and any(one is module for one in modules_being_saved() for module in outer)):
            return
        units = [self._unit, *(self._engine.units[inner] for inner in self._engine.descendants[self._index])]
        owners = {key: unit for unit in units for key in (*(storage_key(flat.shard) for flat in unit.flats), *unit.keys)}
        for name, value in state_dict.items():
            # of a sharded value itself, the memory is of no size
            if type(value) in (Tensor, nn.Parameter) and storage_key(value) in owners:
                unit = owners[storage_key(value)]
                raise ShardingError(
                    f"{name!r} in the state dict of unit {unit.name!r} is this rank's part of a parameter, under a name "
                    "that a hook or _save_to_state_dict of a module made up; keep the plain name, or call "
                    "fsdp.full_state_dict(model)."
                )

    def _check_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if self._lent:
            return
        asker = self._loading
        if metadata.get("assign_to_params_buffers", False):
            raise ShardingError(f"{asker}: assign=True would replace its shards; leave it out.")
        if not self._engine.root.at_rest:
            raise ShardingError(f"{asker}: call it outside any forward, backward and summon_full_params.")
        self._unit.check_shards()
        call = loading_call()
        # the first unit that is reached checks for all of them
        if call is None or module is not next(one for one in call[0].modules() if _checks(one)):
            return
        target, given, strict = call
        if strict and not _renames(target):
            check_names(asker, [*(name for name, _ in entries(target)), *extra_states(target)], given)
        check_values(asker, target, given)

    def _take_parts(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for slot, piece in self._slots[module].items():
            given = state_dict.get(prefix + slot)
            if given is not None and not self._lent:
                state_dict[prefix + slot] = piece.local_part(self._loading, prefix + slot, given)


def _renames(target: nn.Module) -> bool:
    """Whether some module takes other names than its own, so that only torch can say what is missing."""
    return any(_takes_other_names(module) for module in target.modules())


def _takes_other_names(module: nn.Module) -> bool:
    foreign = [hook for hook in _load_hooks(module) if not isinstance(getattr(hook, "__self__", None), StateHooks)]
    own_way = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    # torch's own take the plain names; so does a wrapper whose one hook takes its own name out
    known = type(module).__module__.startswith("torch.nn.") or TRANSPARENT & module._modules.keys()
    return bool(foreign or own_way) and not known


def _checks(module: nn.Module) -> bool:
    """Whether it is a unit, and so checks before it loads."""
    return any(getattr(hook, "__func__", None) is StateHooks._check_load for hook in _load_hooks(module))


def _load_hooks(module: nn.Module) -> list[Any]:
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
