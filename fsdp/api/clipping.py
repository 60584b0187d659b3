"""The gradient norm over all shards, and the gradient scaler that agrees on overflows."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call, engines_in, refusal, refuse_unless_resting


@collective_call
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of `model` so that their global norm is at most `max_norm`, and return the norm before scaling.

    The norm is taken over all gradients of all ranks together: (sum |g|^p)^(1/p), or the largest |g| for p = inf. A missing
    gradient counts as zero. Gradients of `ignored_modules` are neither counted nor scaled. Communicates once.

    Raises:
        ShardingError: `norm_type` is not a positive number, a parameter is not sharded, a forward, backward or summon is
            running, or gradients are kept under `no_sync` and not reduced.
    """
    power = float(norm_type)
    if not power > 0:
        raise ShardingError(f"norm_type must be a positive number or inf, not {norm_type!r}.")
    engines = engines_in(model, "clip_grad_norm_")
    comms = engines[0].comms
    named = {id(p): (name, p) for name, p in model.named_parameters()}
    sharded = {id(p): p for engine in engines for unit in engine.units for p in unit.sharded_params}
    unsharded = [key for key in named if key not in sharded]
    if unsharded:  # gradients of ignored modules are left out
        inside = {id(p) for engine in engines for p in engine.units[0].module.parameters()}
        unsharded = [key for key in unsharded if key not in inside]
    if unsharded or not all(engine.comms.same_ranks_as(comms) for engine in engines):
        why = f"{named[unsharded[0]][0]!r} is not sharded" if unsharded else "the roots have different process groups"
        raise ShardingError(
            f"clip_grad_norm_: {why}, so the norm over all of them is not defined here; wrap the whole model over one group."
        )
    for engine in engines:
        refuse_unless_resting("clip_grad_norm_", engine)
        if engine.reducer.keeps_gradients:
            raise refusal("clip_grad_norm_: gradients are kept under no_sync; clip after a backward that synchronises.", engine)
    gradients = [p.grad for key, (_, p) in named.items() if p.grad is not None and key in sharded]
    sparse = [gradient for gradient in gradients if gradient.is_sparse]
    strided = [gradient for gradient in gradients if not gradient.is_sparse]
    filled = [values for values in (*strided, *(one.coalesce().values() for one in sparse)) if values.numel()]
    device = engines[0].units[0].device
    if not filled:
        local = torch.zeros((), device=device)
    else:
        norms = list(torch._foreach_norm(filled, power))
        if any([norm.dtype is not torch.float32 or norm.device != device for norm in norms]):
            norms = [norm.to(device, torch.float32) for norm in norms]
        local = torch.linalg.vector_norm(torch.stack(norms), power)
    total = _combine(comms.reduce_comm, local, power)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if strided:
        torch._foreach_mul_(strided, factor)
    for gradient in sparse:
        gradient.mul_(factor)
    return total


def _combine(comm: Communicator, local: Tensor, power: float) -> Tensor:
    if math.isinf(power):
        comm.all_reduce(local, "max", "gradient norm").wait()
        return local
    summed = local**power
    comm.all_reduce(summed, "sum", "gradient norm").wait()
    return summed ** (1 / power)


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler that skips a step on all ranks if a gradient of any rank overflowed.

    Args:
        model: the wrapped model whose gradients are scaled.
        device: "cuda" or "cpu"; None means the device of the model.
        options: the other options of `torch.amp.GradScaler`.
    """

    def __init__(self, model: nn.Module, device: str | None = None, **options: Any) -> None:
        engine = engines_in(model, "ShardedGradScaler")[0]
        self._found_on = engine.units[0].device
        super().__init__(device or self._found_on.type, **options)
        self._comm = engine.comms.world_comm

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        if not found:  # this rank holds no gradient of this optimizer, and the other ranks still call the collective
            found = {self._found_on: torch.zeros((), device=self._found_on)}
        for flag in found.values():
            self._comm.all_reduce(flag, "max", "found inf").wait()
        return found
