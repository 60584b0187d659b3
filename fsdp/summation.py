"""The one sum over ranks that both worlds use where the sum is ours: same input, same bits."""

import torch
from torch import Tensor


def sum_over_ranks(parts: Tensor, into: Tensor) -> None:
    """Sum `parts` (W, C), which is used up, over the ranks into `into` (C,).

    The upper half of the ranks is added to the lower until one is left: every element is summed in the
    same order wherever it lies (`torch.sum` chooses by position), in log2(W) operations. Half
    precision is summed in fp32 and rounded once.
    """
    if parts.is_floating_point() and parts.dtype.itemsize < 4:
        parts = parts.float()
    left = len(parts)
    while left > 2:
        folded = left // 2
        parts.narrow(0, 0, folded).add_(parts.narrow(0, left - folded, folded))
        left -= folded
    if left == 2 and parts.dtype == into.dtype:
        torch.add(parts[0], parts[1], out=into)
    else:
        into.copy_(parts[0] + parts[1] if left == 2 else parts[0])
