"""A gradient accumulated under `no_sync`, and how the user zeroes it.

[Note: gradients accumulated under no_sync]
They are unsharded, and no parameter of the user shows them. `zero_grad()` reaches sharded parameters only. So when a gradient is
accumulated, its sharded parameter must have a `.grad` that can be zeroed: the one it has, or else this rank's part of the
accumulated gradient. If that `.grad` is removed or zero at the next use, the accumulated gradient is dropped too.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp.errors import ShardingError
from fsdp.shards.refusals import refuse_unreduced
from fsdp.shards.shard_tensor import ShardTensor, local_operators, make_shard, plain

aten = torch.ops.aten
_VIEWS: Final = {aten.detach.default, aten.alias.default}
_ZEROES: Final = {aten.zero_.default, aten._foreach_zero_.default, aten.detach_.default}
"""What `zero_grad` calls."""


class UnreducedGrad(ShardTensor):
    """The gradient that a shard shows while gradients are kept under `no_sync`: a part of this rank's own gradient.

    Each rank has another one. So whatever reads it, such as a step or a norm, would compute with another gradient on each rank.
    It can be zeroed and removed; all other operators are refused.
    """

    is_reduced = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS:
            return make_shard(UnreducedGrad, plain(args[0]), False, args[0].shard_info)
        if func in _ZEROES:
            with local_operators():
                return func(*args, **(kwargs or {}))
        refuse_unreduced(str(func), next(one.shard_info for one in tree_leaves((args, kwargs)) if isinstance(one, cls)))


def mark_unreduced(gradient: Tensor) -> None:
    """From now on, a gradient that a shard shows does not say what has been accumulated."""
    if type(gradient) is ShardTensor:
        gradient.__class__ = UnreducedGrad


def mark_reduced(gradient: Tensor) -> None:
    """From now on, a gradient that a shard shows is the reduced one again."""
    if isinstance(gradient, UnreducedGrad):
        gradient.__class__ = ShardTensor  # type: ignore[assignment]


class AccumulatedGrad:
    """An unsharded gradient accumulated under `no_sync`, and the `.grad` of its sharded parameter at that time."""

    __slots__ = ("_shard_grad", "_version", "owns_shard_grad", "unsharded")

    def __init__(self, unsharded: Tensor, param: nn.Parameter, part: Tensor) -> None:
        self.unsharded = unsharded
        self.owns_shard_grad = param.grad is None
        """True if `.grad` of the sharded parameter is this rank's part of the accumulated gradient, set here."""
        if param.grad is None:
            param.grad = part
        assert param.grad is not None
        self._shard_grad = param.grad
        mark_unreduced(self._shard_grad)
        self._version = param.grad._version

    def is_zeroed(self, param: nn.Parameter, name: str) -> bool:
        """Whether the user has zeroed the gradients since.

        Raises:
            ShardingError: they were changed in another way, which cannot reach the accumulated gradient.
        """
        if param.grad is None:
            return True
        if param.grad is self._shard_grad and self._shard_grad._version == self._version:
            return False
        if param.grad is not self._shard_grad:
            raise ShardingError(
                f"the gradient of {name!r} was replaced while gradients are kept under no_sync; scale or replace it after "
                "the backward that synchronises."
            )
        values = self._shard_grad._values() if self._shard_grad.is_sparse else plain(self._shard_grad)
        if values.numel() and bool(values.any()):
            raise ShardingError(
                f"the gradient of {name!r} was edited while gradients are kept under no_sync; scale or clip after "
                "the backward that synchronises."
            )
        return True

    def end(self) -> None:
        """The accumulated gradient is reduced or dropped: what the shard shows is the reduced gradient again."""
        mark_reduced(self._shard_grad)
