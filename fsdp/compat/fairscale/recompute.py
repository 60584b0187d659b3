"""checkpoint_wrapper: a module whose forward discards its activations and computes them again in the backward.

The module keeps its class and its names: only its `forward` is replaced. The recompute is reentrant.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from fsdp.compat.fairscale.flat_params import Shown


class _Flags(threading.local):
    disabled = False
    checkpointing = False
    recomputing = False


_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether the first forward of a checkpoint runs, whose activations are discarded."""
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Whether a checkpoint computes its activations again."""
    return _flags.recomputing


@contextmanager
def _set(name: str) -> Generator[None, None, None]:
    before = getattr(_flags, name)
    setattr(_flags, name, True)
    try:
        yield
    finally:
        setattr(_flags, name, before)


disable_checkpointing = partial(_set, "disabled")
"""A context in which the forwards of wrapped modules keep their activations."""
enable_checkpointing = partial(_set, "checkpointing")
"""A context in which `is_checkpointing()` is True."""
enable_recomputing = partial(_set, "recomputing")
"""A context in which `is_recomputing()` is True."""


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Let the forward of `module` discard its activations and compute them again in the backward; return the same module.

    Args:
        module: the module to change.
        offload_to_cpu: keep the inputs of its forward on the host between forward and backward.
    """
    patch_batchnorm(module)
    forward = partial(_forward, type(module).forward, weakref.ref(module), bool(offload_to_cpu))
    module.forward = forward
    return module


def patch_batchnorm(module: nn.Module) -> None:
    """Let batch norms in `module` update their statistics once for each step: in the recompute.

    A batch norm with an attribute `disable_patch_batchnorm` is left alone.
    """
    for norm in module.modules():
        if isinstance(norm, _BatchNorm) and not hasattr(norm, "disable_patch_batchnorm"):
            if any(getattr(hook, "__name__", "") == _stop_tracking.__name__ for hook in norm._forward_pre_hooks.values()):
                continue
            norm.register_forward_pre_hook(_stop_tracking)
            norm.register_forward_hook(_track_again, always_call=True)


def _stop_tracking(norm: nn.Module, _: Any) -> None:
    if is_checkpointing() and norm.training and norm.track_running_stats:
        norm._tracks_again = True  # type: ignore[assignment]
        norm.track_running_stats = False  # type: ignore[assignment]
        norm.__dict__["_kept_stats"] = norm._buffers["running_mean"], norm._buffers["running_var"]
        norm._buffers["running_mean"] = norm._buffers["running_var"] = None


def _track_again(norm: nn.Module, *_: Any) -> None:
    if norm.__dict__.pop("_tracks_again", False):
        norm.track_running_stats = True  # type: ignore[assignment]
        norm._buffers["running_mean"], norm._buffers["running_var"] = norm.__dict__.pop("_kept_stats")


class _Call(NamedTuple):
    """One forward of a checkpointed module: how to repeat it."""

    run: Callable[[Sequence[Any]], tuple[list[Any], Any]]
    """Runs the module with these leaves of its inputs; returns the leaves and the structure of the outputs."""
    leaves: list[Any]
    """The leaves of the inputs that are no tensors; None where a tensor is."""
    places: list[int]
    """Where the tensors are among the leaves."""
    offload: bool
    shown: Shown
    """The views that modules showed in place of parameters."""
    outputs: list[Any]
    """Receives the leaves and the structure of the outputs."""

    def inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """All leaves of the inputs."""
        found = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            found[place] = tensor
        return found


def _forward(forward: Callable[..., Any], reference: Any, offload: bool, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of a checkpointed module."""
    module = reference()
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shown = _views_in(module)
    trains = any(t.requires_grad for t in (*tensors, *module.parameters(), *(view for *_, view in shown)))
    if _flags.disabled or not torch.is_grad_enabled() or not trains:
        return forward(module, *args, **kwargs)

    def run(given: Sequence[Any]) -> tuple[list[Any], Any]:
        again_args, again_kwargs = tree_unflatten(given, structure)
        return tree_flatten(forward(module, *again_args, **again_kwargs))

    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    call = _Call(run, others, places, offload, shown, [])
    # the outputs require a gradient if any input does, and no input of the module may
    switch = torch.empty(0, requires_grad=True)
    results = iter(_Checkpoint.apply(switch, call, *tensors))  # type: ignore[no-untyped-call]
    found, outputs = call.outputs
    call.outputs.clear()
    return tree_unflatten([next(results) if isinstance(leaf, Tensor) else leaf for leaf in found], outputs)


def _views_in(module: nn.Module) -> Shown:
    """The views that modules show in place of parameters now."""
    return tuple(
        (one, name, value)
        for one in module.modules()
        for name, value in one.__dict__.items()
        if isinstance(value, Tensor) and value._is_view()
    )


@contextmanager
def _showing(shown: Shown) -> Iterator[None]:
    """Let modules show what they showed in the forward."""
    before = [(one, name, one.__dict__.get(name)) for one, name, _ in shown]
    for one, name, value in shown:
        one.__dict__[name] = value
    try:
        yield
    finally:
        for one, name, earlier in before:
            if earlier is None:
                one.__dict__.pop(name, None)
            else:
                one.__dict__[name] = earlier


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, switch: Tensor, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.trains = [t.requires_grad for t in tensors]
        ctx.devices = [t.device for t in tensors]
        ctx.save_for_backward(*(t.to("cpu", non_blocking=True) if call.offload else t for t in tensors))
        ctx.random = torch.get_rng_state(), *get_device_states(*tensors)
        ctx.autocasts = [_autocast(device) for device in ("cpu", *{t.device.type for t in tensors if t.device.type != "cpu"})]
        with enable_checkpointing():
            leaves, structure = call.run(call.inputs(tensors))
        call.outputs.extend((leaves, structure))
        outputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        ctx.mark_non_differentiable(*(t for t in outputs if not (t.is_floating_point() or t.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "checkpoint_wrapper: torch.autograd.grad() and backward(inputs=...) cannot pass through a checkpoint, because "
                "the parameters inside get their gradients too; use loss.backward()."
            )
        call: _Call = ctx.call
        tensors = [
            saved.to(device).detach().requires_grad_(flag)
            for saved, device, flag in zip(ctx.saved_tensors, ctx.devices, ctx.trains, strict=True)
        ]
        host, devices, states = ctx.random
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices, enabled=True))
            torch.set_rng_state(host)
            set_device_states(devices, states)
            for autocast in ctx.autocasts:
                stack.enter_context(autocast())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(enable_recomputing())
            stack.enter_context(_showing(call.shown))
            leaves, _ = call.run(call.inputs(tensors))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ends = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.requires_grad and grad is not None]
        if not ends:
            raise RuntimeError(
                "checkpoint_wrapper: no output of the module requires a gradient, so that there is nothing to compute again; "
                "do not wrap it, or wrap it after freezing its parameters."
            )
        torch.autograd.backward([out for out, _ in ends], [grad for _, grad in ends])
        return None, None, *(t.grad for t in tensors)


def _autocast(device: str) -> Callable[[], Any]:
    """A context with the autocast settings of a type of device as they are now."""
    try:
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    except RuntimeError:  # a type of device without autocast
        return nullcontext
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=torch.is_autocast_cache_enabled())
