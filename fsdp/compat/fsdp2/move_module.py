"""Conversions of a wrapped module, or of a module inside one: `to_empty`, `to`, `float`; and values of what is put in place of a
parameter. Parameters keep their objects."""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fsdp.building import conversions
from fsdp.building.conversions import Conversion, Converter
from fsdp.compat.fsdp2 import residence
from fsdp.compat.shared.dtype_and_device import changed_flats, convert
from fsdp.device.streams import default_device
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.runtime.registry import UnitRef, unit_ref_of
from fsdp.shards.dtensors import local_of
from fsdp.state_dict.fqns import entries
from fsdp.state_dict.state_dict_hooks import loads_other_names


def apply_to_tensors(module: nn.Module, fn: Conversion, recurse: bool = True) -> nn.Module:
    """Give the tensors of `module`, and of all modules below it, the values that `fn` makes of them.

    Raises:
        ShardingError: `fn` changes the dtype or the device of shards, and they cannot be converted now.
    """
    return conversions.apply_to_tensors(module, fn, recurse, convert_params)


def convert_params(parameters: Collection[nn.Parameter], fn: Conversion) -> None:
    """Give parameters, sharded or not, the values that `fn` makes of them.

    Raises:
        ShardingError: see `apply_to_tensors`.
    """
    modules = {id(owner.module): owner.module for p in parameters if isinstance(owner := owning_unit(p), Unit)}
    chosen = set(map(id, parameters))
    for module in modules.values():
        residence.reshard(_ref(module))
    for module in modules.values():
        # a conversion puts another engine over the root, with the same numbers of units
        engine = _ref(module).engine
        here = {i: _to_convert(unit, fn, chosen) for i, unit in enumerate(engine.units) if id(unit.module) in modules}
        if any(here.values()):
            convert(engine, fn, [i for i, ids in here.items() if ids], frozenset().union(*here.values()))
            continue
        for parameter in _ref(module).unit.sharded_params:
            if id(parameter) in chosen:
                conversions.put_values(parameter, fn)
    conversions.convert_plain(parameters, fn)


def _to_convert(unit: Unit, fn: Conversion, chosen: Collection[int]) -> set[int]:
    """The ids of those chosen parameters of a unit that get another dtype or device."""
    return {id(p) for flat in changed_flats(unit, fn) for p in flat.sharded_params}.intersection(chosen)


class InnerConverter(Converter):
    """The `_apply` of a module that is inside a unit and no unit itself."""

    convert = staticmethod(convert_params)


def convert_inside(unit: Unit) -> None:
    """Let the modules inside a unit be converted by themselves."""
    own = {id(module) for module in unit.modules}
    for module in {id(module): module for info in unit.param_infos for module, _ in info.slots}.values():
        if id(module) not in own:
            module.__dict__[Converter.ATTRIBUTE] = InnerConverter(module)


@cache
def follow_assignments() -> None:
    """From now on, a DTensor that is assigned in place of a unit's gives that one its values, see `_take_over`."""
    hook: Any = _take_over  # torch's types do not say that a hook may return another parameter
    register_module_parameter_registration_hook(hook)


@torch.no_grad()
def _take_over(module: nn.Module, name: str, given: Any) -> nn.Parameter | None:
    """Let the parameter of a unit have the values and the gradient of `given`, and memory if it has none; return the former.

    Returns None where they are not cut alike, and `given` takes the place.
    """
    current = module._parameters.get(name)
    unit = None if current is None or local_of(given) is None or owning_unit(given) is not None else owning_unit(current)
    if current is None or not isinstance(unit, Unit) or not any(current is shard for shard in unit.sharded_params):
        return None
    if _cut_of(given) != _cut_of(current):
        return None
    convert_params([current], lambda tensor: torch.empty_like(tensor, device=given.device) if tensor.is_meta else tensor)
    current.copy_(given)
    current.requires_grad_(given.requires_grad)
    current.grad = given.grad
    return current


def _cut_of(parameter: Any) -> tuple[object, ...] | None:
    """What two DTensors that are cut alike have in common; None for another tensor."""
    if local_of(parameter) is None:
        return None
    return (parameter.shape, parameter.dtype, parameter.placements, parameter.device_mesh)


def make_room(module: nn.Module, state_dict: Mapping[str, Any], assigns: bool) -> None:
    """Give memory to parameters and saved buffers on the meta device that a state dict names, filled with NaN.

    With `assigns` they, and those that have memory, also get the dtype of the given values, and have no gradient, like new ones.
    If some module loads from names that are not its own, all of them get memory.
    """
    takes_all = loads_other_names(module)
    with_values = {name.rpartition(".")[0] for name in state_dict}
    wanted: dict[torch.dtype, list[nn.Parameter]] = {}
    for name, tensor in entries(module):
        given: Any = state_dict.get(name)
        is_number = isinstance(given, Tensor) and given.is_floating_point() and tensor.is_floating_point()
        dtype: torch.dtype = given.dtype if assigns and is_number else tensor.dtype
        if assigns and given is not None:
            tensor.grad = None
        # a module may fill in a buffer that an older state dict lacks, as BatchNorm does
        is_named = given is not None or (not isinstance(tensor, nn.Parameter) and name.rpartition(".")[0] in with_values)
        if not (tensor.is_meta and (takes_all or is_named)) and dtype is tensor.dtype:
            continue
        if isinstance(tensor, nn.Parameter):
            wanted.setdefault(dtype, []).append(tensor)
        else:
            _put_buffer(module, tensor, _filled(tensor, _device_of(module), dtype))
    for dtype, parameters in wanted.items():
        convert_params(parameters, lambda tensor, dtype=dtype: _filled(tensor, _device_of(module), dtype))  # type: ignore[misc]


def _device_of(module: nn.Module) -> torch.device:
    """The device on which the ranks of a wrapped module communicate."""
    ref = next(ref for one in module.modules() if (ref := unit_ref_of(one)) is not None)
    return default_device(ref.engine.comms.world_comm.supports_device)


def _filled(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(dtype)
    made = torch.empty_like(tensor, device=device, dtype=dtype)
    return made.fill_(float("nan")) if made.is_floating_point() else made.zero_()


def _put_buffer(module: nn.Module, buffer: Tensor, made: Tensor) -> None:
    for one in module.modules():
        one._buffers.update({name: made for name, tensor in one._buffers.items() if tensor is buffer})


def _ref(module: nn.Module) -> UnitRef:
    ref = unit_ref_of(module)
    assert ref is not None, "the module of a unit"
    return ref
