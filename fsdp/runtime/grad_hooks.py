"""The hooks of one unit on gradients: one that runs when a gradient has been accumulated, and checks of AccumulateGrad nodes.

[Note: kept AccumulateGrad nodes]
Autograd accumulates the gradient of a parameter in a node of its own: `p.expand_as(p).grad_fn.next_functions[0][0]`. Apex and
similar libraries keep that node and set hooks on it. Such a hook cannot be seen, but that the node is kept can be. The node
belongs to the user's Parameter. That Parameter is a shard once the module is wrapped, while gradients accumulate into the
unsharded parameter.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.backward_progress import BackwardProgress
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.param_info import kept_accumulator
from fsdp.params.unit import Unit
from fsdp.runtime.final_callback import UNWINDING

Owner = TypeVar("Owner")


def post_accumulate_hook(
    owner: "weakref.ref[Owner]",
    on_grad: Callable[[Owner, int | None], None],
    progress: BackwardProgress,
    early_bucket: int | None,
    streams: Streams,
) -> Callable[[Tensor], None]:
    """The hook on the parameters of one bucket: it calls `on_grad(owner, early_bucket)` after the first accumulation.

    `early_bucket` is the number of the bucket if it is an early one, of which every accumulation counts. The hook refers to the
    owner weakly: the garbage collector does not see hooks of this kind, and the owner leads back to the tensor.
    """
    on_host = streams.on_host

    def accumulated(unsharded: Tensor) -> None:
        if not on_host:
            streams.computes()  # a part of the forward, and so of the backward, may have run on a stream of its own
        if (not progress.has_grad or early_bucket is not None) and (target := owner()) is not None:
            on_grad(target, early_bucket)

    return accumulated


@contextmanager
def trainable(parameter: Tensor) -> Iterator[None]:
    """Make `parameter` require a gradient inside. torch sets hooks only then, and a frozen parameter may be trained later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(not frozen)


class AccumulateGradChecks:
    """Finds the AccumulateGrad nodes of one unit's parameters that some other code keeps.

    A node that was kept before wrapping gets every gradient of its unsharded parameter, so its hooks run. A node that was kept
    afterwards is refused. See [Note: kept AccumulateGrad nodes].
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._relayed: dict[int, RemovableHandle] = {}
        """The hooks that run nodes kept before wrapping, by the id of the shard."""
        self._is_checked = False
        for info, unsharded in zip(unit.param_infos, unit.unsharded_params, strict=True):
            if info.kept_accumulator is not None:
                relay = _relay(info.kept_accumulator, info.parameter, info.names[0])
                self._relayed[id(info.parameter)] = unsharded.register_hook(relay)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove the hooks. The kept nodes get no more gradients."""
        for handle in self._relayed.values():
            handle.remove()

    def check(self) -> None:
        """Check before the first forward that no other node is kept, because no gradient would reach it.

        Raises:
            ShardingError: the AccumulateGrad node of a shard is kept, into which nothing accumulates, or torch's
                `register_multi_grad_hook`, which waits for these nodes, was set on parameters.
        """
        # one check costs as much as a small kernel for each parameter; in inference mode and in transforms there are no nodes
        if self._is_checked or torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active():
            return
        for info, unsharded in zip(self._unit.param_infos, self._unit.unsharded_params, strict=True):
            if any(map(_waits_for_all, (unsharded._backward_hooks or {}).values())):
                raise ShardingError(
                    f"torch's register_multi_grad_hook was set on {info.names[0]!r} of unit {self._unit.name!r} before "
                    "wrapping: it waits for the gradient of a shard, which never comes. Set it inside a forward, give it "
                    "mode='any', or use p.register_hook."
                )
            # what `p.full_tensor()` of a DTensor returns keeps the node, and code that has looked at it may keep that
            if self._unit.replaces_params or id(info.parameter) in self._relayed:
                continue
            if _keeps_accumulator(info.parameter):
                raise ShardingError(
                    f"somebody keeps the node that accumulates the gradient of {info.names[0]!r} in unit {self._unit.name!r}. "
                    "It is that of a shard, and gets no gradient. Either a module around the unit gave the unit's parameters to "
                    "an operation, as ODE solvers with an adjoint do: make that module the unit, and no module inside it. Or "
                    "hooks need it, on p.expand_as(p).grad_fn.next_functions[0][0]: take it before wrapping or inside a forward, "
                    "or use p.register_hook or p.register_post_accumulate_grad_hook."
                )
        self._is_checked = True


def _keeps_accumulator(shard: nn.Parameter) -> bool:
    """Whether the AccumulateGrad node of a shard is kept. On a device this may take a moment."""
    end = time.monotonic() + UNWINDING
    while kept_accumulator(shard) is not None:
        # the thread of autograd that runs the backwards of a device still holds the graph of one that has failed just now
        if shard.device.type == "cpu" or time.monotonic() > end:
            return True
        time.sleep(0.001)
    return False


def _waits_for_all(hook: Any) -> bool:
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.")


def _relay(node: Any, shard: nn.Parameter, name: str) -> Callable[[Tensor], None]:
    """A hook for the unsharded parameter. It runs `node` with each gradient, for the hooks of the node, and accumulates nothing.

    Raises:
        ShardingError: a hook of the node steps an optimizer, with the `.grad` of an earlier backward.
    """

    def run_node(gradient: Tensor) -> None:
        # the hooks of a leaf get the reduced gradient later; a leaf that requires no gradient accumulates none
        leaf, version = node.variable, shard._version
        hooks, leaf._backward_hooks = leaf._backward_hooks, None
        trains = leaf.requires_grad
        leaf.requires_grad_(False)
        try:
            torch.autograd.backward((GradientEdge(node, 0),), (gradient,))
        finally:
            leaf.requires_grad_(trains)
            leaf._backward_hooks = hooks
        if shard._version != version:
            raise ShardingError(
                f"a hook on the node that accumulates the gradient of {name!r} changed the parameter, whose gradient is not "
                "reduced yet, nor in `.grad`; step the optimizer in p.register_post_accumulate_grad_hook."
            )

    return run_node
