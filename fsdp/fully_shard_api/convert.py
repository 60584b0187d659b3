"""Conversions of a wrapped module: `to_empty`, `to`, `float`. Shards and buffers keep their objects."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.module_params import owning_unit
from fsdp.shards.shard_tensor import plain


def apply_to_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> nn.Module:
    """Give the tensors of `module` and of all modules below it the values that `fn` makes of them.

    Raises:
        ShardingError: `fn` changes the dtype or the device of a shard.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if owning_unit(parameter) is None:
                parameter.data = fn(parameter.data)
                continue
            local = plain(parameter)
            made = fn(local)
            if made.dtype is not local.dtype or made.device != local.device:
                raise ShardingError(
                    f"{name!r} is {local.dtype} on {local.device}, and would become {made.dtype} on {made.device}; convert the "
                    "module before fully_shard, or give mp_policy."
                )
            if made.data_ptr() != local.data_ptr():
                local.copy_(made)
        for one in module.modules():
            for name, buffer in one._buffers.items():
                if buffer is not None:
                    one._buffers[name] = fn(buffer)
    return module
