"""Sparse gradients of whole parameters, as embeddings with sparse=True give them: rows, and which rows they are.

Rule 1: they are summed without ever being dense; what travels is as long as the most rows any rank has.
"""

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.pairwise_sum import pairwise_sum
from fsdp.comm.work import TwoPhaseWork


def dense(gradient: Tensor) -> Tensor:
    """The same as a strided tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def as_rows(gradient: Tensor) -> Tensor:
    """The same as a sparse tensor of whole rows (V, *rest), each of them once, in order."""
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return gradient.coalesce()
    return dense(gradient).to_sparse(1)  # a dense use of the parameter came along


def no_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A sparse tensor of no row, in the shape of `like` (V, *rest)."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=like.device)
    return _of_rows(indices[0], like.new_empty(0, *like.shape[1:], dtype=dtype), like.shape)


class SparseTotal(TwoPhaseWork):
    """The sum of one sparse gradient (V, *rest) over all ranks, in flight.

    First the ranks tell each other how many rows they have; the rows themselves are exchanged in `wait`, so every rank must wait
    for its collectives of this kind in the same order, and call nothing else on the channel in between. The order of the sum is
    that of `pairwise_sum`.

    Traffic: this rank receives (W - 1) * (8 + R * (8 + row)) bytes, R being the most rows that any rank has, with R rows
             rounded up to 8 bytes.
    Memory:  W * (R + U) rows in `wait`, U being the rows of the sum.
    """

    __slots__ = ("_channel", "_counts", "_given", "_label", "result")

    def __init__(self, rows: Tensor, channel: Communicator, label: str) -> None:
        self._given = rows
        self._channel = channel
        self._label = label
        self._counts = torch.zeros(channel.size, dtype=torch.int64, device=rows.device)
        self._counts[channel.rank] = rows._nnz()
        super().__init__(channel.all_gather(self._counts, label))
        self.result: Tensor
        """The sum, a sparse tensor (V, *rest), when `wait` has returned."""

    def wait(self) -> None:
        """Exchange the rows and sum them."""
        self.begun.wait()
        counts = self._counts.tolist()
        values, shape = self._given.values(), self._given.shape
        row, most = shape[1:], max(counts)
        own, elements = counts[self._channel.rank], row.numel()
        # in whole indices, so that those of each rank are aligned
        length = most + -(-most * elements * values.element_size() // 8)
        chunk = torch.zeros(self._channel.size, length, dtype=torch.int64, device=values.device)
        mine = chunk[self._channel.rank]
        mine[:own] = self._given.indices().view(-1)
        mine[most:].view(values.dtype)[: own * elements] = values.reshape(-1)
        if most:
            self.begun = self._channel.all_gather(chunk.view(-1), self._label)
            self.begun.wait()
        indices = torch.cat([of[:count] for of, count in zip(chunk, counts, strict=True)])
        found, param_infos = torch.unique(indices, return_inverse=True)
        parts = values.new_zeros(len(counts), len(found), *row)
        for part, of, place, count in zip(parts, chunk[:, most:], param_infos.split(counts), counts, strict=True):
            part.index_copy_(0, place, of.view(values.dtype)[: count * elements].view(count, *row))
        total = values.new_empty(len(found), *row)
        pairwise_sum(parts.view(len(counts), -1), total.view(-1))
        self.result = _of_rows(found, total, shape)


def _of_rows(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(indices.view(1, -1), values, shape, is_coalesced=True, check_invariants=False)
