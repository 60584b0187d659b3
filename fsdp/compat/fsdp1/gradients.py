"""What is done to gradients: one norm over instances with different groups, and hooks that take gradients, not buckets."""

import warnings
from collections.abc import Callable
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.api.clip_and_scale import as_number, gradients_of, local_norm, norm_over, power_of, refuse_unless_reduced
from fsdp.api.reductions import register_comm_hook
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.compat.fsdp1.torch_names import HYBRID
from fsdp.params.shown_params import owning_unit
from fsdp.runtime.registry import collective_call, engines_in


@torch.no_grad()
def clip_norm(instance: Any, max_norm: float, norm_type: float) -> Tensor:
    """See `FullyShardedDataParallel.clip_grad_norm_`."""
    if not instance.check_is_root():
        raise RuntimeError("clip_grad_norm_ should only be called on the root FSDP instance; this one is inside another.")
    total = _clip_norm_of_roots(instance, max_norm, norm_type)
    dtypes = [p.grad.dtype for p in instance.parameters() if p.grad is not None]
    if not dtypes:
        warnings.warn(
            f"clip_grad_norm_: on rank {instance.rank} with no gradients -- returning the total norm in the default dtype "
            f"{total.dtype}.",
            stacklevel=4,
        )
        return total
    return total.to(reduce(torch.promote_types, dtypes))


@collective_call
def _clip_norm_of_roots(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """Like `clip_grad_norm_`, of roots that may have different groups, and of parameters that are not sharded.

    The gradients of a root count once for the ranks that share its shards; those of ranks that hold the same shards, and of
    parameters outside every root, count as they are on this rank. Communicates once for each root.

    Raises:
        ShardingError: as `clip_grad_norm_`, except for parameters that are not sharded.
    """
    power, max_norm = power_of(norm_type), as_number("max_norm", max_norm)
    engines = engines_in(model, "clip_grad_norm_")
    refuse_unless_reduced(engines)
    of_roots = [[p for unit in engine.units for p in unit.sharded_params] for engine in engines]
    sharded = {id(p) for parameters in of_roots for p in parameters}
    outside = [p for p in model.parameters() if id(p) not in sharded]
    measured = [norm_over([engine], parameters, power) for engine, parameters in zip(engines, of_roots, strict=True)]
    first = measured[0][0]
    strided, sparse = gradients_of(outside)
    measured.append((local_norm(strided, sparse, power, first.dtype, first.device), strided, sparse))
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first.dtype) for norm, *_ in measured]), power)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in chain.from_iterable(chain(strided, sparse) for _, strided, sparse in measured):
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total


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

    def reduce_bucket(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        result = gradient = bucket.buffer()
        unit: Any = owning_unit(bucket.parameters()[0])
        if unit.comm.size == 1:  # NO_SHARD
            hook(state, gradient)
        else:
            result = gradient.new_empty(gradient.numel() // unit.comm.size)
            hook(state, gradient, result)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    register_comm_hook(instance, state, reduce_bucket)
    for one in instances:
        one.set_comm_hook(state, hook)
