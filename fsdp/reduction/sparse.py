"""Sparse gradients of unsharded parameters, as embeddings with sparse=True have them: rows, and the indices of these rows.

Rule 1: they are summed without ever being dense; a rank sends as many rows as the rank with the most rows has.
"""

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.work import TwoPhaseWork, pairwise_sum


def dense(gradient: Tensor) -> Tensor:
    """The gradient as a strided tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def as_rows(gradient: Tensor) -> Tensor:
    """The gradient as a sparse tensor of rows (V, *rest), each of them once, in order."""
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return gradient.coalesce()
    return dense(gradient).to_sparse(1)  # the parameter had a dense use too


def no_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A sparse tensor without rows, in the shape of `like` (V, *rest)."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=like.device)
    return _sparse_tensor(indices[0], like.new_empty(0, *like.shape[1:], dtype=dtype), like.shape)


class SparseTotal(TwoPhaseWork):
    """The sum of one sparse gradient (V, *rest) over all ranks, in flight.

    First the ranks exchange their numbers of rows. They exchange the rows in `wait`, so every rank must wait for its totals
    in the same order, and call nothing else on the communicator in between. The order of the sum is that of `pairwise_sum`.

    Traffic: this rank receives (W - 1) * (8 + R * (8 + row)) bytes, R being the most rows that any rank has, with R rows
             rounded up to 8 bytes.
    Memory:  W * (R + U) rows in `wait`, U being the rows of the sum.
    """

    __slots__ = ("_comm", "_counts", "_label", "_rows", "result")

    def __init__(self, rows: Tensor, comm: Communicator, label: str) -> None:
        self._rows = rows
        self._comm = comm
        self._label = label
        self._counts = torch.zeros(comm.size, dtype=torch.int64, device=rows.device)
        self._counts[comm.rank] = rows._nnz()
        super().__init__(comm.all_gather(self._counts, label))
        self.result: Tensor
        """The sum, a sparse tensor (V, *rest), when `wait` has returned."""

    def wait(self) -> None:
        """Exchange the rows and sum them."""
        self.begun.wait()
        counts = self._counts.tolist()
        values, shape = self._rows.values(), self._rows.shape
        row, most = shape[1:], max(counts)
        own, elements = counts[self._comm.rank], row.numel()
        # indices, then values, in units of one index: so the values of each rank are aligned
        length = most + -(-most * elements * values.element_size() // 8)
        gathered = torch.zeros(self._comm.size, length, dtype=torch.int64, device=values.device)
        mine = gathered[self._comm.rank]
        mine[:own] = self._rows.indices().view(-1)
        mine[most:].view(values.dtype)[: own * elements] = values.reshape(-1)
        if most:
            self.begun = self._comm.all_gather(gathered.view(-1), self._label)
            self.begun.wait()
        indices = torch.cat([one[:count] for one, count in zip(gathered, counts, strict=True)])
        unique, places = torch.unique(indices, return_inverse=True)
        parts = values.new_zeros(len(counts), len(unique), *row)
        for part, one, place, count in zip(parts, gathered[:, most:], places.split(counts), counts, strict=True):
            part.index_copy_(0, place, one.view(values.dtype)[: count * elements].view(count, *row))
        total = values.new_empty(len(unique), *row)
        pairwise_sum(parts.view(len(counts), -1), total.view(-1))
        self.result = _sparse_tensor(unique, total, shape)


def _sparse_tensor(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(indices.view(1, -1), values, shape, is_coalesced=True, check_invariants=False)
