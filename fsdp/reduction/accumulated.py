"""A gradient accumulated under `no_sync`, and how the user zeroes it.

[Note: gradients accumulated under no_sync]
They are unsharded, and no parameter of the user shows them. `zero_grad()` reaches sharded parameters only. So when a gradient is
accumulated, its sharded parameter must have a `.grad` that can be zeroed: the one it has, or else this rank's part of the
accumulated gradient. If that `.grad` is removed or zero at the next use, the accumulated gradient is dropped too.
"""

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp.errors import ShardingError
from fsdp.shards.dtensors import GradForm, here_of
from fsdp.shards.refusals import refuse_unreduced
from fsdp.shards.shard_parameter import hooks_of
from fsdp.shards.shard_tensor import ShardTensor, local_operators, make_shard, plain

aten = torch.ops.aten
_DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]
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


@cache
def _unreduced(kind: type[Tensor]) -> type[Tensor]:
    """The class of such a gradient where shards are of the class `kind`, ordinary tensors or DTensors.

    torch counts changes of these in place, but not those through `.data`, which are refused.
    """
    # without slots of its own it can take the place of the class of an object, also of a DTensor
    return type(f"Unreduced{kind.__name__}", (kind,), {"__slots__": (), "__torch_function__": classmethod(_refuse_data)})


def _refuse_data(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    if func == _DATA:  # Python makes another object of it at each use
        raise ShardingError(
            "`.data` of a gradient that is kept under no_sync: a change through it would not reach what is kept. Scale or clip "
            "gradients after the backward that synchronises; this rank's part can be read by `.detach()`."
        )
    if func == Tensor.__deepcopy__:
        raise ShardingError(
            "copy.deepcopy of a gradient that is kept under no_sync, or of its parameter: it is this rank's part alone, before "
            "the average. Copy after the backward that synchronises, or set `.grad` to None."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


class AccumulatedGrad:
    """An unsharded gradient accumulated under `no_sync`, and the `.grad` of its sharded parameter at that time."""

    __slots__ = ("_hooks", "_is_complete", "_kind", "_shard_grad", "_version", "form", "owns_shard_grad", "unsharded")

    def __init__(self, unsharded: Tensor, form: GradForm, param: nn.Parameter, part: Tensor, is_complete: bool) -> None:
        self.unsharded = unsharded
        self.form = form
        """Whether it is a term of a sum over the ranks of tensor parallelism, which is not taken yet."""
        self.owns_shard_grad = param.grad is None
        """True if `.grad` of the sharded parameter is this rank's part of the accumulated gradient, set here."""
        if param.grad is None:
            param.grad = part
        assert param.grad is not None
        self._shard_grad, self._kind = param.grad, type(param.grad)
        self._is_complete = is_complete and self.owns_shard_grad
        """Whether `.grad` is all of the accumulated gradient, in its memory. Then the user may change it, as in torch's DDP."""
        if not self._is_complete:
            self._shard_grad.__class__ = UnreducedGrad if self._kind is ShardTensor else _unreduced(self._kind)
        self._version = param.grad._version
        self._hooks = hooks_of(param)

    def is_zeroed(self, param: nn.Parameter, name: str) -> bool:
        """Whether the user has zeroed the gradients since.

        Raises:
            ShardingError: they were changed in another way, which cannot reach the accumulated gradient; or a hook was set or
                removed, which would run for gradients of before, or would not.
        """
        if param.grad is None:
            return True
        # a post-accumulate hook that is set now runs once in plain torch, too
        if (hooks_of(param) ^ self._hooks).difference(param._post_accumulate_grad_hooks or ()):
            raise ShardingError(
                f"a hook of {name!r} was set or removed while gradients are kept under no_sync: hooks run once, for the sum of "
                "the micro-batches. Set and remove them before the first micro-batch, or after the backward that synchronises."
            )
        if param.grad is not self._shard_grad:
            raise ShardingError(
                f"the gradient of {name!r} was replaced while gradients are kept under no_sync; scale or replace it after "
                "the backward that synchronises."
            )
        if self._shard_grad._version == self._version:
            return False
        values = self._shard_grad._values() if self._shard_grad.is_sparse else plain(self._shard_grad)
        is_zero = not values.numel() or not bool(values.any())
        if not is_zero and not self._is_complete:
            raise ShardingError(
                f"the gradient of {name!r} was edited while gradients are kept under no_sync; scale or clip after "
                "the backward that synchronises."
            )
        return is_zero

    def show(self, part: Tensor) -> None:
        """Let `.grad`, if it was set here, be this rank's part of what is accumulated by now."""
        if self.owns_shard_grad and not self._is_complete:
            with local_operators():
                shown = here_of(self._shard_grad)  # not detached: a sparse tensor would be another one then
                shown.copy_(part, non_blocking=shown.is_pinned())
            self._version = self._shard_grad._version

    def end(self) -> None:
        """The accumulated gradient is reduced or dropped: what the shard shows is the reduced gradient again."""
        self._shard_grad.__class__ = self._kind
