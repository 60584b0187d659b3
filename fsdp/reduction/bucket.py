"""One bucket: the whole gradients of a flat buffer on their way to `.grad` of its shards.

Where it is on that way is a state of `state_machine.bucket`. The attributes of a bucket are written here alone.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Final, cast

import torch
from torch import Tensor, nn

from fsdp.device.storage import MemoryTracker, ResizableStorage, ReusableBuffer, size_of
from fsdp.errors import ShardingError
from fsdp.params.external_use import RefuseShardGrad
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.reduction.accumulated import AccumulatedGrad
from fsdp.reduction.sparse import as_rows, dense, no_rows

_LARGE: Final = 2**14
"""Elements of a gradient, on average, from which on a pass over the memory costs more than a call for each gradient."""


class Bucket:
    """How one flat buffer is reduced: its bucket, views into it, and what has been reduced."""

    __slots__ = (
        "_tracker",
        "accumulated",
        "all_used",
        "all_used_here",
        "any_rank_accumulated",
        "buffer",
        "filled",
        "flat",
        "memory",
        "name",
        "nbytes",
        "number",
        "reduced",
        "spare",
        "unit",
        "used_here",
        "views",
    )

    def __init__(
        self, number: int, flat: FlatBuffer, unit: int, name: str, dtype: torch.dtype, stays: bool, tracker: MemoryTracker
    ) -> None:
        self.number = number
        """Its place among the buckets of its root."""
        self.flat = flat
        self.unit = unit
        """The number of its unit."""
        self.name = name
        """Of its unit."""
        self._tracker = tracker
        self.buffer = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
        self.views = flat.views_of(self.buffer)
        self.filled: tuple[Tensor, Sequence[Tensor]] | None = None
        """A buffer like it that was filled instead, and the views into that."""
        self.memory = ResizableStorage(self.buffer, "bucket", stays)
        self.spare = ReusableBuffer()
        """For what is reduced where it was filled, which becomes `.grad`."""
        self.nbytes = size_of(self.buffer)
        """Of the gradients; of sparse ones, of those that were launched last."""
        self.reduced: Tensor | None = None
        """The average of this backward (C,), that of a remainder included."""
        self.accumulated: dict[int, AccumulatedGrad] = {}
        self.any_rank_accumulated = False
        """Some rank may have gradients of it in the stash, also where it was frozen since."""
        self.all_used = [True] * len(self.views)
        self.all_used_here = True
        """Every trainable parameter had a gradient on this rank in this backward."""
        self.used_here = self.all_used
        """Which had one."""

    @property
    def is_trained(self) -> bool:
        """Whether there is anything to reduce: some parameter is trainable, or was when gradients were kept."""
        return self.any_rank_accumulated or any(self.flat.requires_grad_flags)

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients are reduced."""
        return self.buffer.dtype

    def missing_params(self, used_here: Sequence[bool]) -> list[str]:
        """The names of trainable parameters without a gradient."""
        flat = self.flat
        return [
            place.names[0]
            for place, one, trains in zip(flat.param_infos, used_here, flat.requires_grad_flags, strict=True)
            if trains and not one
        ]

    def expect_accumulated(self) -> None:
        """A backward under `no_sync` begins: some rank may keep gradients of it."""
        self.any_rank_accumulated = self.any_rank_accumulated or any(self.flat.requires_grad_flags)

    def pass_by(self) -> None:
        """It is frozen: what was missing in an earlier backward is no concern of this one."""
        self.used_here, self.all_used_here = self.all_used, True

    def mute(self) -> None:
        """Forget what came: the gradients of this rank count for nothing."""
        for unsharded in self.flat.unsharded_params:
            unsharded.grad = None

    def stash_all(self) -> None:
        """Add the whole gradients that came to those kept under `no_sync`."""
        for i, unsharded in enumerate(self.flat.unsharded_params):
            if unsharded.grad is not None:
                gradient, unsharded.grad = unsharded.grad, None
                self.keep(i, gradient)

    def drop(self) -> None:
        """Forget the gradients of this backward, reduced or not; what is kept under `no_sync` stays."""
        self.filled = None
        if self.reduced is not None:
            self._tracker.add("reduced", -size_of(self.reduced))
            self.reduced = None
        self.mute()

    def add_reduced(self, chunk: Tensor) -> None:
        """One reduction is over, whose result is in the books; that of a remainder is added to the first."""
        if self.reduced is None:
            self.reduced = chunk
            return
        self._tracker.add("reduced", -size_of(chunk) - size_of(self.reduced))
        self.reduced.add_(chunk)
        self._tracker.add("reduced", size_of(self.reduced))

    def drop_zeroed(self) -> None:
        """Drop gradients kept under `no_sync` that the user has zeroed since."""
        flat = self.flat
        dead = [i for i, kept in self.accumulated.items() if not kept.alive(flat.sharded_params[i], flat.param_infos[i].names[0])]
        for i in dead:
            self.forget(i)

    def keep(self, i: int, gradient: Tensor) -> None:
        """Add a whole gradient to what is kept under `no_sync`."""
        gradient = (as_rows(gradient) if self.flat.is_sparse else self._dense(i, gradient)).to(self.dtype)
        kept = self.accumulated.get(i)
        if kept is not None:
            self._tracker.add("kept", -size_of(kept.unsharded))
            kept.unsharded.add_(gradient)
            self._tracker.add("kept", size_of(kept.unsharded))
            return
        shard, part = self.flat.sharded_params[i], self.flat.parts[i]
        own = gradient
        if not gradient.is_sparse:
            own = gradient.reshape(-1)[part.first : part.first + part.numel].view(part.shape)
        self.accumulated[i] = AccumulatedGrad(gradient, shard, own.to(shard.dtype, copy=True))
        self._tracker.add("kept", size_of(gradient))

    def forget(self, i: int) -> AccumulatedGrad | None:
        """Let go of what is kept of one parameter, if anything is."""
        kept = self.accumulated.pop(i, None)
        if kept is not None:
            self._tracker.add("kept", -size_of(kept.unsharded))
        return kept

    def forget_all(self) -> None:
        """Let go of everything that is kept, and of what the shards show for it."""
        for i in list(self.accumulated):
            kept = self.forget(i)
            if kept is not None and kept.shown_is_ours:
                self.flat.sharded_params[i].grad = None

    def collect_used(self, launched: bool) -> Sequence[bool]:
        """Note which gradients came, also after the bucket was launched; return which are here that were not launched."""
        flat = self.flat
        here = [unsharded.grad is not None for unsharded in flat.unsharded_params]
        if launched and True not in here:
            return here
        before = (
            self.used_here
            if launched
            else [i in self.accumulated for i in range(len(here))]
            if self.accumulated
            else repeat(False)
        )
        self._note_came([one or other for one, other in zip(here, before, strict=False)])
        return here if launched else self.used_here

    def _note_came(self, used_here: list[bool]) -> None:
        self.used_here = used_here
        requires_grad_flags = self.flat.requires_grad_flags
        settled = not self.any_rank_accumulated or all(requires_grad_flags)
        self.all_used_here = settled and all(
            [used_here or not trains for used_here, trains in zip(used_here, requires_grad_flags, strict=True)]
        )

    def fill(self, remainder: bool, buffer: Tensor | None = None, divisor: float = 1) -> None:
        """Copy the whole gradients into the bucket or a buffer like it, and drop them.

        With those kept under `no_sync`, unless it is a `remainder`: they went with what was launched before.

        Raises:
            ShardingError: one is sparse that was to be dense.
        """
        flat = self.flat
        views = self.views
        if buffer is not None:
            views = flat.views_of(buffer)
            if buffer.dtype is flat.shard.dtype:
                self.filled = buffer, views  # else what is reduced is put elsewhere, and this is not to be kept
        gradients = [unsharded.grad for unsharded in flat.unsharded_params]
        for unsharded in flat.unsharded_params:
            unsharded.grad = None
        if (
            not self.accumulated
            and not self.any_rank_accumulated
            and not any([gradient is None or gradient.is_sparse for gradient in gradients])
        ):
            self.used_here, self.all_used_here = self.all_used, True
            _copy_divided(self.buffer if buffer is None else buffer, views, cast(list[Tensor], gradients), divisor)
            return
        came_before = self.used_here if remainder else [False] * len(views)
        used_here = []
        for i, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
            kept = None if remainder else self.accumulated.get(i)
            parts = [self._dense(i, part) for part in (gradient, None if kept is None else kept.unsharded) if part is not None]
            used_here.append(came_before[i] or bool(parts))
            if parts:
                view.copy_(parts[0])
            else:
                view.zero_()
            for part in parts[1:]:
                view.add_(part)
        if divisor != 1:
            (self.buffer if buffer is None else buffer).div_(divisor)
        self._note_came(used_here)

    def take_rows(self, remainder: bool) -> Tensor:
        """The same for a sparse bucket: the gradient of its one parameter (V, *rest)."""
        unsharded = self.flat.unsharded_params[0]
        gradient, unsharded.grad = unsharded.grad, None
        kept = None if remainder else self.accumulated.get(0)
        parts = [
            as_rows(part).to(self.dtype) for part in (gradient, None if kept is None else kept.unsharded) if part is not None
        ]
        self._note_came([bool(parts) or (remainder and self.used_here[0])])
        rows = (parts[0] + parts[1]).coalesce() if len(parts) > 1 else parts[0] if parts else no_rows(unsharded, self.dtype)
        self.nbytes = size_of(rows)
        return rows

    def _dense(self, i: int, gradient: Tensor) -> Tensor:
        """A gradient that may have come sparse, as a dense bucket takes it."""
        if gradient.is_sparse and self.flat.is_replicated and not self.flat.is_sparse:
            raise ShardingError(
                f"the gradient of {self.flat.param_infos[i].names[0]!r} in unit {self.name!r} is sparse, and nothing "
                "said so when it was wrapped: set `sparse` of its nn.Embedding or nn.EmbeddingBag before wrapping, or compute a "
                "dense gradient."
            )
        return dense(gradient)

    def show_to_hooks(self, used: Sequence[bool]) -> None:
        """Run the hooks that the user has set on shard parameters (`p.register_hook`) on their reduced gradients.

        Raises:
            ShardingError: a hook returned something that cannot take the place of the gradient.
        """
        if self.reduced is None:
            return
        flat = self.flat
        for i, _, shape in flat.local_params:
            hooks = flat.sharded_params[i]._backward_hooks
            # one is ours
            if hooks is None or len(hooks) < 2 or not used[i]:
                continue
            part = flat.parts[i]
            sparse, size = self.reduced.is_sparse, size_of(self.reduced)
            view = self.reduced if sparse else self.reduced[part.offset : part.offset + part.numel].view(shape)
            for hook in list(hooks.values()):
                changed = None if isinstance(hook, RefuseShardGrad) else hook(view)
                if changed is None:
                    continue
                if not isinstance(changed, Tensor) or changed.shape != view.shape:
                    raise ShardingError(
                        f"a hook on parameter {flat.param_infos[i].names[0]!r} must return None or a tensor of shape "
                        f"{tuple(view.shape)}, this rank's part of the gradient; it returned "
                        f"{tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__}."
                    )
                if sparse:
                    view = as_rows(changed).to(view.dtype)
                else:
                    view.copy_(changed)
            if sparse:
                # of more rows, or fewer
                self._tracker.add("reduced", size_of(view) - size)
                self.reduced = view

    def put(self, used: Sequence[bool]) -> list[nn.Parameter]:
        """Set or accumulate what was reduced (C,) into `.grad` of the shard parameters.

        A parameter of which this rank holds nothing keeps `.grad` None: optimizers pass it by. Returns those whose
        post-accumulate hooks are to be run.
        """
        hooked = []
        reduced, self.reduced = self.reduced, None
        assert reduced is not None
        self._tracker.add("reduced", -size_of(reduced))
        flat = self.flat
        gradients = self._gradients_in(reduced)
        targets, sums = [], []
        for (i, _, _), gradient in zip(flat.local_params, gradients, strict=True):
            parameter = flat.sharded_params[i]
            if not used[i] or not (parameter.requires_grad or self.any_rank_accumulated):
                continue
            if parameter._post_accumulate_grad_hooks:
                hooked.append(parameter)
            before = parameter.grad
            kept = self.forget(i)
            if before is None or (kept is not None and kept.shown_is_ours):
                parameter.grad = gradient
            elif before.is_sparse or gradient.is_sparse:
                before.add_(gradient)
            else:
                targets.append(before)
                sums.append(gradient)
        if targets:
            torch._foreach_add_(targets, sums)
        # what is left was shown for parameters this rank holds nothing of
        self.forget_all()
        self.any_rank_accumulated = False
        return hooked

    def _gradients_in(self, reduced: Tensor) -> Sequence[Tensor]:
        """Of each parameter this rank holds something of, in the shape it has here."""
        flat = self.flat
        filled, self.filled = self.filled, None
        if reduced.is_sparse:
            return (reduced,)
        if filled is not None and filled[0].data_ptr() == reduced.data_ptr():
            return [filled[1][i] for i, _, _ in flat.local_params]  # it was reduced where it was filled
        parts = torch.split_with_sizes(reduced, flat.split_sizes)
        return [parts[segment].view(shape) for _, segment, shape in flat.local_params]


def _copy_divided(buffer: Tensor, views: list[Tensor], gradients: list[Tensor], divisor: float) -> None:
    """Copy gradients into the views of a buffer; large ones on the host in one pass over the memory."""
    is_large = buffer.device.type == "cpu" and buffer.numel() >= _LARGE * len(views)
    if divisor == 1 or not is_large or gradients[0].dtype != buffer.dtype:
        torch._foreach_copy_(views, gradients)
        if divisor != 1:
            buffer.div_(divisor)
        return
    for view, gradient in zip(views, gradients, strict=True):
        torch.div(gradient, divisor, out=view)
