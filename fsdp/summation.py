"""The one sum over ranks that both worlds use where the sum is ours: same input, same bits."""

import torch
from torch import Tensor


def sum_over_ranks(parts: Tensor, into: Tensor) -> None:
    """Sum `parts` (W, C), which is used up, over the ranks into `into` (C,).

    Neighbours are added in pairs until one is left: every element is summed in the same order wherever
    it lies (`torch.sum` chooses by position), in log2(W) operations. Sums of blocks of 2, 4, 8 ...
    neighbours, summed again, give the same bits as one sum over all of them. Half precision is summed in
    fp32 and rounded once.
    """
    if parts.is_floating_point() and parts.dtype.itemsize < 4:
        parts = parts.float()
    count, chunk = parts.shape
    while count > 2 and count % 2 == 0:
        count //= 2
        parts, others = parts.view(count, 2, chunk).unbind(1)
        parts.add_(others)
    while count > 2:
        paired = count // 2 * 2
        parts[0:paired:2].add_(parts[1:paired:2])
        parts = parts[::2]
        count = (count + 1) // 2
    first, *second = parts.unbind()
    if second and parts.dtype == into.dtype:
        torch.add(first, *second, out=into)
    else:
        into.copy_(first + second[0] if second else first)
