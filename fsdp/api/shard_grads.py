"""`torch.autograd.grad` and `backward(inputs=...)` of shards: this rank's part of the averaged gradient.

[Note: gradients of shards]
A loss leads to unsharded parameters, so the call is made for these instead. Their gradients are reduced like those of any
backward and end in `.grad` of the shards. For `torch.autograd.grad`, `.grad` is set aside meanwhile, and what has come there is
the answer.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from fsdp.autograd.engine_calls import EngineCall
from fsdp.autograd.frames import in_backward
from fsdp.autograd.visits import is_batched
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit, unit_of_shard
from fsdp.runtime.registry import UnitRef, unit_ref_of


def refuse_compiled_autograd() -> NoReturn:
    """Refuse a backward that would skip what the engine does in it."""
    raise ShardingError(
        "a backward under compiled autograd: it is traced with other tensors, and the gathers and reductions of sharded modules "
        "would not run in it. Leave compiled autograd out: torch._dynamo.config.compiled_autograd = False."
    )


def translate_shards(call: EngineCall) -> tuple[Sequence[Any], Sequence[Tensor | None] | None]:
    """The inputs of a call, with unsharded parameters in place of shards; and its result, if it asks for gradients of shards.

    Raises:
        ShardingError: it asks for what cannot be computed. Nothing was.
    """
    units = [unit_of_shard(one) for one in call.inputs]
    inputs = tuple(given if unit is None else unit.unsharded_of(given) for given, unit in zip(call.inputs, units, strict=True))
    if call.accumulates or not any(units):
        return inputs, None
    owners = [unit for unit in units if unit is not None]
    if len(owners) < len(inputs):
        raise ShardingError(
            "torch.autograd.grad: parameters of a sharded model and other tensors are asked for in one call; ask for the other "
            "tensors in a call of their own, first, with retain_graph=True."
        )
    _refuse(call, owners)
    return inputs, _gradients(call, inputs)


def _refuse(call: EngineCall, owners: Sequence[Unit]) -> None:
    """Raise ShardingError if what is asked for, of shards of `owners`, would need more than a backward that synchronises."""
    reason = None
    engines = {cast(UnitRef, unit_ref_of(unit.module)).engine: None for unit in owners}
    if call.create_graph:
        reason = "create_graph=True is given, and reduced gradients have no graph"
    elif any(gradient is not None and is_batched(gradient) for gradient in call.output_grads):
        reason = "is_grads_batched=True is given, and gradients are reduced one by one"
    elif in_backward():
        reason = "a backward is running"
    elif any(not engine.synchronises for engine in engines):
        reason = "it is inside no_sync, which reduces nothing"
    elif any(engine.reducer.keeps_gradients for engine in engines):
        reason = "gradients accumulated under no_sync would be added"
    elif any(parameter._post_accumulate_grad_hooks for parameter in call.inputs):
        reason = "a parameter has a post-accumulate hook, which would run"
    if reason is not None:
        raise ShardingError(
            f"torch.autograd.grad cannot give the gradients of a sharded model's parameters, because {reason}; call backward() "
            "and read .grad instead."
        )


def _gradients(call: EngineCall, unsharded: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
    before = [parameter.grad for parameter in call.inputs]
    for parameter in call.inputs:
        parameter.grad = None
    try:
        # by its public name: its frame says that the gradients are accumulated
        torch.autograd.backward(call.outputs, call.output_grads, call.retain_graph, inputs=unsharded)
        found = [parameter.grad for parameter in call.inputs]
    finally:
        for parameter, gradient in zip(call.inputs, before, strict=True):
            parameter.grad = gradient
    # of a parameter of which this rank holds nothing no gradient comes, whether it is used or not
    answer = [
        torch.zeros_like(parameter, requires_grad=False) if gradient is None and not parameter.numel() else gradient
        for parameter, gradient in zip(call.inputs, found, strict=True)
    ]
    if not call.allow_unused and any(gradient is None for gradient in answer):
        raise ShardingError(
            "torch.autograd.grad: a parameter of a sharded model was not used by any rank; give allow_unused=True if that is "
            "intended."
        )
    return tuple(answer)
