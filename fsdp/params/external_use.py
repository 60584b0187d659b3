"""A parameter used outside the forward of its unit: in full, or this rank's part.

The gradient of either goes to the whole parameter, like any other, so it is kept, reduced and
committed like any other. A shard itself takes no gradient: what autograd would give it is right for
elementwise operations alone, and nobody can tell those from others.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.layout import Part
from fsdp.params.module_params import Owner, owner_of


def full_tensor(parameter: nn.Parameter) -> Tensor:
    """The full value of a parameter, outside the forward of its unit. Differentiable, in the parameter's own dtype.

    Use it in any loss term on the weights: a norm, an orthogonality penalty, a comparison of two layers.
    Its gradient is averaged over the ranks like every other. Communicates (one gather of the unit), in
    the forward only; every rank must call it alike. Memory: the full parameter, for as long as the graph lives.

    Raises:
        ShardingError: `parameter` is not sharded.
    """
    return _known_owner(parameter, "full_tensor").full_value(parameter)


def to_local(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter, for loss terms that are sums over its elements: sum(p ** 2), sum(|p|). Differentiable.

    Sum such terms over the parameters and add them to each rank's loss: every element is penalised once,
    by the rank that holds it. The value is this rank's share of the penalty. Anything that is not a sum
    over elements (a norm, a product of rows) needs `full_tensor`. Does not communicate.

    Raises:
        ShardingError: `parameter` is not sharded.
    """
    return _known_owner(parameter, "to_local").local_value(parameter)


def _known_owner(parameter: Tensor, asker: str) -> Owner:
    owner = owner_of(parameter)
    if owner is None:
        raise ShardingError(f"{asker}: this tensor of shape {tuple(parameter.shape)} is not a parameter of a sharded module.")
    return owner


class FullUse(torch.autograd.Function):
    """`value()`, as a function of the whole parameter."""

    @staticmethod
    def forward(ctx: Any, whole: nn.Parameter, value: Callable[[], Tensor], announce: Callable[[], None]) -> Tensor:
        ctx.announce = announce
        return value()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.announce()
        return gradient, None, None


class LocalUse(torch.autograd.Function):
    """This rank's part of the whole parameter.

    Shapes:   gradient of the part  ->  zeros of the whole shape with the part filled in, times W
    Why W:    gradients are averaged over the ranks, and this part has a gradient on this rank alone
    """

    @staticmethod
    def forward(
        ctx: Any, whole: nn.Parameter, shard: Tensor, part: Part, world_size: int, announce: Callable[[], None]
    ) -> Tensor:
        ctx.announce, ctx.part, ctx.world_size, ctx.shape = announce, part, world_size, whole.shape
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.announce()
        part = ctx.part
        full = gradient.new_zeros(ctx.shape)
        full.view(-1)[part.first : part.first + part.numel] = gradient.reshape(-1) * ctx.world_size
        return full, None, None, None, None


class RefusedUse:
    """The hook of a shard: refuses by name what autograd would accumulate into it."""

    __slots__ = ("_name", "_unit")

    def __init__(self, name: str, unit: str) -> None:
        self._name = name
        self._unit = unit

    def __call__(self, gradient: Tensor) -> NoReturn:
        raise ShardingError(
            f"parameter {self._name!r} was used outside its unit {self._unit!r}, where this rank holds only its part of it: "
            "compute with fsdp.full_tensor(parameter) there; in a sum over elements, such as a weight penalty, with "
            "fsdp.to_local(parameter)."
        )
