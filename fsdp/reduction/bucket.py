"""One bucket: the whole gradients of a flat buffer on their way to `.grad` of its shards."""

from collections.abc import Sequence
from itertools import repeat
from typing import Final, cast

import torch
from torch import Tensor, nn

from fsdp.device.storage import Ledger, Memory, Spare, size_of
from fsdp.errors import ShardingError
from fsdp.params.external_use import RefusedUse
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.reduction.accumulated import Kept
from fsdp.reduction.sparse import as_rows, dense, no_rows

_LARGE: Final = 2**14
"""Elements of a gradient, on average, from which on a pass over the memory costs more than a call for each gradient."""


class Bucket:
    """How one flat buffer is reduced: its bucket, views into it, and what has been reduced."""

    __slots__ = (
        "_ledger",
        "all_used",
        "buffer",
        "came",
        "complete",
        "filled",
        "flat",
        "launched",
        "memory",
        "name",
        "nbytes",
        "owed",
        "pending",
        "spare",
        "stash",
        "unit",
        "views",
    )

    def __init__(self, flat: FlatBuffer, unit: int, name: str, dtype: torch.dtype, stays: bool, ledger: Ledger) -> None:
        self.flat = flat
        self.unit = unit
        """The number of its unit."""
        self.name = name
        """Of its unit."""
        self._ledger = ledger
        self.buffer = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
        self.views = flat.views_of(self.buffer)
        self.filled: tuple[Tensor, Sequence[Tensor]] | None = None
        """A buffer like it that was filled instead, and the views into that."""
        self.memory = Memory(self.buffer, "bucket", stays)
        self.spare = Spare()
        """For what is reduced where it was filled, which becomes `.grad`."""
        self.nbytes = size_of(self.buffer)
        """Of the gradients; of sparse ones, of those that were launched last."""
        self.pending: Tensor | None = None
        self.launched = False
        """Its gradients were sent in this backward; what comes after is a second portion."""
        self.stash: dict[int, Kept] = {}
        self.owed = False
        """Some rank may have gradients of it in the stash, also where it was frozen since."""
        self.all_used = [True] * len(self.views)
        self.complete = True
        """Every trainable parameter had a gradient on this rank in this backward."""
        self.came = self.all_used
        """Which had one."""

    @property
    def is_trained(self) -> bool:
        """Whether there is anything to reduce: some parameter is trainable, or was when gradients were kept."""
        return self.owed or any(self.flat.trainable)

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients are reduced."""
        return self.buffer.dtype

    def missing(self, came: Sequence[bool]) -> list[str]:
        """The names of trainable parameters without a gradient."""
        flat = self.flat
        return [
            place.names[0] for place, one, trains in zip(flat.places, came, flat.trainable, strict=True) if trains and not one
        ]

    def forget_zeroed(self) -> None:
        """Drop gradients kept under `no_sync` that the user has zeroed since."""
        flat = self.flat
        dead = [i for i, kept in self.stash.items() if not kept.alive(flat.shard_parameters[i], flat.places[i].names[0])]
        for i in dead:
            self.forget(i)

    def keep(self, i: int, gradient: Tensor) -> None:
        """Add a whole gradient to what is kept under `no_sync`."""
        gradient = (as_rows(gradient) if self.flat.is_sparse else self._dense(i, gradient)).to(self.dtype)
        kept = self.stash.get(i)
        if kept is not None:
            self._ledger.add("kept", -size_of(kept.whole))
            kept.whole.add_(gradient)
            self._ledger.add("kept", size_of(kept.whole))
            return
        shard, part = self.flat.shard_parameters[i], self.flat.parts[i]
        own = gradient
        if not gradient.is_sparse:
            own = gradient.reshape(-1)[part.first : part.first + part.numel].view(part.shape)
        self.stash[i] = Kept(gradient, shard, own.to(shard.dtype, copy=True))
        self._ledger.add("kept", size_of(gradient))

    def forget(self, i: int) -> Kept | None:
        """Let go of what is kept of one parameter, if anything is."""
        kept = self.stash.pop(i, None)
        if kept is not None:
            self._ledger.add("kept", -size_of(kept.whole))
        return kept

    def forget_all(self) -> None:
        """Let go of everything that is kept, and of what the shards show for it."""
        for i in list(self.stash):
            kept = self.forget(i)
            if kept is not None and kept.shown_is_ours:
                self.flat.shard_parameters[i].grad = None

    def take_stock(self, launched: bool) -> Sequence[bool]:
        """Note which gradients came, also after the bucket was launched; return which are here that were not launched."""
        flat = self.flat
        here = [whole.grad is not None for whole in flat.whole_parameters]
        if launched and True not in here:
            return here
        before = self.came if launched else [i in self.stash for i in range(len(here))] if self.stash else repeat(False)
        self._note_came([one or other for one, other in zip(here, before, strict=False)])
        return here if launched else self.came

    def _note_came(self, came: list[bool]) -> None:
        self.came = came
        trainable = self.flat.trainable
        settled = not self.owed or all(trainable)
        self.complete = settled and all([came or not trains for came, trains in zip(came, trainable, strict=True)])

    def fill(self, buffer: Tensor | None = None, divisor: float = 1) -> None:
        """Copy the whole gradients, and those kept under `no_sync`, into the bucket or a buffer like it; drop the former.

        Raises:
            ShardingError: one is sparse that was to be dense.
        """
        flat = self.flat
        views = self.views
        if buffer is not None:
            views = flat.views_of(buffer)
            if buffer.dtype is flat.shard.dtype:
                self.filled = buffer, views  # else what is reduced is put elsewhere, and this is not to be kept
        gradients = [whole.grad for whole in flat.whole_parameters]
        for whole in flat.whole_parameters:
            whole.grad = None
        second, self.launched = self.launched, True
        if not self.stash and not self.owed and not any([gradient is None or gradient.is_sparse for gradient in gradients]):
            self.came, self.complete = self.all_used, True
            _copy_divided(self.buffer if buffer is None else buffer, views, cast(list[Tensor], gradients), divisor)
            return
        came_before = self.came if second else [False] * len(views)
        came = []
        for i, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
            # what was kept went with the first portion
            kept = None if second else self.stash.get(i)
            parts = [self._dense(i, part) for part in (gradient, None if kept is None else kept.whole) if part is not None]
            came.append(came_before[i] or bool(parts))
            if parts:
                view.copy_(parts[0])
            else:
                view.zero_()
            for part in parts[1:]:
                view.add_(part)
        if divisor != 1:
            (self.buffer if buffer is None else buffer).div_(divisor)
        self._note_came(came)

    def take_rows(self) -> Tensor:
        """Of a sparse bucket: the gradient of its one parameter (V, *rest), and what is kept of it; drop the former."""
        whole = self.flat.whole_parameters[0]
        gradient, whole.grad = whole.grad, None
        second, self.launched = self.launched, True
        kept = None if second else self.stash.get(0)
        parts = [as_rows(part).to(self.dtype) for part in (gradient, None if kept is None else kept.whole) if part is not None]
        self._note_came([bool(parts) or (second and self.came[0])])
        rows = (parts[0] + parts[1]).coalesce() if len(parts) > 1 else parts[0] if parts else no_rows(whole, self.dtype)
        self.nbytes = size_of(rows)
        return rows

    def _dense(self, i: int, gradient: Tensor) -> Tensor:
        """A gradient that may have come sparse, as a dense bucket takes it."""
        if gradient.is_sparse and self.flat.is_replicated and not self.flat.is_sparse:
            raise ShardingError(
                f"the gradient of {self.flat.places[i].names[0]!r} in unit {self.name!r} is sparse, and nothing said so when it "
                "was wrapped: set `sparse` of its nn.Embedding or nn.EmbeddingBag before wrapping, or compute a dense gradient."
            )
        return dense(gradient)

    def show_to_hooks(self, used: Sequence[bool]) -> None:
        """Run the hooks that the user has set on shard parameters (`p.register_hook`) on their reduced gradients.

        Raises:
            ShardingError: a hook returned something that cannot take the place of the gradient.
        """
        if self.pending is None:
            return
        flat = self.flat
        for i, _, shape in flat.held:
            hooks = flat.shard_parameters[i]._backward_hooks
            # one is ours
            if hooks is None or len(hooks) < 2 or not used[i]:
                continue
            part = flat.parts[i]
            sparse, size = self.pending.is_sparse, size_of(self.pending)
            view = self.pending if sparse else self.pending[part.offset : part.offset + part.numel].view(shape)
            for hook in list(hooks.values()):
                changed = None if isinstance(hook, RefusedUse) else hook(view)
                if changed is None:
                    continue
                if not isinstance(changed, Tensor) or changed.shape != view.shape:
                    raise ShardingError(
                        f"a hook on parameter {flat.places[i].names[0]!r} must return None or a tensor of shape "
                        f"{tuple(view.shape)}, this rank's part of the gradient; it returned "
                        f"{tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__}."
                    )
                if sparse:
                    view = as_rows(changed).to(view.dtype)
                else:
                    view.copy_(changed)
            if sparse:
                # of more rows, or fewer
                self._ledger.add("reduced", size_of(view) - size)
                self.pending = view

    def put(self, reduced: Tensor, used: Sequence[bool]) -> list[nn.Parameter]:
        """Set or accumulate one reduced shard (C,) into `.grad` of the shard parameters.

        A parameter of which this rank holds nothing keeps `.grad` None: optimizers pass it by. Returns those whose
        post-accumulate hooks are to be run.
        """
        hooked = []
        self.launched = False
        flat = self.flat
        gradients = self._gradients_in(reduced)
        targets, sums = [], []
        for (i, _, _), gradient in zip(flat.held, gradients, strict=True):
            parameter = flat.shard_parameters[i]
            if not used[i] or not (parameter.requires_grad or self.owed):
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
        self.owed = False
        return hooked

    def _gradients_in(self, reduced: Tensor) -> Sequence[Tensor]:
        """Of each parameter this rank holds something of, in the shape it has here."""
        flat = self.flat
        filled, self.filled = self.filled, None
        if reduced.is_sparse:
            return (reduced,)
        if filled is not None and filled[0].data_ptr() == reduced.data_ptr():
            return [filled[1][i] for i, _, _ in flat.held]  # it was reduced where it was filled
        parts = torch.split_with_sizes(reduced, flat.segments)
        return [parts[segment].view(shape) for _, segment, shape in flat.held]


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
