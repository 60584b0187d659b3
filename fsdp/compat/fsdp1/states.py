"""State dicts of a model in FSDP1's three formats: full tensors, parts cut by rows, this rank's vector.

Rule: nothing is summoned. A hook replaces each shard in the state dict by what the format asks for, one range at a time.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import settle_assign
from fsdp.compat.fsdp1 import torch_names
from fsdp.compat.fsdp1.root_forward import take_over
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.compat.fsdp1.torch_names import FullStateDictConfig, ShardingStrategy, StateDictType
from fsdp.compat.shared.instances import WRAPPED_NAME, rename
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.runtime.registry import refuse_unless_resting
from fsdp.shards.sharded_value import ShardedValue
from fsdp.state_dict.fqns import plain_fqn
from fsdp.state_dict.param_ranges import full_params
from fsdp.state_dict.param_shard import ParamShard, param_shards_of

FLAT_NAME = "_flat_param"


def names_of(instance: Any) -> dict[str, ParamShard]:
    """The parameters of the unit by every plain name that they have, counted from the instance."""
    paths: dict[int, list[str]] = {}
    for path, module in instance._fsdp_wrapped_module.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    unit = _unit_of(instance)
    if unit is None:
        return {}
    shards = {id(one.parameter): one for one in param_shards_of(unit)}
    return {
        plain_fqn(f"{path}.{name}"): shards[id(info.parameter)]
        for info in unit.param_infos
        for owner, name in info.slots
        for path in paths.get(id(owner), ())  # a module may have been replaced
    }


def format_of(instance: Any) -> tuple[StateDictType, Any]:
    """The format of an instance. A unit that is not sharded has the full one only, and `fsdp.save` needs no other.

    Raises:
        RuntimeError: LOCAL_STATE_DICT is asked for with a device mesh.
    """
    kind, config = instance._state_dict_type, instance._state_dict_config
    if instance._fsdp_gives_shards or instance.sharding_strategy is ShardingStrategy.NO_SHARD:
        return StateDictType.FULL_STATE_DICT, FullStateDictConfig()
    if instance._device_mesh is not None and kind is StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError("DeviceMesh is not compatible with LOCAL_STATE_DICT. Use SHARDED_STATE_DICT, which gives DTensors.")
    return kind, config


def _unit_of(instance: Any) -> Unit | None:
    """The unit of an instance; None if all its parameters are ignored."""
    return None if instance._unit_ref is None else instance._unit_ref.unit


def _check_resting(instance: Any, call: str) -> None:
    """Refuse a call inside a forward or a backward, and take over what was put into shards."""
    ref = instance._unit_ref
    if ref is not None and not instance._is_summoned:
        refuse_unless_resting(call, ref.engine)
        take_over(ref.engine)
        ref.unit.check_shards()


# saving -----------------------------------------------------------------------------------


def check_save(instance: Any, prefix: str, keep_vars: bool) -> None:
    """Refuse what cannot be saved, before anything is."""
    format_of(instance)
    _check_resting(instance, "state_dict")


@torch.no_grad()
def put_values(instance: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put the values of the format in the place of shards, under plain names. Communicates, except in the local format."""
    rename(state_dict, prefix + WRAPPED_NAME, prefix)
    kind, config = format_of(instance)
    absent = kind is StateDictType.FULL_STATE_DICT and config.rank0_only and instance.rank != 0
    if kind is StateDictType.LOCAL_STATE_DICT:
        _put_vector(instance, state_dict, prefix, config)
    else:
        _put_parameters(instance, state_dict, prefix, kind, config, absent)
    for name, buffer in instance._fsdp_wrapped_module.named_buffers(remove_duplicate=False):
        key = prefix + plain_fqn(name)
        if not isinstance(state_dict.get(key), Tensor):
            continue
        if absent:
            del state_dict[key]
            continue
        dtype = _buffer_dtype(instance, plain_fqn(name), buffer)
        value = state_dict[key].to("cpu") if config.offload_to_cpu else state_dict[key]
        state_dict[key] = value.to(dtype) if dtype is not value.dtype else value


def _put_parameters(
    instance: Any, state_dict: dict[str, Any], prefix: str, kind: StateDictType, config: Any, absent: bool
) -> None:
    unit = _unit_of(instance)
    keys: dict[ParamShard, list[str]] = {}
    for name, param_shard in names_of(instance).items():
        if prefix + name in state_dict:
            keys.setdefault(param_shard, []).append(prefix + name)
    if instance._is_summoned or unit is None:
        for key in (key for group in keys.values() for key in group):
            state_dict[key] = state_dict[key].detach().clone()
        return
    if instance._fsdp_gives_shards:
        for param_shard in param_shards_of(unit):
            for key in keys.get(param_shard, ()):
                state_dict[key] = param_shard.placement.value(key, param_shard.parameter)
        return
    for param_shard, full in full_params([unit]):
        names = keys.get(param_shard, ())
        if absent:
            for key in names:
                del state_dict[key]
            continue
        value = full.detach().clone()
        if kind is StateDictType.SHARDED_STATE_DICT:
            value = part_of(instance, value, param_shard.parameter)
        if config.offload_to_cpu:
            value = value.cpu()
        state_dict.update(dict.fromkeys(names, value))


