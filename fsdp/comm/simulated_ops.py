"""The data movement of simulated collectives: one operation, what each rank brings to it, and the buffers it reads and writes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fsdp.comm.communicator import ReduceOp
from fsdp.comm.failure.desync import REMEDY
from fsdp.comm.failure.pending_call import remedies_for, steps_apart
from fsdp.comm.work import pairwise_sum
from fsdp.errors import PeerFailed, ShardingError, WorldError, name_ranks


class Operation:
    """The collective that `ranks` run together at one position of one communicator, in one epoch."""

    __slots__ = (
        *("comm", "complete", "ends_by", "epoch", "family", "fault"),
        *("moved", "number", "pickled", "ranks", "reported", "sides"),
    )

    def __init__(self, comm: str, family: str, ranks: tuple[int, ...], epoch: int, number: int) -> None:
        self.comm = comm
        self.family = family
        """The communicator whose steps a rank abandons."""
        self.ranks = ranks
        self.epoch = epoch
        self.number = number
        self.sides: dict[int, Side] = {}
        """The calls so far, by rank."""
        self.complete = False
        """True once every rank has made the same call."""
        self.moved = False
        self.fault: str | None = None
        """Why the data could not move."""
        self.ends_by: Callable[[], PeerFailed] | None = None
        """Makes the error of a rank that waits for it in vain, if no rank has failed or abandoned a step."""
        self.reported = False
        """True once a rank has raised an error about this operation."""
        self.pickled: list[bytes] = []

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the operations of a communicator."""
        return self.epoch, self.number

    @property
    def place(self) -> str:
        return f"operation {self.number} of communicator {self.comm!r}"

    @property
    def call(self) -> str:
        return next(iter(self.sides.values())).call

    @property
    def name(self) -> str:
        return f"{self.call}, {self.place}"

    def join(self, rank: int, side: "Side") -> None:
        """Add the call of one more rank."""
        self.sides[rank] = side
        self.complete = len(self.sides) == len(self.ranks) and not self.is_mismatch

    @property
    def is_mismatch(self) -> bool:
        """Whether two ranks have made different calls."""
        first, *others = ((side.call, side.completed) for side in self.sides.values())
        return any(side != first for side in others)

    @property
    def restarted_by(self) -> int | None:
        """The first rank that has begun another forward here."""
        return next((rank for rank in sorted(self.sides) if self.sides[rank].is_restart), None)

    def report_mismatch(self, alone: Sequence[int]) -> str:
        """Name the ranks and their different calls. The operation counts as reported. `alone`: who has evaluated alone."""
        self.reported = True
        if (apart := steps_apart({rank: side.completed for rank, side in self.sides.items()})) is not None:
            return apart
        callers: dict[str, list[int]] = {}
        for rank in sorted(self.sides):
            callers.setdefault(self.sides[rank].call, []).append(rank)
        first, *others = (f"{name_ranks(ranks)} called {call}" for call, ranks in callers.items())
        text = f"The ranks disagree on {self.place}: {first} where {' and '.join(others)}."
        return " ".join((text, *(() if alone else (REMEDY,)), *remedies_for(callers, alone)))

    def move(self) -> None:
        """Read every rank's input and write every rank's output, unless a buffer was released."""
        sides = [self.sides[rank] for rank in sorted(self.sides)]
        gone = [rank for rank in sorted(self.sides) if any(buffer.released for buffer in self.sides[rank].buffers)]
        if gone:
            self.fault = (
                f"buffer of {sides[0].label!r} was released while the collective was in flight: "
                f"{name_ranks(gone)} let go of it before {self.name} was over."
            )
        else:
            with _apart():
                sides[0].move(sides)
            self.pickled = [side.pickled for side in sides]
        self.moved = True
        self.sides.clear()


class Side(NamedTuple):
    """The part of one rank in an operation. The text `call` must be the same on every rank."""

    call: str
    label: str
    move: "Callable[[Sequence[Side]], None]"
    buffers: "tuple[Buffer, ...]" = ()
    pickled: bytes = b""
    completed: int = 0
    """The number of backwards that the rank had completed when it abandoned its last step."""
    is_restart: bool = False
    """True for a forward that begins without the backward of the last one: see `Communicator.announce_restart`."""


class Buffer:
    """The memory of a tensor that a collective uses, from the call until the data moves."""

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
        # `.data` has a version counter of its own: as with torch.distributed, autograd does not see most collectives
        with _apart():
            self.flat = tensor.data.as_strided((tensor.numel(),), (1,))
            """The elements in the order of memory."""

    @property
    def released(self) -> bool:
        return self._storage.data_ptr() != self._address or self._storage.nbytes() < self._end

    def overlaps(self, other: "Buffer") -> bool:
        start, others = self.flat.data_ptr(), other.flat.data_ptr()
        return start < others + other.flat.nbytes and others < start + self.flat.nbytes

    def poison(self, start: int = 0, end: int | None = None) -> None:
        """Overwrite elements that must not be read before the data moves."""
        with _apart():
            self.flat[start:end].view(torch.uint8).fill_(0xFF)

    def keep_a_copy(self) -> None:
        """Save the input of a collective in place, whose buffer is poisoned next."""
        with _apart():
            self._copy = self.flat.clone()

    @property
    def sent(self) -> Tensor:
        """The input, or what the rank has wrongly written over it since the call."""
        if self._copy is not None and bool((self.flat.view(torch.uint8) == 0xFF).all()):
            return self._copy
        return self.flat


def _apart() -> AbstractContextManager[Any]:
    """A context to compute in as a network does, which autograd and the dispatch modes of the program do not see."""
    return _without_modes() if torch._C._len_torch_dispatch_stack() else torch.inference_mode()


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch.inference_mode(), _disable_current_modes():
        yield


def move_chunks(sides: Sequence[Side]) -> None:
    chunk = sides[0].buffers[0].flat.numel() // len(sides)
    unsharded = torch.cat([side.buffers[0].flat.narrow(0, rank * chunk, chunk) for rank, side in enumerate(sides)])
    for side in sides:
        side.buffers[0].flat.copy_(unsharded)


def move_sums(sides: Sequence[Side]) -> None:
    sums = []
    for rank, side in enumerate(sides):
        into = side.buffers[1].flat
        sums.append(torch.empty_like(into))
        chunk = into.numel()
        pairwise_sum(torch.stack([other.buffers[0].sent.narrow(0, rank * chunk, chunk) for other in sides]), sums[-1])
    # written after all are read: one rank's input may be another's output
    for side, total in zip(sides, sums, strict=True):
        side.buffers[1].flat.copy_(total)


def move_total(sides: Sequence[Side], op: ReduceOp) -> None:
    sent = torch.stack([side.buffers[0].sent for side in sides])
    if op == "max":
        # as gloo does, which leaves out a NaN of any rank but the first
        total = reduce(lambda largest, one: torch.where(largest < one, one, largest), sent)
    else:
        total = torch.empty_like(sent[0])
        pairwise_sum(sent, total)
    for side in sides:
        side.buffers[0].flat.copy_(total)


def move_copies(sides: Sequence[Side], source: int) -> None:
    for side in sides:
        side.buffers[0].flat.copy_(sides[source].buffers[0].flat)


def mark_written(tensor: Tensor) -> None:
    """Increase the version counter, as torch.distributed does: a backward that saved the old values will raise."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
