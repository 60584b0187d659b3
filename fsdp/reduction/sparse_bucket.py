"""A bucket whose one parameter has sparse gradients: rows are reduced, and `.grad` stays sparse.

It exists under NO_SHARD only, shares no collective, and is never cut: the shard is the parameter.
"""

from collections.abc import Hashable, Sequence

from torch import Tensor

from fsdp.device.storage import size_of
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.sparse import as_rows, dense, no_rows


class SparseBucket(Bucket):
    """The gradient rows of one parameter (V, *rest). Only a comm hook is given the dense buffer."""

    @property
    def group_key(self) -> Hashable:
        return super().group_key, self.number

    def take_rows(self, remainder: bool) -> Tensor:
        """Take the gradient off its parameter, as rows (V, *rest); the counterpart of `fill`."""
        unsharded = self.flat.unsharded_params[0]
        gradient, unsharded.grad = unsharded.grad, None
        self.flat.refuse_grads_of_other_dtype([gradient])
        parts = [as_rows(part).to(self.buffer.dtype) for part in self._summands(0, gradient, remainder)]
        self._set_used([bool(parts) or (remainder and self.local_used[0])])
        rows = (
            (parts[0] + parts[1]).coalesce() if len(parts) > 1 else parts[0] if parts else no_rows(unsharded, self.buffer.dtype)
        )
        self.nbytes = size_of(rows)
        return rows

    def add_reduced(self, chunk: Tensor) -> None:
        if not chunk.is_sparse:
            # a comm hook reduced the dense buffer
            unsharded = self.flat.unsharded_params[0]
            rows = as_rows(chunk[: unsharded.numel()].view(unsharded.shape))
            self._tracker.add("reduced", size_of(rows) - size_of(chunk))
            chunk = rows
        super().add_reduced(chunk)

    def run_grad_hooks(self, used: Sequence[bool]) -> None:
        if self.reduced is None:
            return
        before = size_of(self.reduced)
        try:
            super().run_grad_hooks(used)
        finally:
            # a hook may return, or set in place, more rows or fewer
            self._tracker.add("reduced", size_of(self.reduced) - before)

    def _to_dense(self, i: int, gradient: Tensor) -> Tensor:
        return dense(gradient)

    def _to_accumulate(self, i: int, gradient: Tensor) -> Tensor:
        return as_rows(gradient).to(self.buffer.dtype)

    def _local_part(self, i: int, gradient: Tensor) -> Tensor:
        return gradient

    def _reduced_view(self, i: int, reduced: Tensor) -> Tensor:
        return reduced

    def _replace_reduced(self, view: Tensor, changed: Tensor) -> Tensor:
        self.reduced = as_rows(changed).to(view.dtype)
        return self.reduced

    def _shard_grads(self, reduced: Tensor) -> Sequence[Tensor]:
        return (reduced,)
