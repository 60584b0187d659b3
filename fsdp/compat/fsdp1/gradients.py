"""What is done to gradients: one norm over instances with different groups, and hooks that take gradients, not buckets."""

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fsdp.api.clip_and_scale import clip_norm_of_roots
from fsdp.api.reductions import register_comm_hook
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.compat.fsdp1.torch_names import HYBRID, ShardingStrategy


@torch.no_grad()
def clip_norm(instance: Any, max_norm: float, norm_type: float) -> Tensor:
    """See `FullyShardedDataParallel.clip_grad_norm_`."""
    if not instance.check_is_root():
        raise RuntimeError("clip_grad_norm_ should only be called on the root FSDP instance; this one is inside another.")
    total = clip_norm_of_roots(instance, max_norm, norm_type)
    dtypes = [p.grad.dtype for p in instance.parameters() if p.grad is not None]
    if not dtypes:
        warnings.warn(
            f"clip_grad_norm_: on rank {instance.rank} with no gradients -- returning the total norm in the default dtype "
            f"{total.dtype}.",
            stacklevel=4,
        )
        return total
    return total.to(reduce(torch.promote_types, dtypes))


def set_hook(instance: Any, state: object, hook: Callable[..., object]) -> None:
    """See `FullyShardedDataParallel.register_comm_hook`."""
    if not instance.check_is_root():
        raise AssertionError("register_comm_hook can only be called on a root instance.")
    instances = instances_in(instance)
    for one in instances:
        if one.sharding_strategy in HYBRID:
            raise AssertionError(
                f"Communication hook is not supported for hybrid strategies: {one.sharding_strategy.name} reduces twice, a hook "
                "once. Leave it out."
            )
        if one._comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
        if not callable(hook):
            raise ValueError(f"register_comm_hook takes a function, not {hook!r}.")
    is_replicated, num_shards = instance.sharding_strategy is ShardingStrategy.NO_SHARD, instance.world_size

    def reduce_bucket(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        result = gradient = bucket.buffer()
        if is_replicated:
            hook(state, gradient)
        else:
            result = gradient.new_empty(gradient.numel() // num_shards)
            hook(state, gradient, result)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    register_comm_hook(instance, state, reduce_bucket)
    for one in instances:
        one.set_comm_hook(state, hook)