def part_of(instance: Any, full: Tensor, parameter: Tensor) -> Any:
    """This rank's part of a full value or state of `parameter`, as FSDP1 gives it in a sharded state."""
    if not full.dim():
        return full  # FSDP1 does not take one
    units = () if instance._unit_ref is None else instance._unit_ref.engine.units
    meshes = (p.device_mesh for unit in units for p in unit.unsharded_params if isinstance(p, torch_names.DTensor))
    styles = next(meshes, None)
    if styles is None:
        return torch_names.local_chunk(full, instance.process_group, instance._device_mesh)
    return torch_names.chunk_of_both(full, instance._device_mesh, styles, parameter)


def _put_vector(instance: Any, state_dict: dict[str, Any], prefix: str, config: Any) -> None:
    for name in names_of(instance):
        state_dict.pop(prefix + name, None)
    for key, flat in _vectors(instance, prefix):
        chunk = flat.layout.shard_numel
        value = torch_names.flat_chunk(flat.shard.detach().clone(), chunk * flat.rank, flat.layout.numel, instance.process_group)
        state_dict[key] = value.cpu() if config.offload_to_cpu else value


def _vectors(instance: Any, prefix: str) -> Iterator[tuple[str, FlatBuffer]]:
    """The flat buffers of the unit by name. The first has FSDP1's name; the others are numbered."""
    unit = _unit_of(instance)
    for number, flat in enumerate(() if unit is None else unit.flats):
        yield prefix + FLAT_NAME + (f"_{number}" if number else ""), flat


def _buffer_dtype(instance: Any, name: str, buffer: Tensor) -> torch.dtype:
    """The dtype that a buffer had before a forward cast it."""
    for one in instances_in(instance):
        found: torch.dtype | None = one._buffer_dtypes.get(name)
        if found is not None:
            return found
    return buffer.dtype


# loading ----------------------------------------------------------------------------------


@torch.no_grad()
def take_values(
    instance: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Put this rank's parts in the place of the given values, under the names that the wrapper has."""
    kind, _ = format_of(instance)
    _check_resting(instance, "load_state_dict")
    if not instance._is_summoned:
        if settle_assign(metadata):
            raise ShardingError("load_state_dict: assign=True would replace the shards; leave it out.")
        if kind is StateDictType.LOCAL_STATE_DICT:
            _take_vectors(instance, state_dict, prefix)
        else:
            _take_parts(instance, state_dict, prefix, errors)
    rename(state_dict, prefix, prefix + WRAPPED_NAME)


def _take_parts(instance: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    for name, param_shard in names_of(instance).items():
        given = state_dict.get(prefix + name)
        if given is None or given is param_shard.parameter:
            continue  # torch's functions for state dicts put the parameters themselves in place of values that are not given
        if isinstance(given, ShardedValue):
            local = param_shard.placement.part_of_given("load_state_dict", name, given, param_shard.parameter)
            state_dict[prefix + name] = param_shard.placement.as_shard(local)
            continue
        value = torch_names.full_value(given, instance.process_group)
        if not isinstance(value, Tensor) or tuple(value.shape) != param_shard.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            errors.append(f"size mismatch for {prefix + name}: the state dict has {found}, the model has {param_shard.shape}.")
            state_dict[prefix + name] = param_shard.parameter.detach()
            continue
        local = param_shard.cut(value.to(param_shard.parameter.device))
        state_dict[prefix + name] = param_shard.placement.as_shard(local)


def _take_vectors(instance: Any, state_dict: dict[str, Any], prefix: str) -> None:
    for key, flat in _vectors(instance, prefix):
        if key not in state_dict:
            raise ShardingError(
                f"load_state_dict: {key!r} is not in the state dict; give one that was saved as LOCAL_STATE_DICT."
            )
        given = state_dict.pop(key)
        shards = given.local_shards() if isinstance(given, torch_names.ShardedTensor) else []
        numel = shards[0].tensor.numel() if shards else prod(getattr(given, "shape", (0,)))
        if not shards or numel != flat.shard.numel():
            raise ShardingError(
                f"load_state_dict: {key!r} has {numel} elements on this rank, the model has {flat.shard.numel()}; load it on "
                "as many ranks, of a model wrapped alike."
            )
        vector = shards[0].tensor.to(flat.device)
        for name, param_shard in names_of(instance).items():
            if param_shard.flat is flat:
                state_dict[prefix + name] = param_shard.placement.shard_in(vector)


def plain_keys(module: nn.Module, keys: Any) -> None:
    """Remove the names of wrappers from those that `load_state_dict` returns."""
    for found in (keys.missing_keys, keys.unexpected_keys):
        found[:] = [plain_fqn(name) for name in found]
