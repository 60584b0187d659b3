"""Conversions of a wrapped module: `to_empty`, `to`, `float`. Parameters keep their objects."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fsdp.build.convert import changes, convert
from fsdp.device.streams import default_device
from fsdp.fully_shard_api import residence
from fsdp.params.module_params import owning_unit
from fsdp.runtime.registry import UnitRef, unit_ref_of
from fsdp.shards.shard_tensor import plain


@torch.no_grad()
def apply_to_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> nn.Module:
    """Give the tensors of `module` and of all modules below it the values that `fn` makes of them.

    Raises:
        ShardingError: `fn` changes the dtype or the device of shards, and they cannot be converted now.
    """
    for ref in _units_below(module):
        residence.reshard(ref)
    for ref in _units_below(module):  # a conversion puts another engine over the root, with the same numbers of units
        if changes(ref.unit, fn):
            inside = (ref.index, *sorted(ref.engine.descendants[ref.index]))
            convert(ref.engine, fn, [index for index in inside if changes(ref.engine.units[index], fn)])
        else:
            for parameter in ref.unit.sharded_params:
                local = plain(parameter)
                made = fn(local)
                if made.data_ptr() != local.data_ptr():
                    local.copy_(made)
    for parameter in module.parameters():
        if owning_unit(parameter) is None:
            parameter.data = fn(parameter.data)
    for one in module.modules():
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = fn(buffer)
    return module


def is_on_meta(module: nn.Module) -> bool:
    """Whether parameters of `module` or below it are on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


def leave_meta(module: nn.Module) -> None:
    """Give parameters and saved buffers on the meta device memory where the ranks communicate, filled with NaN."""
    ref = next(_units_below(module))
    device = default_device(ref.engine.comms.world_comm.supports_device)
    unsaved = {id(one._buffers[name]) for one in module.modules() for name in one._non_persistent_buffers_set}

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or id(tensor) in unsaved:
            return tensor
        made = torch.empty_like(tensor, device=device)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    apply_to_tensors(module, fill)


def _units_below(module: nn.Module) -> Iterator[UnitRef]:
    for one in module.modules():
        ref = unit_ref_of(one)
        if ref is not None:
            yield ref
