"""Which operators a shard knows, and how each is computed. An operator that is not here is refused by name.

Rule 1: ELEMENT_WISE computes on this rank's part alone. Each element of the result depends on the same element of the operands.
Rule 2: an operator that mixes elements is computed over all ranks (norms_and_sums.py), or refused.
Rule 3: an operator that draws random numbers is refused: each rank would draw others than a single process.
"""

from enum import Enum, auto
from functools import cache
from typing import Any, Final

import torch

from fsdp.shards.norms_and_sums import REDUCTIONS


class Rule(Enum):
    """How an operator on shards is computed."""

    ELEMENT_WISE = auto()
    """On this rank's part. The result is a shard with the same cut."""
    ELEMENT_WISE_LISTS = auto()
    """As ELEMENT_WISE, on each tensor of the lists."""
    LIKE = auto()
    """A new shard with the same cut, of the given dtype and device; or a question about the memory of this rank's part."""
    SAME_SIZE = auto()
    """A view. It is a shard if the shape stays the same or all elements lie in a row, and refused otherwise."""
    MASKED_FILL = auto()
    """An assignment to the elements that a mask of the same shape selects, `x[mask] = number`. Refused otherwise."""
    NEW = auto()
    """A new tensor. It is a shard if it has the shape of this rank's part, and an ordinary tensor otherwise."""
    REDUCTION = auto()
    """Over all elements of all ranks, by one collective."""
    COMPOSITE = auto()
    """As the operators of which torch makes it. In inference mode alone, torch leaves that to the shard."""
    REFUSED = auto()
    """An error that names the operator."""


_ELEMENT_WISE: Final = {
    *("alias", "detach", "detach_", "clone", "_to_copy", "copy_", "fill", "fill_", "zero", "zero_", "lift_fresh"),
    *("masked_fill", "where", "real", "imag", "_conj", "contiguous"),
}
"""Operators that work element by element, and have no tag of torch that says so."""
_OF_ONE_OVERLOAD: Final = ("max", "min")
"""Operators that are reductions by their overload `default` alone."""
_REDUCTIONS: Final = (
    *[name for name in REDUCTIONS if name not in _OF_ONE_OVERLOAD],
    *("equal", "allclose", "dot", "vdot", "_amp_foreach_non_finite_check_and_unscale_"),
)
_BY_SIZE: Final = {
    *("diff", "gradient", "linalg_matrix_rank", "linalg_vander", "nanquantile", "quantile", "scaled_dot_product_attention"),
    *("trapezoid", "trapz", "vander"),
    *("_shape_as_tensor", "numel", "size", "stride", "sym_numel", "sym_size", "sym_stride"),
}
"""Operators of torch that decide by the size of this rank's part before they call others, or return it."""
_QUERIES: Final = ("is_pinned", "record_stream", "_pin_memory", "is_same_size", "_has_compatible_shallow_copy_type", "pin_memory")
_BY_NAME: Final = {
    **dict.fromkeys(_REDUCTIONS, Rule.REDUCTION),
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "full_like", *_QUERIES), Rule.LIKE),
    **dict.fromkeys(("view", "_unsafe_view", "expand", "_reshape_alias"), Rule.SAME_SIZE),
    **dict.fromkeys(("index_put", "index_put_"), Rule.MASKED_FILL),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"), Rule.NEW),
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), Rule.ELEMENT_WISE_LISTS),
    **dict.fromkeys(("_foreach_copy", "_foreach_copy_", "_foreach_zero", "_foreach_zero_"), Rule.ELEMENT_WISE_LISTS),
    **dict.fromkeys(_ELEMENT_WISE, Rule.ELEMENT_WISE),
}
"""The rules of operators that have one by their name alone."""


@cache
def rule_of(func: Any) -> Rule:
    """The rule of one overload of an operator."""
    if getattr(func, "namespace", "") != "aten":
        return Rule.REFUSED
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Rule.REFUSED
    if outputs_of(func):
        return Rule.ELEMENT_WISE if name in _ELEMENT_WISE or torch.Tag.pointwise in func.tags else Rule.REFUSED
    if name in _BY_NAME and func is not torch.ops.aten.where.default:  # which gives the indices of what is not zero
        return _BY_NAME[name]
    if name in _OF_ONE_OVERLOAD and overload == "default":
        return Rule.REDUCTION
    if _is_pointwise(func, name):
        return Rule.ELEMENT_WISE_LISTS if name.startswith("_foreach_") else Rule.ELEMENT_WISE
    return Rule.COMPOSITE if func._can_decompose() and name not in _BY_SIZE else Rule.REFUSED


@cache
def outputs_of(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an operator writes its result into, such as `out`."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


def _is_pointwise(func: Any, name: str) -> bool:
    """Whether torch says that an operator works element by element. Of lists and of some in-place forms it does not."""
    plain = name.removeprefix("_foreach_").removesuffix("_")
    functional = None if plain == name or plain in _OF_ONE_OVERLOAD else getattr(torch.ops.aten, plain, None)
    overloads = [] if functional is None else [getattr(functional, overload) for overload in functional.overloads()]
    return any(torch.Tag.pointwise in one.tags for one in (func, *overloads))
