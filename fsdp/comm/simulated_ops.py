"""What data moves between simulated ranks, and when it may not: the buffers of one collective."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fsdp.comm.pairwise_sum import sum_over_ranks
from fsdp.errors import ShardingError, WorldError, name_ranks

ReduceOp = Literal["sum", "max"]


class Operation:
    """What `ranks` do together at one number of one channel, in its `era`. `fault`: why its data could not move."""

    __slots__ = ("channel", "complete", "era", "fault", "moved", "number", "pickled", "ranks", "sides", "told")

    def __init__(self, channel: str, ranks: tuple[int, ...], era: int, number: int) -> None:
        self.channel = channel
        self.ranks = ranks
        self.era = era
        self.number = number
        self.sides: dict[int, Side] = {}
        self.complete = False
        self.moved = False
        self.fault: str | None = None
        self.told = False
        self.pickled: list[bytes] = []

    @property
    def turn(self) -> tuple[int, int]:
        """What comes later on a channel has a greater one."""
        return self.era, self.number

    @property
    def place(self) -> str:
        return f"operation {self.number} of channel {self.channel!r}"

    @property
    def name(self) -> str:
        return f"{next(iter(self.sides.values())).call}, {self.place}"

    def move(self) -> None:
        """Read every rank's input and write every rank's output, unless a buffer is gone."""
        sides = [self.sides[rank] for rank in sorted(self.sides)]
        gone = [rank for rank in sorted(self.sides) if any(buffer.released for buffer in self.sides[rank].buffers)]
        if gone:
            self.fault = (
                f"buffer of {sides[0].label!r} was released while the collective was in flight: "
                f"{name_ranks(gone)} let go of it before {self.name} was over."
            )
        else:
            with torch.inference_mode():
                sides[0].move(sides)
            self.pickled = [side.pickled for side in sides]
        self.moved = True
        self.sides.clear()


class Side(NamedTuple):
    """What one rank brought to an operation. Every rank's `call` must be the same text."""

    call: str
    label: str
    move: "Callable[[Sequence[Side]], None]"
    buffers: "tuple[Buffer, ...]" = ()
    pickled: bytes = b""


class Buffer:
    """Memory lent to a collective, from the call until the data moves. `flat`: its elements, in the order of memory."""

    __slots__ = ("_address", "_copy", "_end", "_storage", "flat")

    def __init__(self, tensor: Tensor, label: str) -> None:
        if tensor.device.type != "cpu":
            raise ShardingError(f"{label!r} is on {tensor.device}; simulated ranks compute on the CPU.")
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ShardingError(f"{label!r} has holes or overlaps in memory; make the tensor contiguous.")
        self._storage = tensor.untyped_storage()
        self._address = self._storage.data_ptr()
        self._end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.numel() else 0
        self._copy: Tensor | None = None
        if self.released:
            raise WorldError(f"buffer of {label!r} was released before the collective was called.")
        # `.data` has a version counter of its own: as with torch.distributed, most collectives go unseen by autograd
        with torch.inference_mode():
            self.flat = tensor.data.as_strided((tensor.numel(),), (1,))

    @property
    def released(self) -> bool:
        return self._storage.data_ptr() != self._address or self._storage.nbytes() < self._end

    def overlaps(self, other: "Buffer") -> bool:
        start, others = self.flat.data_ptr(), other.flat.data_ptr()
        return start < others + other.flat.nbytes and others < start + self.flat.nbytes

    def poison(self, start: int = 0, end: int | None = None) -> None:
        """Nobody may read these elements before the data moved."""
        with torch.inference_mode():
            self.flat[start:end].view(torch.uint8).fill_(0xFF)

    def keep_a_copy(self) -> None:
        """Before poisoning what is both sent and received."""
        with torch.inference_mode():
            self._copy = self.flat.clone()

    @property
    def sent(self) -> Tensor:
        """What was given, or what the rank has wrongly written over it since."""
        if self._copy is not None and bool((self.flat.view(torch.uint8) == 0xFF).all()):
            return self._copy
        return self.flat


def move_chunks(sides: Sequence[Side]) -> None:
    chunk = sides[0].buffers[0].flat.numel() // len(sides)
    whole = torch.cat([side.buffers[0].flat.narrow(0, rank * chunk, chunk) for rank, side in enumerate(sides)])
    for side in sides:
        side.buffers[0].flat.copy_(whole)


def move_sums(sides: Sequence[Side]) -> None:
    sums = []
    for rank, side in enumerate(sides):
        into = side.buffers[1].flat
        sums.append(torch.empty_like(into))
        chunk = into.numel()
        sum_over_ranks(torch.stack([other.buffers[0].sent.narrow(0, rank * chunk, chunk) for other in sides]), sums[-1])
    # only when all are read: one rank's input may be another's output
    for side, total in zip(sides, sums, strict=True):
        side.buffers[1].flat.copy_(total)


def move_total(sides: Sequence[Side], op: ReduceOp) -> None:
    total = _combine(sides, op)
    for side in sides:
        side.buffers[0].flat.copy_(total)


def move_copies(sides: Sequence[Side], source: int) -> None:
    for side in sides:
        side.buffers[0].flat.copy_(sides[source].buffers[0].flat)


def _combine(sides: Sequence[Side], op: ReduceOp) -> Tensor:
    sent = torch.stack([side.buffers[0].sent for side in sides])
    if op == "max":
        return sent.amax(0)
    total = torch.empty_like(sent[0])
    sum_over_ranks(sent, total)
    return total


def mark_written(tensor: Tensor) -> None:
    """As after a call of torch.distributed, autograd refuses a backward that saved the old values."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
