"""What a communication hook is shown, and what it must give back."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.reduction.bucket import Bucket


class GradientBucket:
    """One bucket on its way through a hook. Its methods are those of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._buffer = bucket.buffer
        self._bucket = bucket
        self._index = index
        self._is_last = is_last

    def zero_padding(self) -> None:
        """New memory holds anything, which a hook that looks at many elements at once (a norm, a scale) takes for gradients."""
        slots = self._bucket.flat.layout.slots
        ends = [0, *(slot.end for slot in slots)]
        for end, start in zip(ends, [*(slot.start for slot in slots), self._buffer.numel()], strict=True):
            self._buffer[end:start].zero_()

    def buffer(self) -> Tensor:
        """The gradients of this rank (W * C,), padding of zeros included; see `fsdp.register_comm_hook`."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Put another tensor in its place, for whoever asks for `buffer` later."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """The same by parameter, each in the shape of the full parameter: views of the buffer."""
        slots = self._bucket.flat.layout.slots
        return [self._buffer[slot.start : slot.end].view(slot.shape) for slot in slots]

    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters the gradients are of: those of `model.parameters()`, of which this rank holds its part."""
        return list(self._bucket.flat.shard_parameters)

    def index(self) -> int:
        """Of the bucket in its model, the same in every step."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of a backward that brings gradients to everything that is trainable."""
        return self._is_last


class CommHook(NamedTuple):
    """A hook and its state."""

    state: Any
    hook: Callable[[Any, Any], Any]

    def launch(self, bucket: GradientBucket, result: Tensor, unit: str) -> "HookedWork":
        """Let the hook begin; what it promises is checked, and copied to `result` (C,), at `wait`."""
        bucket.zero_padding()
        promise = self.hook(self.state, bucket)
        if not isinstance(promise, torch._C.Future):
            raise ShardingError(
                f"the communication hook must return a torch.futures.Future; for the bucket of unit {unit!r} it returned "
                f"{type(promise).__name__}."
            )
        return HookedWork(promise, result, unit)


class HookedWork:
    """A reduction by a hook, in flight."""

    __slots__ = ("_promise", "_result", "_unit")

    def __init__(self, promise: "torch._C.Future[Any]", result: Tensor, unit: str) -> None:
        self._promise = promise
        self._result = result
        self._unit = unit

    def wait(self) -> None:
        """Take over what the hook promised.

        Raises:
            ShardingError: it is no tensor, or not of the size and kind it must have.
        """
        found = self._promise.wait()
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        wanted = self._result
        # torch's wrapper of hooks in half precision comes to half precision
        if not isinstance(found, Tensor) or found.numel() != wanted.numel() or found.is_complex() != wanted.is_complex():
            what = f"{found.numel()} x {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise ShardingError(
                f"the communication hook must come to {wanted.numel()} x {wanted.dtype} for the bucket of unit {self._unit!r}; "
                f"it came to {what}."
            )
        with torch.no_grad():
            wanted.copy_(found.reshape(-1))
