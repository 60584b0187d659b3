"""`half()`, `to(...)` and the like, called on the module of a unit whose shards are DTensors.

torch exchanges such parameters, which it refuses for those that something refers to weakly. Here they keep their objects.
"""

import weakref
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.runtime.registry import KEEPS_ENGINE
from fsdp.shards.shard_tensor import plain

Conversion = Callable[[Tensor], Tensor]


@torch.no_grad()
def apply_to_tensors(
    module: nn.Module, fn: Conversion, recurse: bool, convert: Callable[[Collection[nn.Parameter], Conversion], object]
) -> nn.Module:
    """Give the tensors of `module`, and of all modules below it, the values that `fn` makes of them: parameters by `convert`."""
    convert([*module.parameters(recurse)], fn)
    for one in module.modules() if recurse else (module,):
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = fn(buffer)
    return module


def put_values(parameter: nn.Parameter, fn: Conversion) -> None:
    """Give a shard the values that `fn` makes of it, in the memory that it has."""
    local = plain(parameter)
    if (made := fn(local)).data_ptr() != local.data_ptr():
        local.copy_(made)


def _convert(parameters: Collection[nn.Parameter], fn: Conversion) -> None:
    shards = [(unit, parameter) for parameter in parameters if isinstance(unit := owning_unit(parameter), Unit)]
    for unit, parameter in shards:
        made = fn(probe := plain(parameter).new_empty(0))
        if made.dtype is not probe.dtype or made.device != probe.device:
            raise ShardingError(
                f"the parameters of unit {unit.name!r}, which are {probe.dtype} on {probe.device}, were to be converted to "
                f"{made.dtype} on {made.device}. Convert or move the module before wrapping it; for another compute precision "
                "give mp_policy."
            )
    for _, parameter in shards:
        put_values(parameter, fn)
    convert_plain(parameters, fn)


def convert_plain(parameters: Collection[nn.Parameter], fn: Conversion) -> None:
    """Give those parameters that no unit has the values that `fn` makes of them."""
    for parameter in parameters:
        if owning_unit(parameter) is None:
            made = fn(parameter.data)
            if made.is_meta is parameter.is_meta:
                parameter.data = made
            else:  # torch refuses such a `.data`
                other = nn.Parameter(made, parameter.requires_grad)
                other.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


class Converter:
    """The `_apply` of the module of a unit, by which torch converts a module. Python looks for it on the object first."""

    ATTRIBUTE: ClassVar = "_apply"
    convert: ClassVar = staticmethod(_convert)
    """How the parameters are converted."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, fn: Conversion, recurse: bool = True) -> Any:
        """Apply `fn` to the tensors of the module, and of those below it.

        Raises:
            ShardingError: it changes the dtype or the device of shards. Nothing was changed.
        """
        module = self._module()
        assert module is not None, "the object of which this is an attribute"
        if hasattr(module, KEEPS_ENGINE):
            return type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]  # FSDP2's class converts them
        return apply_to_tensors(module, fn, recurse, self.convert)
