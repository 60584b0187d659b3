"""`torch.autograd.grad` and `backward(inputs=...)` of shards: this rank's part of the averaged gradient.

[Note: gradients of shards]
A loss leads to unsharded parameters, so the call is made for these instead. Their gradients are reduced like those of any
backward and end in `.grad` of the shards. For `torch.autograd.grad`, `.grad` is set aside meanwhile, and what has come there is
the answer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fsdp.autograd.engine_calls import Answered, EngineCall
from fsdp.autograd.frames import in_backward
from fsdp.autograd.visits import is_batched
from fsdp.errors import ShardingError
from fsdp.params.unit import unit_of_shard
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import unit_ref_of


class _Shard(NamedTuple):
    """A shard among the inputs of a call."""

    parameter: nn.Parameter
    unsharded: nn.Parameter
    engine: Engine


def refuse_compiled_autograd() -> NoReturn:
    """Refuse a backward that would skip what the engine does in it."""
    raise ShardingError(
        "a backward under compiled autograd: it is traced with other tensors, and the gathers and reductions of sharded modules "
        "would not run in it. Leave compiled autograd out: torch._dynamo.config.compiled_autograd = False."
    )


def translate_shards(call: EngineCall) -> tuple[Any, ...]:
    """The inputs of a call, with the unsharded parameters in place of their shards. See [Note: gradients of shards].

    Raises:
        Answered: the call asks for gradients of shards. They were computed.
        ShardingError: it asks for what cannot be computed. Nothing was.
    """
    shards = [_find(one) for one in call.inputs]
    if not any(shards):
        return call.inputs
    inputs = tuple(given if shard is None else shard.unsharded for given, shard in zip(call.inputs, shards, strict=True))
    if call.accumulates:
        return inputs
    asked = [shard for shard in shards if shard is not None]
    if len(asked) < len(inputs):
        raise ShardingError(
            "torch.autograd.grad: parameters of a sharded model and other tensors are asked for in one call; ask for the other "
            "tensors in a call of their own, first, with retain_graph=True."
        )
    _refuse(call, asked)
    raise Answered(_gradients(call, asked))


def _find(given: Any) -> _Shard | None:
    unit = unit_of_shard(given)
    if unit is None:
        return None
    ref = unit_ref_of(unit.module)
    assert ref is not None, "the module of a unit has its reference"
    return _Shard(given, unit.unsharded_of(given), ref.engine)


def _refuse(call: EngineCall, asked: Sequence[_Shard]) -> None:
    """Raise ShardingError if what is asked for would need more than a backward that synchronises."""
    reason = None
    engines = {shard.engine: None for shard in asked}
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
    elif any(shard.parameter._post_accumulate_grad_hooks for shard in asked):
        reason = "a parameter has a post-accumulate hook, which would run"
    if reason is not None:
        raise ShardingError(
            f"torch.autograd.grad cannot give the gradients of a sharded model's parameters, because {reason}; call backward() "
            "and read .grad instead."
        )


def _gradients(call: EngineCall, asked: Sequence[_Shard]) -> tuple[Tensor | None, ...]:
    before = [shard.parameter.grad for shard in asked]
    for shard in asked:
        shard.parameter.grad = None
    try:
        # by its public name: its frame says that the gradients are accumulated
        torch.autograd.backward(call.outputs, call.output_grads, call.retain_graph, inputs=[shard.unsharded for shard in asked])
        found = [shard.parameter.grad for shard in asked]
    finally:
        for shard, gradient in zip(asked, before, strict=True):
            shard.parameter.grad = gradient
    # of a parameter of which this rank holds nothing no gradient comes, whether it is used or not
    answer = [
        torch.zeros_like(shard.parameter, requires_grad=False) if gradient is None and not shard.parameter.numel() else gradient
        for shard, gradient in zip(asked, found, strict=True)
    ]
    if not call.allow_unused and any(gradient is None for gradient in answer):
        raise ShardingError(
            "torch.autograd.grad: a parameter of a sharded model was not used by any rank; give allow_unused=True if that is "
            "intended."
        )
    return tuple(answer)
