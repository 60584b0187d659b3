"""A gradient kept under `no_sync`, and how the user can zero it.

[Note: gradients kept under no_sync]
They are whole, and live in the stash. `zero_grad()` reaches shard parameters only, so at stash time
each shard shows something to zero: its `.grad` as it was, or else this rank's part of the kept
gradient. If that is gone or zeroed when the stash is used next, the kept gradient dies with it.
"""

from torch import Tensor, nn

from fsdp.errors import ShardingError


class Kept:
    """A whole gradient kept under `no_sync`, and what the shard showed when it was kept."""

    __slots__ = ("shown", "shown_is_ours", "version", "whole")

    def __init__(self, whole: Tensor, shard: nn.Parameter, own: Tensor) -> None:
        self.whole = whole
        self.shown_is_ours = shard.grad is None
        if shard.grad is None:
            shard.grad = own
        assert shard.grad is not None
        self.shown = shard.grad
        self.version = self.shown._version

    def alive(self, shard: nn.Parameter, name: str) -> bool:
        """Whether the user has not zeroed the gradients since.

        Raises:
            ShardingError: they were edited in another way, which cannot reach the kept gradient.
        """
        if shard.grad is not self.shown:
            return False
        if self.shown._version == self.version:
            return True
        values = self.shown._values() if self.shown.is_sparse else self.shown
        if values.numel() and bool(values.any()):
            raise ShardingError(
                f"the gradient of {name!r} was edited while gradients are kept under no_sync; scale or clip after "
                "the backward that synchronises."
            )
        return False
