"""Runs the steps of optimizers that work element by element on plain parts, at full speed.

Rule 1: only torch's optimizers in ELEMENT_WISE_OPTIMIZERS are run so, without a closure. All others compute with shards, operator
        by operator, so that what mixes elements is made right or refused.
Rule 2: what such a step leaves in the optimizer's state are shards again, and know it.

[Note: shards are ordinary tensors in a step]
A step of AdamW on the CPU calls about fourteen operators for each parameter. Each would cost 2 µs more by torch dispatch, and
0.4 µs more because torch asks each tensor of a subclass for `__torch_function__`. So torch dispatch is off in the step, and
the shards have the classes of ordinary tensors. Hooks on steps run outside of that.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, _foreach_supported_types, register_optimizer_step_pre_hook
from torch.utils import _foreach_utils

from fsdp.autograd.dynamo import uncompiled
from fsdp.shards.optimizer_state import ELEMENT_WISE_OPTIMIZERS, NUMBERS, hook_state
from fsdp.shards.shard_parameter import EmptyShardParameter, ShardParameter
from fsdp.shards.shard_tensor import ShardTensor, as_shard, local_operators

_ORDINARY: Final = {Tensor, nn.Parameter}


class _Ordinary:
    """What a running step has changed, to be changed back at its end."""

    __slots__ = ("classes", "gradients")

    def __init__(self) -> None:
        self.classes: list[tuple[Tensor, type]] = []
        """The shards that are ordinary tensors meanwhile, each with its class."""
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """The parameters without elements that have no gradient meanwhile, each with its gradient."""

    def begin(self, optimizer: Optimizer, parameters: list[Any]) -> None:
        """Give parameters, gradients and state the classes of ordinary tensors; hide what has no elements."""
        state = optimizer.state
        for parameter in parameters:
            kind = type(parameter)
            if issubclass(kind, EmptyShardParameter):
                if parameter.grad is not None:
                    self.gradients.append((parameter, parameter.grad))
                continue
            if not issubclass(kind, ShardParameter):
                continue
            self.classes.append((parameter, kind))
            shards = [parameter.grad, *state[parameter].values()] if parameter in state else [parameter.grad]
            self.classes += [(shard, ShardTensor) for shard in shards if type(shard) is ShardTensor]
        # a parameter that has state was stepped by another implementation, and its count must go on
        self.gradients = [(parameter, gradient) for parameter, gradient in self.gradients if not state.get(parameter)]
        for parameter, _ in self.gradients:
            parameter.grad = None
        for shard, kind in self.classes:
            shard.__class__ = nn.Parameter if kind is not ShardTensor else Tensor

    def end(self) -> None:
        """Change all back. Also after a `begin` that failed."""
        for shard, kind in self.classes:
            shard.__class__ = kind
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


def hook_optimizers() -> None:
    """Wrap the steps of torch's element-wise optimizers, and set a hook on the steps of all others, once in a process."""
    global _is_hooked
    with _hooking:
        if _is_hooked:
            return
        _is_hooked = True
    register_optimizer_step_pre_hook(_adopt_new_state)
    for optimizer in ELEMENT_WISE_OPTIMIZERS:
        _wrap_step(optimizer)
    kinds: tuple[Any, ...] = (ShardTensor, ShardParameter, EmptyShardParameter)
    for kind in kinds:
        # torch uses the fused and the grouped implementations for types in these lists only
        _foreach_supported_types.append(kind)
        _foreach_utils._foreach_supported_types.append(kind)


_is_hooked = False
_hooking = threading.Lock()


def _wrap_step(kind: Any) -> None:
    """Let the step of a class of optimizers take shards for ordinary tensors. The user's hooks on steps run outside of it."""
    has_hooks = getattr(kind.step, "hooked", False)  # torch has wrapped the step to call hooks: when the first one was made
    step = _with_ordinary_shards(kind.step.__wrapped__ if has_hooks else kind.step)
    if has_hooks:
        step = Optimizer.profile_hook_step(step)
        step.hooked = True  # type: ignore[attr-defined]
    kind.step = step


def _with_ordinary_shards(step: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kinds = set(map(type, parameters))
        sharded = {kind for kind in kinds if issubclass(kind, ShardParameter)}
        # a closure runs a forward, which needs shards
        if not sharded or not kinds <= sharded | _ORDINARY or any(arg is not None for arg in (*args, *kwargs.values())):
            return step(optimizer, *args, **kwargs)
        ordinary = _Ordinary()
        try:
            ordinary.begin(optimizer, parameters)
            with local_operators():
                return step(optimizer, *args, **kwargs)
        finally:
            ordinary.end()
            mark_state(optimizer)

    return run


def _adopt_new_state(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hook_state(optimizer)


def mark_state(optimizer: Optimizer) -> None:
    """Turn the plain tensors of an optimizer's state that have the shape of their parameter's part into shards."""
    for parameter, kept in optimizer.state.items():
        # an optimizer makes all state of a parameter at once, so the last tensor stands for all
        if kept and type(next(reversed(kept.values()))) is not ShardTensor and isinstance(parameter, ShardParameter):
            for key, value in kept.items():
                if type(value) is Tensor and key not in NUMBERS and value.shape == parameter.shape:
                    kept[key] = as_shard(value, parameter.shard_info)
