"""The gradient that a shard shows while gradients are kept under `no_sync`: a part of this rank's own gradient.

Each rank has another one. So whatever reads it, such as a step or a norm, would compute with another gradient on each rank.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp.shards.refusals import refuse_unreduced
from fsdp.shards.shard_tensor import ShardTensor, local_operators, make_shard, plain

aten = torch.ops.aten
_VIEWS: Final = {aten.detach.default, aten.alias.default}
_ZEROES: Final = {aten.zero_.default, aten._foreach_zero_.default, aten.detach_.default}
"""What `zero_grad` calls."""


class UnreducedGrad(ShardTensor):
    """A gradient that is kept under `no_sync`. It can be zeroed and removed; all other operators are refused."""

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
