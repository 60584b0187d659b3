"""Reductions over all elements of a sharded tensor: the part of this rank, and how the parts of all ranks are combined.

Each rank computes a few numbers from its part. One all-gather brings the numbers of all ranks together, and every rank
combines them in rank order, so every rank has the same bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.exchanges import gather_rows
from fsdp.errors import ShardingError
from fsdp.shards.info import ShardInfo


class Reduction(NamedTuple):
    """One reduction of one tensor."""

    part: Tensor
    """What this rank contributes: (k,), the same k and dtype on every rank."""
    combine: Callable[[Tensor], Tensor]
    """From the contributions of all ranks (W, k) to the result: ()."""


Arguments = Mapping[str, Any]
Local = Callable[[ShardInfo, Tensor, Arguments], Reduction]
"""From this rank's part of a tensor, and the arguments of the operator by name, to what this rank contributes."""


def gather_and_combine(reductions: Sequence[Reduction], infos: Sequence[ShardInfo], operation: str) -> list[Tensor]:
    """The result of each reduction, by one collective for all of them; by one for each group of ranks if there are several.

    Traffic: this rank receives (W - 1) * K bytes, where K is the size of all contributions of one rank.
    """
    results: dict[int, Tensor] = {}
    for comm in dict.fromkeys(info.comm for info in infos):
        indices = [index for index, info in enumerate(infos) if info.comm is comm]
        group = [reductions[index] for index in indices]
        everything = _gather(group, comm, f"{operation} of {infos[indices[0]].name}")
        results.update(zip(indices, (one.combine(parts) for one, parts in zip(group, everything, strict=True)), strict=True))
    return [results[index] for index in range(len(infos))]


