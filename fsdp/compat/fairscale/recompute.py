"""checkpoint_wrapper: a module whose forward discards its activations and computes them again in the backward.

The module keeps its class and its names: only its `forward` is replaced. The recompute is reentrant.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

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


def _forward(forward: Callable[..., Any], reference: Any, offload: bool, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of a checkpointed module."""
    module = reference()
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shown = _views_in(module)
    trains = any(t.requires_grad for t in (*tensors, *module.parameters(), *(view for *_, view in shown)))
    if _flags.disabled or not torch.is_grad_enabled() or not trains:
        return forward(module, *args, **kwargs)
    places = [isinstance(leaf, Tensor) for leaf in leaves]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    outputs: list[Any] = []

    def run(switch: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the module with these tensors among its inputs; return those among its outputs."""
        # torch runs the forward without gradients, and the recompute with them
        is_again, rest = torch.is_grad_enabled(), iter(given)
        inputs = [next(rest) if is_tensor else leaf for is_tensor, leaf in zip(places, others, strict=True)]
        again_args, again_kwargs = tree_unflatten(inputs, structure)
        with enable_recomputing() if is_again else enable_checkpointing(), _showing(shown if is_again else ()):
            found, spec = tree_flatten(forward(module, *again_args, **again_kwargs))
        made = tuple(leaf for leaf in found if isinstance(leaf, Tensor))
        if not is_again:
            outputs.extend((found, spec))
        elif not any(one.requires_grad for one in made):
            raise RuntimeError(
                "checkpoint_wrapper: no output of the module requires a gradient, so that there is nothing to compute again; "
                "do not wrap it, or wrap it after freezing its parameters."
            )
        return made

    # the outputs require a gradient if any input does, and no input of the module may
    switch = torch.empty(0, requires_grad=True)
    # it makes no copy of a tensor on the host, and autograd does not check the version of what a hook has saved
    with save_on_cpu() if offload and any(t.device.type != "cpu" for t in tensors) else nullcontext():
        results = iter(_Checkpoint.apply(run, True, switch, *tensors))  # type: ignore[no-untyped-call]
    found, spec = outputs
    outputs.clear()
    return tree_unflatten([next(results) if isinstance(leaf, Tensor) else leaf for leaf in found], spec)


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


class _Checkpoint(CheckpointFunction):
    """torch's reentrant checkpoint."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "checkpoint_wrapper: torch.autograd.grad() and backward(inputs=...) cannot pass through a checkpoint, because "
                "the parameters inside get their gradients too; use loss.backward()."
            )
        return CheckpointFunction.backward(ctx, *gradients)  # type: ignore[no-untyped-call]
