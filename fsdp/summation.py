"""The one sum over ranks that both worlds use where the sum is ours: same input, same bits."""

import torch
from torch import Tensor


def sum_over_ranks(parts: Tensor, into: Tensor) -> None:
    """Sum `parts` (W, C) over the ranks into `into` (C,); half precision is summed in fp32 and rounded once.

    One operation whatever W is. The order of the additions depends on the shape alone.
    """
    if parts.dtype.itemsize < 4 and parts.is_floating_point():
        into.copy_(torch.sum(parts, 0, dtype=torch.float32))
    elif len(parts) == 2:
        torch.add(parts[0], parts[1], out=into)
    else:
        torch.sum(parts, 0, out=into)
