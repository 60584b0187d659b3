"""A gradient accumulated under `no_sync`, and how the user zeroes it.

[Note: gradients accumulated under no_sync]
They are unsharded, and no parameter of the user shows them. `zero_grad()` reaches sharded parameters only. So when a gradient is
accumulated, its sharded parameter must have a `.grad` that can be zeroed: the one it has, or else this rank's part of the
accumulated gradient. If that `.grad` is removed or zero at the next use, the accumulated gradient is dropped too.
"""

from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.shards.shard_tensor import plain
from fsdp.shards.unreduced import mark_reduced, mark_unreduced


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
