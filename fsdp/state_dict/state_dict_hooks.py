"""The hooks by which `state_dict()` and `load_state_dict()` of a unit return and accept shards under plain names.

Rule 1: no communication and no copy. A value of the state dict is the shard itself (sharded_value.py). The exception: torch's
        functions with full_state_dict=True: for them each parameter is gathered.
Rule 2: a state dict that does not fit is refused before anything is loaded.
Rule 3: inside `summon_full_params` the parameters are full, and the hooks do nothing. Under "NO_SHARD" with `plain_shards`
        they are full and ordinary too, and stand for themselves, each with a storage of its own.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.frames import FullStateCall, full_state_call, load_call, modules_being_saved, settle_assign
from fsdp.config import MeshKind
from fsdp.device.storage import storage_key, with_own_storage
from fsdp.errors import ShardingError
from fsdp.params.unit import RefuseCopy
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import refuse_borrowing, refuse_unless_resting
from fsdp.shards.dtensors import local_of
from fsdp.shards.shard_tensor import ShardTensor, plain
from fsdp.state_dict.fqns import TRANSPARENT, check_names, check_values, entries, extra_states, with_counts
from fsdp.state_dict.param_ranges import gather_range
from fsdp.state_dict.param_shard import ParamShard, param_shards_of
from state_machine import State


class StateHooks(RefuseCopy):
    """The state-dict hooks of one unit."""

    def __init__(self, engine: Engine, index: int) -> None:
        super().__init__(engine.units[index])
        self._engine = engine
        self._index = index
        self._outer = [unit for unit, inside in zip(engine.units, engine.descendants, strict=True) if index in inside]
        config = self._unit.config
        self._shows_full_params = config.plain_shards and config.mesh_kind is MeshKind.REPLICATE
        self._given: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """The values that state dicts hold, by the id of the parameter."""
        self._slots: WeakKeyDictionary[nn.Module, dict[str, ParamShard]] = WeakKeyDictionary()  # see `Unit.module`
        for info, param_shard in zip(self._unit.param_infos, param_shards_of(self._unit), strict=True):
            for owner, slot in info.slots:
                self._slots.setdefault(owner, {})[slot] = param_shard
        self.handles: list[RemovableHandle] = []
        for module in self._unit.modules:
            self.handles += [
                module.register_state_dict_pre_hook(self._check_save),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._check_load),  # type: ignore[no-untyped-call]
            ]
        # as partials: torch sets an attribute on a hook that runs after state_dict(), and a bound method has none
        for owner in self._slots:
            self.handles += [
                owner.register_state_dict_post_hook(partial(self._put_sharded_values)),  # type: ignore[no-untyped-call]
                owner.register_load_state_dict_pre_hook(self._take_local_parts),  # type: ignore[no-untyped-call]
            ]
        for module in self._unit.modules:
            self.handles.append(module.register_state_dict_post_hook(partial(self._refuse_renamed_shards)))  # type: ignore[no-untyped-call]

    @property
    def _summoned(self) -> bool:
        return self._engine.root.lifecycles[self._index].state is State.SUMMONED

    @property
    def _operation(self) -> str:
        return f"load_state_dict of unit {self._unit.name!r}"

    def _check_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._summoned:
            return
        self._engine.pending_backward.await_end()
        refuse_borrowing(self._engine)
        # torch's functions for state dicts know DTensors as parts
        if keep_vars and self._unit.flats and not (self._unit.replaces_params or self._shows_full_params):
            raise ShardingError(
                f"state_dict(keep_vars=True) of unit {self._unit.name!r}: a part of a parameter cannot stand for the parameter; "
                "use named_parameters(), or state_dict() without it."
            )
        self._unit.check_shards()

    def _put_sharded_values(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._summoned:
            return
        for slot, param_shard in self._slots[module].items():
            name = prefix + slot
            if name in state_dict:
                state_dict[name] = self._shown(name, param_shard, state_dict[name])

    def _shown(self, name: str, param_shard: ParamShard, value: Any) -> Any:
        """What the state dict has under `name` in place of `value`, which torch has put there.

        A full parameter gets a storage of its own, over the same memory. A DTensor that torch made by `detach` is replaced by one
        that `copy.deepcopy` can copy, and so is an unsharded parameter, which a module shows while its unit is in a forward or a
        backward.
        """
        if self._shows_full_params:
            return self._with_own_storage(param_shard, value) if type(value) is Tensor else value
        if self._unit.replaces_params:
            local = None if isinstance(value, nn.Parameter) else local_of(value)
            if type(value) is Tensor and storage_key(value) in self._unit.keys:
                local = plain(param_shard.parameter)
            return value if local is None else param_shard.placement.as_shard(self._with_own_storage(param_shard, local))
        sharded = param_shard.placement.value(name, param_shard.parameter)
        call = full_state_call()
        return sharded if call is None else self._in_full(param_shard, sharded, call)

    def _with_own_storage(self, param_shard: ParamShard, value: Tensor) -> Tensor:
        """`value`, a view of a parameter, with a storage of its own, or with that of an earlier one: ties share theirs."""
        if torch.is_inference_mode_enabled():
            return value  # its changes would not be counted
        tied = self._given.get(id(param_shard.parameter))
        if tied is None or tied.data_ptr() != value.data_ptr():
            tied = with_own_storage(value)
        found = self._given[id(param_shard.parameter)] = tied.detach()
        return found

    def _in_full(self, param_shard: ParamShard, value: Tensor, call: FullStateCall) -> Tensor:
        """The full parameter. Communicates. torch drops what it gets on a rank that does not keep it, so there it is `value`."""
        refuse_unless_resting("get_model_state_dict", self._engine)
        ((_, full),) = gather_range([param_shard], self._unit.name)
        if not call.keeps:
            return value
        return full.cpu() if call.offloads else full

    def _refuse_renamed_shards(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Refuse a state dict in which this rank's shard stands under a name for which no hook replaced it."""
        outer = [module for unit in self._outer for module in unit.modules]
        # the outermost unit that is saved checks for all units inside, or the time would grow with the square of their number
        if (
            self._summoned
            or self._shows_full_params
            or (outer and any(saved is module for saved in modules_being_saved() for module in outer))
        ):
            return
        units = [self._unit, *(self._engine.units[inner] for inner in self._engine.descendants[self._index])]
        owners = {key: unit for unit in units for key in (*(storage_key(flat.shard) for flat in unit.flats), *unit.keys)}
        for name, value in state_dict.items():
            # a sharded value itself has memory of size 0
            if (type(value) in (Tensor, nn.Parameter) or isinstance(value, ShardTensor)) and storage_key(value) in owners:
                unit = owners[storage_key(value)]
                raise ShardingError(
                    f"{name!r} in the state dict of unit {unit.name!r} is this rank's part of a parameter, under a name "
                    "that a hook or _save_to_state_dict of a module made up; keep the plain name, or call "
                    "fsdp.full_state_dict(model)."
                )

    def _check_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if self._summoned:
            return
        self._engine.pending_backward.await_end()
        refuse_borrowing(self._engine)
        operation = self._operation
        if settle_assign(metadata):
            raise ShardingError(f"{operation}: assign=True would replace its shards; leave it out.")
        if not self._engine.root.at_rest:
            raise ShardingError(f"{operation}: call it outside any forward, backward and summon_full_params.")
        self._unit.check_shards()
        call = load_call()
        # the first unit checks for all units
        if call is None or module is not next(module for module in call.module.modules() if _checks(module)):
            return
        target, given = call.module, call.state_dict
        if call.strict and not loads_other_names(target):
            check_names(operation, [*(name for name, _ in entries(target)), *extra_states(target)], with_counts(target, given))
        check_values(operation, target, given)

    def _take_local_parts(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        settle_assign(metadata)  # takes out what an earlier load has left
        for slot, param_shard in self._slots[module].items():
            given = state_dict.get(prefix + slot)
            if given is not None and not self._summoned:
                local = param_shard.placement.part_of_given(self._operation, prefix + slot, given, param_shard.parameter)
                state_dict[prefix + slot] = param_shard.placement.as_shard(local)


def loads_other_names(target: nn.Module) -> bool:
    """True if some module may load from other names than its own, so that only torch knows which names are missing."""
    return any(_takes_other_names(module) for module in target.modules())


def _takes_other_names(module: nn.Module) -> bool:
    foreign = [hook for hook in _load_hooks(module) if not isinstance(getattr(hook, "__self__", None), StateHooks)]
    # torch's own classes load from plain names, and so do ours; the only hook of a wrapper removes the wrapper's name
    kinds = (kind for kind in type(module).__mro__ if not kind.__module__.startswith(("torch.nn.", "fsdp.")))
    overridden = any("_load_from_state_dict" in vars(kind) for kind in kinds)
    return bool(foreign and not TRANSPARENT & module._modules.keys()) or overridden


def _checks(module: nn.Module) -> bool:
    """True if `module` is a unit, which checks a state dict before it loads it."""
    return any(getattr(hook, "__func__", None) is StateHooks._check_load for hook in _load_hooks(module))


def _load_hooks(module: nn.Module) -> list[Any]:
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
