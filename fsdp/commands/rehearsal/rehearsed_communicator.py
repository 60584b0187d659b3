"""Communicators that send nothing: this process plays one rank of many, on tensors without memory.

Values do not exist, so no result is needed. What is recorded is what reaches the rank, and when.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator, ReduceOp
from fsdp.comm.simulated import SimulatedRank
from fsdp.comm.work import Work
from fsdp.commands.rehearsal.clock import Clock


class Collective(NamedTuple):
    """A collective of tensors that a rank has launched."""

    kind: str
    label: str
    """The unit, or what is communicated."""
    ranks: int
    received: int
    """Bytes that reach this rank. For an all-reduce: in a ring."""


class RehearsedRank(SimulatedRank):
    """Rank 0 of a number of ranks, played alone."""

    def __init__(self, size: int, clock: Clock, on_host: bool, allocated: Callable[[], None]) -> None:
        self.rank = 0
        self.size = size
        self.clock = clock
        self.on_host = on_host
        """Whether collectives are those of gloo, which need memory of their own for a reduction."""
        self.allocated = allocated
        """Called when the engine has allocated memory for a collective."""
        self.launched: list[Collective] = []
        self.dimensions: dict[tuple[int, ...], str] = {}
        """The names of a mesh's dimensions, by the ranks that share this rank's other coordinates."""
        self.in_flight: dict[int, Work] = {}
        """The collectives of torch that nothing has waited for, by the storage of their result."""
        self._opened: dict[str, RehearsedCommunicator] = {}
        self._copied = ""
        """The kind of collective after which reduced gradients are copied to the host. Empty: they are not."""

    def comm(self, name: str, ranks: Sequence[int] | None = None) -> Any:
        """The communicator of that name."""
        members = tuple(range(self.size) if ranks is None else sorted(ranks))
        return self._opened.setdefault(f"{name} {members}", RehearsedCommunicator(self, members))

    def copy_to_host(self, kind: str) -> None:
        """From now on, copy what collectives of this kind have reduced to the host."""
        self._copied = kind

    def reduced(self, kind: str, end: float, count: int) -> None:
        """A reduction with a result of `count` bytes will end then."""
        if kind == self._copied:
            self.clock.download(end, count)

    def let_others_run(self) -> None:
        """Do nothing: there are no others."""


class RehearsedCommunicator(Communicator):
    """One rank's end of a communicator."""

    def __init__(self, played: RehearsedRank, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)
        self._played = played
        self.ranks = ranks

    def supports_device(self, device: torch.device) -> bool:
        """Whether tensors have no memory."""
        return device.type == "meta"

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        return self._launch("all_gather", label, unsharded.nbytes - unsharded.nbytes // self.size)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        # as much as over gloo, or over NCCL
        held = bucket.nbytes // (2 if self.size == 2 else 1) if self._played.on_host else bucket.nbytes * fixed_order
        return self._launch("reduce_scatter", label, bucket.nbytes - into.nbytes, into.nbytes, held)

    def supports_coalescing(self, device: torch.device, fixed_order: bool = False) -> bool:
        """As NCCL does, and gloo does not."""
        return not self._played.on_host and not fixed_order

    def reduce_scatter_coalesced(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        received = sum(bucket.nbytes - chunk.nbytes for bucket, chunk in zip(buckets, into, strict=True))
        return self._launch("reduce_scatter", label, received, sum(chunk.nbytes for chunk in into))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        padded = self.size * -(-tensor.numel() // self.size) * tensor.element_size()
        received = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._launch("all_reduce", label, received, tensor.nbytes, 2 * padded * fixed_order)

    def carry(self, kind: str, received: int, label: str, after: float = 0.0, scratch: int = 0) -> "_Awaited":
        """Launch a collective, of the engine or of torch, or a transfer between stages of a pipeline, when `after` is over."""
        self._played.launched.append(Collective(kind, label, self.size, received))
        clock = self._played.clock
        return _Awaited(clock, clock.launch(self.ranks, received, after), label, scratch)

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        return self._launch("broadcast", label, 0)

    def message(self, tensor: Tensor, source: int, target: int, tag: int) -> Work:
        return self.carry("message", 0 if source == self.rank else tensor.nbytes, "torch")

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        """All ranks say the same. Tensors are what an all-to-all of torch sends, a part to each rank."""
        if isinstance(thing, list) and thing and all(isinstance(part, Tensor) for part in thing):
            self.carry("all_to_all", sum([part.nbytes for part in thing[1:]]), label).wait()
        return [thing] * self.size

    def _launch(self, kind: str, label: str, received: int, result: int = 0, scratch: int = 0) -> Work:
        self._played.allocated()
        work = self.carry(kind, received, label, self._played.clock.uploaded if kind == "all_gather" else 0.0, scratch)
        self._played.reduced(kind, work.end, result)
        return work


def last_of_reductions(launched: Sequence[Collective], others: Container[str]) -> str:
    """The kind of collective that ends the reduction of a gradient: an all-reduce where several ranks hold the same shard.

    `others`: the labels of those that are not the engine's.
    """
    return "all_reduce" if any(one.kind == "all_reduce" and one.label not in others for one in launched) else "reduce_scatter"


class _Awaited:
    """A collective on the wire."""

    __slots__ = ("_clock", "_label", "end", "scratch")

    def __init__(self, clock: Clock, end: float, label: str, scratch: int) -> None:
        self._clock, self.end, self._label, self.scratch = clock, end, label, scratch

    def wait(self) -> None:
        self._clock.wait(self.end, self._label)
