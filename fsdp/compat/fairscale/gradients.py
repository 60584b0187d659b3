"""What is done to gradients: clipping, factors of division, and the scaler whose ranks agree on overflows."""

from typing import Any

import torch
from torch import Tensor

from fsdp.api import clip_and_scale
from fsdp.compat.fairscale.groups import all_reduce_max
from fsdp.compat.fairscale.sharding import get_fsdp_instances
from fsdp.compat.fairscale.states import shard_late
from fsdp.compat.shared.instances import divide_by


@torch.no_grad()
def clip_norm(instance: Any, max_norm: float, norm_type: float) -> Tensor:
    """See `FullyShardedDataParallel.clip_grad_norm_`."""
    shard_late(instance)
    if not instance._is_root:
        raise AssertionError("clip_grad_norm_: this instance is inside another one; call it on the outermost.")
    if any(one.world_size != instance.world_size for one in get_fsdp_instances(instance)):
        raise NotImplementedError(
            "clip_grad_norm_: the instances have different process groups, so that one norm over all is not defined here; clip "
            "by value, torch.nn.utils.clip_grad_value_(model.parameters(), limit)."
        )
    return clip_and_scale.clip_grad_norm_(instance, max_norm, norm_type)


def set_factors(instance: Any, pre: float, post: float, recursive: bool) -> None:
    """See `FullyShardedDataParallel.set_gradient_divide_factors`."""
    shard_late(instance)
    for one in get_fsdp_instances(instance) if recursive else [instance]:
        divide_by("set_gradient_divide_factors", one._unit_ref, pre, post)
        one._remember_factors(pre, post)


class GradScaler(torch.amp.GradScaler):
    """torch's gradient scaler on the device that there is."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = "cuda" if torch.accelerator.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class ShardedGradScaler(GradScaler):
    """A gradient scaler that skips a step on all ranks if a gradient of any rank overflowed. fp16 gradients are accepted."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.group = process_group

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        if not found:  # this rank has no gradient, and the other ranks still call the collective
            found = {inv_scale.device: torch.zeros((), device=inv_scale.device)}
        for flag in found.values():
            all_reduce_max(flag, self.group)
        return found
