"""The sum over ranks that process groups and the simulated world share: the same input gives the same bits."""

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 2**15
"""Elements of each rank that are summed together on the host. A block stays in the cache until it is summed."""


def pairwise_sum(parts: Tensor, into: Tensor) -> None:
    """Sum `parts` (W, C) over the ranks into `into` (C,). Overwrites `parts`.

    Neighbours are added in pairs until one is left, in log2(W) operations. Every element is summed in the same order wherever
    it lies, while the order of `torch.sum` depends on the position. Sums of blocks of 2, 4, 8 ... neighbours, summed again,
    have the same bits as one sum over all of them. Half precision is summed in fp32 and rounded once.
    """
    count, chunk = parts.shape
    if count > 2 and chunk > BLOCK and parts.device.type == "cpu":
        for begin in range(0, chunk, BLOCK):
            pairwise_sum(parts[:, begin : begin + BLOCK], into[begin : begin + BLOCK])
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
    """Sum the chunks of two ranks, (C,) each, in either order. Has the bits of `pairwise_sum`."""
    if one.is_floating_point() and one.dtype.itemsize < 4:
        one, other = one.float(), other.float()
    if one.dtype == into.dtype:
        torch.add(one, other, out=into)
    else:
        into.copy_(one + other)
