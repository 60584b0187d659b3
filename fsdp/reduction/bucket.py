"""One bucket: the gradients of a flat buffer, from unsharded `.grad` to reduced `.grad` of the sharded parameters.

Rule 1: the attributes of a bucket are written in its class alone. What may happen to it next: `state_machine.bucket`.
"""

from collections.abc import Hashable, Sequence
from itertools import chain, repeat
from operator import and_, attrgetter, is_, is_not, or_
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.device.storage import MemoryTracker, ResizableStorage, ReusableBuffer, size_of
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.gathered_copies import RefuseShardGrad
from fsdp.params.shown_params import grad_of
from fsdp.params.unit import Unit
from fsdp.reduction.accumulated import AccumulatedGrad
from fsdp.reduction.sparse import dense
from fsdp.shards.dtensors import SUMMED, GradForm
from fsdp.shards.shard_tensor import plain, quick_attributes

_GRAD: Final = attrgetter("grad")
_DTYPE: Final = attrgetter("dtype")
_IS_SPARSE: Final = attrgetter("is_sparse")


class Bucket:
    """The gradients of one flat buffer: a buffer to reduce them from, and the reduced shard."""

    def __init__(
        self, number: int, flat: FlatBuffer, index: int, unit: Unit, dtype: torch.dtype, stays: bool, tracker: MemoryTracker
    ) -> None:
        self.number = number
        """Its place among the buckets of its root."""
        self.flat = flat
        self.unit = index
        """The number of its unit."""
        self.owner = unit
        self.name = unit.name
        """The name of its unit."""
        self._tracker = tracker
        self._grad_dtype = flat.unsharded.dtype
        self.buffer = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
        """The unsharded gradients, in the dtype of the reduction."""
        self.views = flat.wire.views_of(self.buffer)
        """The parts of the gradient of each parameter in the buffer."""
        self._parts = [*chain.from_iterable(self.views)]
        self._alternative: tuple[Tensor, Sequence[Tensor]] | None = None
        """The buffer that was filled in place of `buffer` and may become `.grad`, with its views."""
        self.memory = ResizableStorage(self.buffer, "bucket", stays)
        self.spare = ReusableBuffer()
        """Memory for gradients that are reduced where they were filled, and become `.grad`."""
        self.nbytes = size_of(self.buffer)
        """Bytes of the gradients of one launch; a sparse bucket counts the rows of its last one."""
        self.reduced: Tensor | None = None
        """The reduced shard (C,) of this backward: the average, with that of a remainder added."""
        self.accumulated: dict[int, AccumulatedGrad] = {}
        """The gradients accumulated under `no_sync`. The key is the number of the parameter in the bucket."""
        self.expects_accumulated = False
        """True if some rank may have accumulated gradients of this bucket, also if it was frozen since."""
        self.all_used = [True] * len(self.views)
        self.hooked = -1
        """The parameter whose tensor hooks run, or ran last in this backward."""
        self.local_used = self.all_used
        """For each parameter, whether it had a gradient on this rank in this backward."""
        self.all_local_used = True
        """True if every trainable parameter had a gradient on this rank in this backward."""
        self._flags_at_begin = flat.requires_grad_flags
        """`requires_grad` of each parameter when this backward began."""

    @property
    def is_trained(self) -> bool:
        """Whether there is anything to reduce: some parameter is trainable, or was when gradients were accumulated."""
        return self.expects_accumulated or any(self.flat.requires_grad_flags)

    def begin(self) -> bool:
        """A backward begins. Return whether there is anything to reduce."""
        self._flags_at_begin = self.flat.requires_grad_flags
        self.local_used, self.hooked = [False] * len(self.views), -1
        return self.is_trained

    def has_come(self, i: int) -> bool:
        """Whether a parameter has a gradient of this backward on this rank, which is not in `.grad` yet."""
        return grad_of(self.flat.unsharded_params[i]) is not None or self.local_used[i]

    @property
    def group_key(self) -> Hashable:
        """Buckets with equal keys can share a collective."""
        return self.flat.comms, self.buffer.dtype, self.flat.shard.dtype, self.flat.home, self.owner.settings.divide_factors

    def missing_params(self, used: Sequence[bool]) -> list[str]:
        """The names of trainable parameters without a gradient."""
        flat = self.flat
        return [
            info.names[0]
            for info, has_grad, trainable in zip(flat.param_infos, used, flat.requires_grad_flags, strict=True)
            if trainable and not has_grad
        ]

    def skip(self) -> None:
        """The bucket is frozen, so no gradient of it is missing in this backward."""
        self.local_used, self.all_local_used = self.all_used, True

    def clear_unsharded_grads(self) -> None:
        """Drop the gradients of this rank that are not reduced yet. Those accumulated under `no_sync` stay."""
        for unsharded in self.flat.unsharded_params:
            unsharded.grad = None

    def drop(self) -> None:
        """Drop the gradients of this backward, reduced or not. Those accumulated under `no_sync` stay."""
        self._alternative = None
        if self.reduced is not None:
            self._tracker.add("reduced", -self.flat.home.device_bytes(self.reduced))
            self.reduced = None
        self.clear_unsharded_grads()

    # accumulated under no_sync ------------------------------------------------------------

    def expect_accumulated(self) -> None:
        """A backward under `no_sync` begins: some rank may accumulate gradients of this bucket."""
        self.expects_accumulated = self.expects_accumulated or any(self.flat.requires_grad_flags)

    def accumulate_all(self) -> None:
        """Add the unsharded gradients of this backward to the accumulated ones."""
        self.flat.refuse_grads_of_other_dtype([unsharded.grad for unsharded in self.flat.unsharded_params])
        for i, unsharded in enumerate(self.flat.unsharded_params):
            if unsharded.grad is not None:
                gradient, unsharded.grad = unsharded.grad, None
                self._accumulate(i, *self.flat.placements[i].local_grad(gradient, self._accumulated_form(i)))

    def drop_zeroed(self) -> None:
        """Drop accumulated gradients that the user has zeroed since."""
        flat = self.flat
        zeroed = [i for i, one in self.accumulated.items() if one.is_zeroed(flat.sharded_params[i], flat.param_infos[i].names[0])]
        for i in zeroed:
            self._drop_accumulated(i)

    def drop_all_accumulated(self) -> None:
        """Drop all accumulated gradients, and `.grad` of the sharded parameters that show nothing else."""
        for i, accumulated in list(self.accumulated.items()):
            self._drop_accumulated(i)
            if accumulated.owns_shard_grad:
                self.flat.sharded_params[i].grad = None

    def shard_grads(self) -> list[Tensor | None]:
        """`.grad` of each sharded parameter; None if it only shows what was accumulated under `no_sync`."""
        shown = {i for i, one in self.accumulated.items() if one.owns_shard_grad}
        with quick_attributes():
            return [None if i in shown else grad_of(p) for i, p in enumerate(self.flat.sharded_params)]

    def _accumulated_form(self, i: int) -> GradForm | None:
        return self.accumulated[i].form if i in self.accumulated else None

    def _accumulate(self, i: int, gradient: Tensor, form: GradForm) -> None:
        gradient = self._to_accumulate(i, gradient)
        accumulated = self.accumulated.get(i)
        if accumulated is not None:
            self._tracker.add("kept", -size_of(accumulated.unsharded))
            accumulated.unsharded.add_(gradient)
            self._tracker.add("kept", size_of(accumulated.unsharded))
            accumulated.show(self._local_part(i, accumulated.unsharded))
            return
        param, gradient = self.flat.sharded_params[i], gradient.to(self.buffer.dtype)
        # `.data` has a count of changes of its own: what autograd accumulates is no change by the user
        local, home = self._local_part(i, gradient.data), self.flat.home
        is_complete = self.flat.num_shards == 1 and form is SUMMED and local.dtype is param.dtype
        is_complete = is_complete and not (local.is_sparse or home.copies)
        local = home.bring(local.to(param.dtype, copy=not is_complete))
        part = self.flat.placements[i].as_shard(local)
        self.accumulated[i] = AccumulatedGrad(gradient, form, param, part, is_complete)
        self._tracker.add("kept", size_of(gradient))

    def _drop_accumulated(self, i: int) -> AccumulatedGrad | None:
        accumulated = self.accumulated.pop(i, None)
        if accumulated is not None:
            accumulated.end()
            self._tracker.add("kept", -size_of(accumulated.unsharded))
        return accumulated

    # filling ------------------------------------------------------------------------------

    def collect_used(self, launched: bool) -> Sequence[bool]:
        """At the end of a backward: record which parameters had a gradient; return which have one that was not launched."""
        here = [*map(is_not, map(_GRAD, self.flat.unsharded_params), repeat(None))]
        if launched and True not in here:
            return here
        before = self.local_used if launched else [i in self.accumulated for i in range(len(here))]
        self._set_used([*map(or_, here, before)])
        return here if launched else self.local_used

    def _set_used(self, used: list[bool]) -> None:
        self.local_used = used
        requires_grad_flags = self.flat.requires_grad_flags
        # another rank may have accumulated a gradient of a parameter that is frozen now, or got one before it was frozen
        known = requires_grad_flags == self._flags_at_begin and (not self.expects_accumulated or all(requires_grad_flags))
        self.all_local_used = known and all(
            [has_grad or not trainable for has_grad, trainable in zip(used, requires_grad_flags, strict=True)]
        )

    def fill(self, remainder: bool, buffer: Tensor | None = None, divisor: float = 1) -> None:
        """Move the unsharded gradients into the bucket, or into another buffer of its shape.

        Accumulated gradients are added, except to a `remainder`: the first launch of this backward had them.

        Raises:
            ShardingError: a gradient is sparse, and no module said so.
        """
        flat = self.flat
        views, parts, into = self.views, self._parts, self.buffer
        if buffer is not None:
            views, into = flat.wire.views_of(buffer), buffer
            parts = [*chain.from_iterable(views)]
            if buffer.dtype is flat.shard.dtype and not flat.home.copies:
                # otherwise the reduced shard is converted or copied
                self._alternative = buffer, parts
        gradients = [*map(_GRAD, flat.unsharded_params)]
        terms = self._take_local(gradients, remainder, views) if flat.tensor_parallel else {}
        for unsharded in flat.unsharded_params:
            unsharded.grad = None
        if (
            not self.accumulated
            and not self.expects_accumulated
            and not any(map(is_, gradients, repeat(None)))
            and set(map(_DTYPE, gradients)) == {self._grad_dtype}
            and not any(map(_IS_SPARSE, gradients))
        ):
            self.local_used, self.all_local_used = self.all_used, True
            flat.wire.fill(into, parts, gradients, divisor)
            for form, of_form in terms.items():
                form.add_up(of_form)
            return
        flat.refuse_grads_of_other_dtype(gradients)
        used_before = self.local_used if remainder else [False] * len(views)
        used = []
        for i, (places, gradient) in enumerate(zip(views, gradients, strict=True)):
            summands = [flat.wire.parts_of(i, self._to_dense(i, one)) for one in self._summands(i, gradient, remainder)]
            used.append(used_before[i] or bool(summands))
            for number, view in enumerate(places):
                if summands:
                    view.copy_(summands[0][number])
                else:
                    view.zero_()
                for summand in summands[1:]:
                    view.add_(summand[number])
        if divisor != 1:
            into.div_(divisor)
        for form, of_form in terms.items():
            form.add_up(of_form)
        self._set_used(used)

    def _summands(self, i: int, gradient: Tensor | None, remainder: bool) -> list[Tensor]:
        """What adds up to the gradient of a parameter: what is accumulated, except for a `remainder`, and `gradient`."""
        accumulated = [] if remainder or i not in self.accumulated else [self.accumulated[i].unsharded]
        return accumulated if gradient is None else [*accumulated, gradient]

    def _take_local(
        self, gradients: list[Any], remainder: bool, views: Sequence[Sequence[Tensor]]
    ) -> dict[GradForm, list[Tensor]]:
        """Replace DTensors among the gradients by this rank's parts.

        Returns those of the views in which terms will be that the ranks of tensor parallelism must add up, by their form.
        """
        terms: dict[GradForm, list[Tensor]] = {}
        for i in self.flat.tensor_parallel:
            form = None if remainder else self._accumulated_form(i)
            if gradients[i] is not None:
                gradients[i], form = self.flat.placements[i].local_grad(gradients[i], form)
            if form is not None and form is not SUMMED:
                terms.setdefault(form, []).extend(views[i])
        return terms

    # the reduced shard --------------------------------------------------------------------

    def add_reduced(self, chunk: Tensor) -> None:
        """Take the reduced shard of a finished reduction, which the tracker counts; that of a remainder is added to the first."""
        if self.reduced is None:
            self.reduced = chunk
            return
        self._tracker.add("reduced", -self.flat.home.device_bytes(chunk) - self.flat.home.device_bytes(self.reduced))
        self.reduced.add_(chunk)
        self._tracker.add("reduced", self.flat.home.device_bytes(self.reduced))

    def run_grad_hooks(self, used: Sequence[bool]) -> None:
        """Run the user's hooks on sharded parameters (`p.register_hook`) on their reduced gradients.

        Raises:
            ShardingError: a hook returned something that cannot replace the gradient, or has set `grad_dtype`.
        """
        if self.reduced is None:
            return
        flat = self.flat
        # also where this rank holds no element: a hook may take a norm, which is a collective
        for i, hooks in enumerate([parameter._backward_hooks for parameter in flat.sharded_params]):
            flat.refuse_removed_hook(i)
            if hooks is None or len(hooks) < 2 or not used[i]:
                continue
            view, self.hooked = self._reduced_view(i, self.reduced), i
            for hook in list(hooks.values()):
                changed = None if isinstance(hook, RefuseShardGrad) else hook(flat.placements[i].as_shard(view))
                if changed is None:
                    continue
                if not isinstance(changed, Tensor) or plain(changed).shape != view.shape:
                    raise ShardingError(
                        f"a hook on parameter {flat.param_infos[i].names[0]!r} must return None or a tensor of shape "
                        f"{tuple(view.shape)}, this rank's part of the gradient; it returned "
                        f"{tuple(plain(changed).shape) if isinstance(changed, Tensor) else type(changed).__name__}."
                    )
                view = self._replace_reduced(view, plain(changed))
        flat.refuse_grad_dtypes()

    def put(self, used: Sequence[bool], may_be_hooked: bool) -> list[nn.Parameter]:
        """Set `.grad` of the sharded parameters to the reduced gradients, or add to it; return those with post-accumulate hooks.

        `may_be_hooked`: whether some parameter may have a hook of the user.
        A parameter of which this rank holds no element gets a `.grad` without elements: `.grad` exists on all ranks alike.
        """
        reduced, self.reduced = self.reduced, None
        assert reduced is not None
        self._tracker.add("reduced", -self.flat.home.device_bytes(reduced))
        flat = self.flat
        gradients = self._shard_grads(reduced)
        targets, summands = [], []
        flags, at_begin = flat.requires_grad_flags, self._flags_at_begin
        # one that was frozen all the time has no gradient here, also if it has one on another rank
        takes = (
            used if self.expects_accumulated else [*map(and_, used, flags if flags is at_begin else map(or_, flags, at_begin))]
        )
        with quick_attributes():
            for i, gradient in zip(flat.local_params, gradients, strict=True):
                if not takes[i]:
                    continue
                param = flat.sharded_params[i]
                before = param.grad
                accumulated = self._drop_accumulated(i) if self.accumulated else None
                if before is None or (accumulated is not None and accumulated.owns_shard_grad):
                    param.grad = flat.placements[i].as_shard(gradient)
                elif before.is_sparse or gradient.is_sparse:
                    before.add_(gradient)
                else:
                    targets.append(before)
                    summands.append(gradient)
        if targets:
            torch._foreach_add_([plain(target) for target in targets], summands)
        # the rest belongs to parameters of which this rank holds no element
        self.drop_all_accumulated()
        with quick_attributes():
            dtype = flat.shard.dtype
            for i, param, gradient in flat.empty_shards:
                if takes[i]:
                    # a conversion of the model, undone since, has converted it as well
                    param.grad = gradient if gradient.dtype is dtype else gradient.to(dtype)
        self.expects_accumulated = False
        if not may_be_hooked:
            return []
        # in one order on all ranks, because a hook may call a collective
        order = sorted([*flat.local_params, *(i for i, _, _ in flat.empty_shards)])
        return [p for i in order if takes[i] and (p := flat.sharded_params[i])._post_accumulate_grad_hooks]

    # what a sparse bucket does in another way ---------------------------------------------

    def _to_dense(self, i: int, gradient: Tensor) -> Tensor:
        if gradient.is_sparse and self.flat.is_replicated:
            raise ShardingError(
                f"the gradient of {self.flat.param_infos[i].names[0]!r} in unit {self.name!r} is sparse, and nothing "
                "said so when it was wrapped: set `sparse` of its nn.Embedding or nn.EmbeddingBag before wrapping, or compute a "
                "dense gradient."
            )
        return dense(gradient)

    def _to_accumulate(self, i: int, gradient: Tensor) -> Tensor:
        """A gradient in the form in which it is accumulated, which may have another dtype: it is rounded once, as a sum."""
        return self._to_dense(i, gradient)

    def _local_part(self, i: int, gradient: Tensor) -> Tensor:
        """This rank's part of an unsharded gradient."""
        return self.flat.placements[i].local_part(gradient)

    def _reduced_view(self, i: int, reduced: Tensor) -> Tensor:
        """The gradient of one parameter in the reduced shard."""
        return self.flat.shard_view(i, reduced)

    def _replace_reduced(self, view: Tensor, changed: Tensor) -> Tensor:
        """Replace a view of the reduced shard by what a hook returned; return the view for the next hook."""
        return view.copy_(changed)

    def _shard_grads(self, reduced: Tensor) -> Sequence[Tensor]:
        """The gradient of each parameter of which this rank holds an element, in the shape of its param shard."""
        flat = self.flat
        alternative, self._alternative = self._alternative, None
        if alternative is not None and alternative[0].data_ptr() == reduced.data_ptr():
            return [alternative[1][i] for i in flat.local_params]  # it was reduced where it was filled
        return flat.local_cutter.views_of(reduced)
