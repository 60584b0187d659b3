"""The node that accumulates the gradient of a parameter, if somebody keeps it: `p.expand_as(p).grad_fn.next_functions[0][0]`.

Apex and its like set hooks on it. A hook of this kind can be seen by nobody, but that the node is kept can. The node belongs to
the user's Parameter, which is a shard once wrapped, while gradients accumulate into the whole parameter.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fsdp.errors import ShardingError
from fsdp.params.unit import Unit


class Accumulators:
    """The accumulating nodes that somebody keeps of the parameters of one unit. Those kept before wrapping hear all of them."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._heard: dict[int, RemovableHandle] = {}
        """By the id of the shard."""
        self._is_checked = False
        for place, whole in zip(unit.places, unit.whole_parameters, strict=True):
            node = _kept_accumulator(place.parameter)
            if node is not None:
                relay = _relay(node, place.parameter, place.names[0])
                self._heard[id(place.parameter)] = whole.register_hook(relay)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Let them hear nothing any more."""
        for handle in self._heard.values():
            handle.remove()

    def check(self) -> None:
        """Before the first forward: look for others, which hear nothing.

        Raises:
            ShardingError: somebody keeps the accumulating node of a shard, into which nothing accumulates, or has set
                torch's `register_multi_grad_hook` on parameters, which waits for these nodes.
        """
        # it costs as much as a small kernel for each parameter; and inference has no nodes
        if self._is_checked or torch.is_inference_mode_enabled():
            return
        for place, whole in zip(self._unit.places, self._unit.whole_parameters, strict=True):
            if any(map(_waits_for_all, (whole._backward_hooks or {}).values())):
                raise ShardingError(
                    f"torch's register_multi_grad_hook was set on {place.names[0]!r} of unit {self._unit.name!r} before "
                    "wrapping: it waits for the gradient of a shard, which never comes. Set it inside a forward, give it "
                    "mode='any', or use p.register_hook."
                )
            if id(place.parameter) not in self._heard and _kept_accumulator(place.parameter) is not None:
                raise ShardingError(
                    f"somebody keeps the node that accumulates the gradient of {place.names[0]!r} in unit {self._unit.name!r}, "
                    "as hooks on p.expand_as(p).grad_fn.next_functions[0][0] need it. Taken after wrapping and outside a forward "
                    "it is that of a shard, and hears nothing: take it before wrapping or inside a forward, or use "
                    "p.register_hook or p.register_post_accumulate_grad_hook."
                )
        self._is_checked = True


def _waits_for_all(hook: Any) -> bool:
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.")


def _kept_accumulator(parameter: nn.Parameter) -> Any:
    """The node that accumulates the gradient of `parameter`, if somebody keeps it, or else None."""
    if not parameter.requires_grad or torch.is_inference_mode_enabled():
        return None
    node = get_gradient_edge(parameter).node
    return node if sys.getrefcount(node) > _UNKEPT else None


def _relay(node: Any, shard: nn.Parameter, name: str) -> Callable[[Tensor], None]:
    """A hook for the whole parameter: run `node` with each of its gradients, for its hooks, and accumulate nothing.

    Raises:
        ShardingError: one of them steps an optimizer, with what an earlier backward has left in `.grad`.
    """

    def hear(gradient: Tensor) -> None:
        # hooks of the shard hear the reduced gradient; a leaf that needs no gradient accumulates none
        hooks, shard._backward_hooks = shard._backward_hooks, None
        trains, version = shard.requires_grad, shard._version
        shard.requires_grad_(False)
        try:
            torch.autograd.backward((GradientEdge(node, 0),), (gradient,))
        finally:
            shard.requires_grad_(trains)
            shard._backward_hooks = hooks
        if shard._version != version:
            raise ShardingError(
                f"a hook on the node that accumulates the gradient of {name!r} changed the parameter, whose gradient is not "
                "reduced yet, nor in `.grad`; step the optimizer in p.register_post_accumulate_grad_hook."
            )

    return hear


def _count_of_unkept() -> int:
    node = get_gradient_edge(nn.Parameter(torch.zeros(()))).node
    return sys.getrefcount(node)


_UNKEPT: Final = _count_of_unkept()
"""References to a node that is in one local variable; which, depends on the Python."""
