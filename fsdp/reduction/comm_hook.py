"""Communication hooks: the bucket that a hook is called with, and the reduction that it returns."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.comm.work import Work, WorkThen
from fsdp.errors import ShardingError
from fsdp.reduction.bucket import Bucket


class GradBucket:
    """The bucket that a comm hook reduces. Its methods are those of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._buffer = bucket.buffer
        self._bucket = bucket
        self._is_last = is_last
        self._copies: list[tuple[Tensor, int]] = []
        """Copies of gradients that the hook has asked for, each with its version."""

    def zero_padding(self) -> None:
        """Fill the padding with zeros: a hook that computes a norm or a scale reads the padding too, and new memory is random."""
        self._bucket.flat.wire.zero_padding(self._buffer)

    def buffer(self) -> Tensor:
        """The gradients of this rank (W * C,), padding of zeros included; see `fsdp.register_comm_hook`."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor that `buffer` returns from now on."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter, in the shape of the full parameter: views of the buffer.

        Copies in a bucket of several DTensors, which has no such views. They must not be changed.
        """
        flat = self._bucket.flat
        gradients = flat.wire.full_params(self._buffer)
        if not flat.gathers_in_place:
            self._copies += [(copy, copy._version) for copy in gradients]
        return gradients

    def check_copies(self) -> None:
        """Raise ShardingError if the hook has changed a copy of a gradient, which changes no gradient."""
        if any(copy._version != version for copy, version in self._copies):
            raise ShardingError(
                f"the communication hook has changed a tensor of gradients() in place. The bucket of unit {self._bucket.name!r} "
                "has several DTensors, so these are copies; change buffer() instead."
            )

    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of these gradients: the sharded ones of `model.parameters()`."""
        return list(self._bucket.flat.sharded_params)

    def index(self) -> int:
        """The number of the bucket in its model, the same in every step."""
        return self._bucket.number

    def is_last(self) -> bool:
        """Whether the bucket is the last one of a backward in which every trainable parameter gets a gradient."""
        return self._is_last


class CommHook(NamedTuple):
    """A comm hook and its state."""

    state: Any
    hook: Callable[[Any, Any], Any]

    def launch(self, bucket: GradBucket, result: Tensor, unit: str) -> Work:
        """Call the hook. `wait` checks the result of its future and copies it to `result` (C,).

        Raises:
            ShardingError: the hook returned no future. In `wait`: the result is no tensor, or has another size or kind than the
                reduced shard.
        """
        bucket.zero_padding()
        future = self.hook(self.state, bucket)
        bucket.check_copies()
        if not isinstance(future, torch._C.Future):
            raise ShardingError(
                f"the communication hook must return a torch.futures.Future; for the bucket of unit {unit!r} it returned "
                f"{type(future).__name__}."
            )
        return WorkThen(future, partial(_take, future, result, unit))


def _take(future: "torch._C.Future[Any]", wanted: Tensor, unit: str) -> None:
    """Copy the result of the future of a hook, which is complete, to `wanted`."""
    found = future.value()
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    # another dtype is allowed: torch's fp16-compressing hook returns half precision
    if not isinstance(found, Tensor) or found.numel() != wanted.numel() or found.is_complex() != wanted.is_complex():
        what = f"{found.numel()} x {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise ShardingError(
            f"the communication hook must come to {wanted.numel()} x {wanted.dtype} for the bucket of unit {unit!r}; "
            f"it came to {what}."
        )
    with torch.no_grad():
        wanted.copy_(found.reshape(-1))