def _gather(reductions: Sequence[Reduction], comm: Communicator, label: str) -> Iterator[Tensor]:
    """The contributions of all ranks to each reduction: (W, k)."""
    sizes = [-(-one.part.nbytes // 8) * 8 for one in reductions]  # so that each part begins where its dtype may lie
    mine = torch.zeros(sum(sizes), dtype=torch.uint8, device=reductions[0].part.device)
    for one, place in zip(reductions, mine.split_with_sizes(sizes), strict=True):
        place[: one.part.nbytes] = one.part.resolve_conj().resolve_neg().contiguous().view(torch.uint8).view(-1)
    for one, place in zip(reductions, gather_rows(comm, mine, label).split_with_sizes(sizes, dim=1), strict=True):
        yield place[:, : one.part.nbytes].contiguous().view(one.part.dtype)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are added."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _column(combine: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda parts: combine(parts[:, 0]).to(dtype)


def _refuse_exact(operation: str, info: ShardInfo, local: Tensor) -> NoReturn:
    raise ShardingError(f"{operation} of {info.name!r}: it is {local.dtype}; convert it to a floating-point dtype first.")


# one function for each reduction ------------------------------------------------------


def norm(info: ShardInfo, local: Tensor, given: Arguments) -> Reduction:
    """(sum |x|^p)^(1/p), the largest or smallest |x| for p = inf and -inf, the number of x != 0 for p = 0."""
    order = given.get("ord", given.get("p"))
    power = 2.0 if order is None else float(order)
    values = local.abs() if local.is_complex() else local
    dtype = given.get("dtype") or values.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        _refuse_exact("norm", info, local)
    if values.numel():
        part = torch.linalg.vector_norm(values, power, dtype=summing_dtype(dtype))
    else:
        part = torch.full((), math.inf if power < 0 else 0.0, dtype=summing_dtype(dtype), device=local.device)
    if power == 0:
        return Reduction(part.view(1), _column(torch.sum, dtype))
    return Reduction(part.view(1), _column(lambda parts: torch.linalg.vector_norm(parts, power), dtype))


def _fold(
    function: Callable[..., Tensor], combine: Callable[[Tensor], Tensor], info: ShardInfo, local: Tensor, given: Arguments
) -> Reduction:
    is_exact = not (local.is_floating_point() or local.is_complex())
    dtype = given.get("dtype") or (torch.int64 if is_exact else local.dtype)
    return Reduction(function(local, dtype=summing_dtype(dtype)).view(1), _column(combine, dtype))


def mean(info: ShardInfo, local: Tensor, given: Arguments) -> Reduction:
    """The sum of all elements, divided by their number."""
    if given.get("dtype") is None and not (local.is_floating_point() or local.is_complex()):
        _refuse_exact("mean", info, local)
    return _fold(torch.sum, lambda parts: parts.sum() / info.numel, info, local, given)


def _extreme(function: Callable[[Tensor], Tensor], info: ShardInfo, local: Tensor, given: Arguments) -> Reduction:
    if not info.numel:
        raise ShardingError(f"max or min of {info.name!r}: it has no elements, so there is none.")
    if not local.numel():
        least = _bounds(local.dtype)[function is torch.amin]
        local = torch.full((1,), least, dtype=local.dtype, device=local.device)
    return Reduction(function(local).view(1), _column(function, local.dtype))


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The lowest and the highest number of a dtype."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def count_nonzero(info: ShardInfo, local: Tensor, given: Arguments) -> Reduction:
    """The number of elements that are not zero."""
    return Reduction(torch.count_nonzero(local).view(1), _column(torch.sum, torch.int64))


def _logical(function: Callable[[Tensor], Tensor], info: ShardInfo, local: Tensor, given: Arguments) -> Reduction:
    dtype = torch.uint8 if local.dtype is torch.uint8 else torch.bool
    return Reduction(function(local != 0).view(1), _column(function, dtype))


def _variance(root: bool, info: ShardInfo, local: Tensor, given: Arguments) -> Reduction:
    correction = given.get("correction")
    if correction is None:
        correction = int(given.get("unbiased", True))
    if not local.is_floating_point():
        _refuse_exact("variance", info, local)
    values = local.to(torch.float64)
    count, mean = values.numel(), values.mean() if values.numel() else values.new_zeros(())
    part = torch.stack([values.new_tensor(float(count)), mean, ((values - mean) ** 2).sum()])

    def combine(parts: Tensor) -> Tensor:
        counts, means, squares = parts.unbind(1)
        overall = (counts * means).sum() / counts.sum()
        total = squares.sum() + (counts * (means - overall) ** 2).sum()
        variance = total / (counts.sum() - correction).clamp(min=0)
        return (variance.sqrt() if root else variance).to(local.dtype)

    return Reduction(part, combine)


def only_element(info: ShardInfo, local: Tensor) -> Reduction:
    """The one element of a tensor of one element."""
    if info.numel != 1:
        raise ShardingError(f"item: {info.name!r} has {info.numel} elements, so it is not one number. Reduce it first.")
    part = local.reshape(-1)[:1] if local.numel() else local.new_zeros(1)
    return Reduction(part, lambda parts: parts[:, 0].sum().to(local.dtype))


REDUCTIONS: dict[str, Local] = {
    **dict.fromkeys(("linalg_vector_norm", "norm", "_foreach_norm"), norm),
    "sum": partial(_fold, torch.sum, torch.sum),
    "nansum": partial(_fold, torch.nansum, torch.sum),
    "mean": mean,
    "prod": partial(_fold, torch.prod, torch.prod),
    **dict.fromkeys(("amax", "max", "_foreach_max"), partial(_extreme, torch.amax)),
    **dict.fromkeys(("amin", "min"), partial(_extreme, torch.amin)),
    **dict.fromkeys(("any", "_is_any_true"), partial(_logical, torch.any)),
    **dict.fromkeys(("all", "_is_all_true"), partial(_logical, torch.all)),
    "count_nonzero": count_nonzero,
    "var": partial(_variance, False),
    "std": partial(_variance, True),
}
"""The reductions of one tensor, by the name of the operator."""
