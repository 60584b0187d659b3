"""The checks of `python -m fsdp selftest` in which a step fails: training goes on with the bits of a run without a failure."""

import time
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

import fsdp
from fsdp.commands.selftest.training import (
    DETERMINISTIC,
    STEPS,
    Call,
    Place,
    require_equal,
    sharded_model,
    train,
    trained_weights,
    weights_of,
)

AT: Final = 1
"""The step that fails."""
LAYER: Final = 3
"""The layer in which it fails."""


class _Failure(Exception):
    """What the checks raise inside a step."""


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise _Failure


def _in_forward(number: int, layer: nn.Module, x: Tensor) -> Tensor:
    if number == LAYER:
        raise _Failure
    return layer(x)  # type: ignore[no-any-return]


def _in_backward(number: int, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(_FailsInBackward.apply(x) if number == LAYER else x)  # type: ignore[no-any-return, no-untyped-call]


def _too_large(number: int, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x + x.new_empty(2**48) if number == LAYER else x)  # type: ignore[no-any-return]


def _with_failure(place: Place, call: Call | None, raised: type[Exception]) -> str:
    """Train, and let a step fail. Then repeat it."""
    model, optimizer = sharded_model(place, **DETERMINISTIC)
    train(place, model, optimizer, range(AT))
    try:
        train(place, model, optimizer, range(AT, AT + 1), call)
    except raised:
        pass
    else:
        raise AssertionError(f"{raised.__name__} was not raised on rank {place.rank}")
    # not `model.parameters()`: on a device a thread of autograd may still put the shards back in their places
    if any(shard.grad is not None for group in optimizer.param_groups for shard in group["params"]):
        raise AssertionError("the step that failed left a gradient")
    train(place, model, optimizer, range(AT, STEPS))
    return require_equal(weights_of(model), trained_weights(place, **DETERMINISTIC))


def on_all_ranks(place: Place) -> str:
    """A forward and a backward that fail on every rank."""
    _with_failure(place, _in_forward, _Failure)
    return _with_failure(place, _in_backward, _Failure)


def out_of_memory(place: Place) -> str | None:
    """An allocation that no device can make, in the forward of every rank."""
    return _with_failure(place, _too_large, torch.OutOfMemoryError) if place.on_device else None


def on_one_rank(place: Place) -> str | None:
    """A forward that fails on the last rank alone: the others raise PeerFailed. Without a device all repeat the step then."""
    if place.size == 1:
        return None
    fails = place.rank == place.size - 1
    if place.on_device:
        return _ends_the_others(place, fails)
    return _with_failure(place, _in_forward, _Failure) if fails else _with_failure(place, None, fsdp.PeerFailed)


def _ends_the_others(place: Place, fails: bool) -> str:
    """The hosts of the others have launched more, so their communicators are aborted, and no step can follow."""
    model, optimizer = sharded_model(place)
    train(place, model, optimizer, range(AT))
    began = time.monotonic()
    try:
        for _ in range(1000):
            train(place, model, optimizer, range(AT, STEPS), _in_forward if fails else None)
            torch.get_device_module(place.device).synchronize()
    except _Failure:
        return "raised on this rank"
    except fsdp.PeerFailed:
        return f"PeerFailed on the other ranks after {time.monotonic() - began:.0f} s"
    raise AssertionError("training went on without a rank")
