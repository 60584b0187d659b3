"""The one sum over ranks that both worlds use where the sum is ours: same input, same bits."""

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 2**15
"""Elements of each rank that are summed together on the host, so that what is added again is still in the cache."""


def sum_over_ranks(parts: Tensor, into: Tensor) -> None:
    """Sum `parts` (W, C), which is used up, over the ranks into `into` (C,).

    Neighbours are added in pairs until one is left: every element is summed in the same order wherever
    it lies (`torch.sum` chooses by position), in log2(W) operations. Sums of blocks of 2, 4, 8 ...
    neighbours, summed again, give the same bits as one sum over all of them. Half precision is summed in
    fp32 and rounded once.
    """
    count, chunk = parts.shape
    if count > 2 and chunk > BLOCK and parts.device.type == "cpu":
        for begin in range(0, chunk, BLOCK):
            sum_over_ranks(parts[:, begin : begin + BLOCK], into[begin : begin + BLOCK])
        return
    if parts.is_floating_point() and parts.dtype.itemsize < 4:
        parts = parts.float()
    while count > 2 and count % 2 == 0:
        count //= 2
        parts, others = parts.view(count, 2, chunk).unbind(1)
        parts.add_(others)
    while count > 2:
        paired = count // 2 * 2
        parts[0:paired:2].add_(parts[1:paired:2])
        parts = parts[::2]
        count = (count + 1) // 2
    if count == 2:
        one, other = parts.unbind()
        sum_of_two(one, other, into)
    else:
        into.copy_(parts[0])


def sum_of_two(one: Tensor, other: Tensor, into: Tensor) -> None:
    """Those of two ranks, in either order, (C,) each: the bits of `sum_over_ranks`."""
    if one.is_floating_point() and one.dtype.itemsize < 4:
        one, other = one.float(), other.float()
    if one.dtype == into.dtype:
        torch.add(one, other, out=into)
    else:
        into.copy_(one + other)
