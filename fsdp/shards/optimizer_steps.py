"""Runs the steps of optimizers that work element by element on plain parts, at full speed.

Rule 1: only torch's optimizers in ELEMENT_WISE_OPTIMIZERS are run so, without a closure. All others compute with shards, operator
        by operator, so that what mixes elements is made right or refused.
Rule 2: what such a step leaves in the optimizer's state are shards again, and know it.

[Note: shards in a step of an optimizer]
A step of AdamW on the CPU calls about fourteen operators for each parameter. Each would cost 2 µs more by torch dispatch, and
0.4 µs more because torch looks for `__torch_function__` in the class of each tensor. So both are off in the step. Hooks on steps
run outside of that. DTensors have a dispatch of their own, which is not asked either: such a step is on their local tensors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from operator import is_
from typing import Any, Final

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, _foreach_supported_types, register_optimizer_step_pre_hook
from torch.utils import _foreach_utils

from fsdp.autograd.dynamo import uncompiled
from fsdp.shards.dtensors import STANDS_FOR, local_of, make_dtensor
from fsdp.shards.optimizer_state import ELEMENT_WISE_OPTIMIZERS, NUMBERS, before_step, hook_state
from fsdp.shards.shard_parameter import EmptyShardParameter, ShardParameter
from fsdp.shards.shard_tensor import ShardTensor, as_shard, local_operators, quick_attributes

_ORDINARY: Final = {Tensor, nn.Parameter}
_LOCAL: Final = "_local_tensor"
"""The attribute of a DTensor that is this rank's part, see `local_of`, which takes longer."""


@contextmanager
def _without_empty(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the groups of an optimizer lack the parameters of which this rank holds no element.

    One that has state was stepped by another implementation: it stays, because its count must go on.
    """
    stepped = {id(p) for p, kept in optimizer.state.items() if kept}
    changed: list[tuple[dict[str, Any], list[Any]]] = []
    try:
        for group in optimizer.param_groups:
            parameters = group["params"]
            empty = {kind for kind in set(map(type, parameters)) if issubclass(kind, EmptyShardParameter)}
            here = [p for p in parameters if type(p) not in empty or id(p) in stepped]
            if len(here) < len(parameters):
                left_out = [p for p in parameters if type(p) in empty and id(p) not in stepped and p.grad is not None]
                increment_version(left_out)  # the step is a change on the ranks that hold an element of them
                changed.append((group, parameters))
                group["params"] = here
        yield
    finally:
        for group, parameters in changed:
            group["params"] = parameters


@contextmanager
def parts_of_dtensors(optimizer: Optimizer) -> Iterator[None]:
    """Inside, this rank's parts of DTensors are in the places of these in an optimizer, with their gradients and state.

    An ordinary parameter stays, with its state. Afterwards, what the step has made in the state of a part is the DTensor's.
    """
    shown, optimizer.state = optimizer.state, defaultdict(dict)
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    taken: list[tuple[Any, Any, list[Any]]] = []  # each parameter, what takes its place, and the values of the latter's state
    try:
        for group, parameters in groups:
            parts = []
            for parameter in parameters:
                part, kept = getattr(parameter, _LOCAL, parameter), shown.get(parameter)
                if part is not parameter:
                    part.grad = getattr(parameter.grad, _LOCAL, None)
                    kept = kept and {key: getattr(one, _LOCAL, one) for key, one in kept.items()}
                if kept:
                    optimizer.state[part] = kept
                taken.append((parameter, part, [*kept.values()] if kept else []))
                parts.append(part)
            group["params"] = parts
        yield
    finally:
        for group, parameters in groups:
            group["params"] = parameters
        of_parts, optimizer.state = optimizer.state, shown
        for parameter, part, before in taken:
            made = of_parts.get(part)
            if part is parameter:
                if made is not None:
                    shown[parameter] = made
                continue
            part.grad = None
            if made and (len(made) != len(before) or not all(map(is_, made.values(), before))):
                _give(shown[parameter], parameter, part, made)


def _give(kept: dict[str, Any], parameter: Any, part: Tensor, made: dict[str, Any]) -> None:
    """Put what a step has made or replaced into the state that is `kept` of a DTensor."""
    for key, value in made.items():
        if local_of(kept.get(key)) is not value:
            is_part = type(value) is Tensor and key not in NUMBERS and value.shape == part.shape
            kept[key] = make_dtensor(value, parameter._spec) if is_part else value


@cache
def hook_optimizers() -> None:
    """Wrap the steps of torch's element-wise optimizers, and set a hook on the steps of all others, once in a process."""
    register_optimizer_step_pre_hook(uncompiled(before_step))
    for optimizer in ELEMENT_WISE_OPTIMIZERS:
        _wrap_step(optimizer)
    for name in ("state_dict", "load_state_dict"):
        setattr(Optimizer, name, _on_shards(getattr(Optimizer, name)))
    kinds: tuple[Any, ...] = (ShardTensor, ShardParameter, EmptyShardParameter)
    for kind in kinds:
        # torch uses the fused and the grouped implementations for types in these lists only
        _foreach_supported_types.append(kind)
        _foreach_utils._foreach_supported_types.append(kind)


def _wrap_step(kind: Any) -> None:
    """Let the step of a class of optimizers compute with the plain parts of shards. Hooks on steps run outside of it."""
    has_hooks = getattr(kind.step, "hooked", False)  # torch has wrapped the step to call hooks: when the first one was made
    step = _on_plain_parts(kind.step.__wrapped__ if has_hooks else kind.step)
    if has_hooks:
        step = Optimizer.profile_hook_step(step)
        step.hooked = True  # type: ignore[attr-defined]
    kind.step = step


def _on_shards(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of an optimizer. Its state was made shards before: Adagrad makes state without a step."""

    @wraps(method)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:  # torch's functions give `self` by its name
        hook_state(self)
        return method(self, *args, **kwargs)

    return run


def _on_plain_parts(step: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kinds = set(map(type, parameters))
        sharded = {kind for kind in kinds if issubclass(kind, ShardParameter)}
        others = kinds - sharded - _ORDINARY
        # a closure runs a forward, which needs shards
        if (
            not (sharded or others)
            or not all([_is_dtensor_of_ours(p) for p in parameters if type(p) in others])
            or any(arg is not None for arg in (*args, *kwargs.values()))
        ):
            return step(optimizer, *args, **kwargs)
        with ExitStack() as stack:
            if sharded:
                stack.callback(mark_state, optimizer)
                stack.enter_context(_without_empty(optimizer))
            if others:
                stack.enter_context(parts_of_dtensors(optimizer))
            with local_operators(), quick_attributes():
                return step(optimizer, *args, **kwargs)

    return run


def _is_dtensor_of_ours(parameter: Any) -> bool:
    """Whether a parameter is a DTensor that an engine trains, and its gradient too."""
    return STANDS_FOR in parameter.__dict__ and (parameter.grad is None or local_of(parameter.grad) is not None)


def mark_state(optimizer: Optimizer) -> None:
    """Turn the plain tensors of an optimizer's state that have the shape of their parameter's part into shards."""
    for parameter, kept in optimizer.state.items():
        # an optimizer makes all state of a parameter at once, so the last tensor stands for all
        if kept and type(next(reversed(kept.values()))) is not ShardTensor and isinstance(parameter, ShardParameter):
            for key, value in kept.items():
                if type(value) is Tensor and key not in NUMBERS and value.shape == parameter.shard_info.local_shape:
                    kept[key] = as_shard(value, parameter.shard_info)
