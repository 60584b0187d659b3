"""What ranks say to each other. Only this file and context.py import torch.distributed.

Rule 1: only methods of `Collectives` communicate, and each of them always does.
Rule 2: every rank of a channel calls the same methods in the same order.
Rule 3: one rank alone has a channel too (`Alone`): nobody else asks how many there are.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fsdp.comm.work import DONE, ExchangedSum, FixedOrderTotal, Together, Work
from fsdp.errors import PeerFailed, ShardingError
from fsdp.failure.desync import RECENT, WatchedWork
from fsdp.failure.peers import Lines

ReduceOp = Literal["sum", "max"]


class Collectives(Protocol):
    """One channel between the ranks of a group. `label` names the unit in errors and traces."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def can_carry(self, device: torch.device) -> bool:
        """Whether tensors on `device` can be communicated."""

    def all_gather(self, whole: Tensor, label: str, own: Tensor | None = None) -> Work:
        """Fill `whole` (W * B bytes, uint8) from every rank's chunk; this rank's own lies in its place already.

        `own` is that place, if the caller has it at hand.

        Traffic: this rank receives (W - 1) * B bytes.
        """

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        """Sum chunk `rank` of every rank's `bucket` (W * C,) into `into` (C,), which is filled when `wait` returns.

        `bucket` must not be touched before. With `fixed_order`, the bits are those of `sum_over_ranks` on every backend.
        Traffic: this rank receives (W - 1) * C elements.
        """

    def coalesces(self, device: torch.device, fixed_order: bool = False) -> bool:
        """Whether `reduce_scatter_each` can be called for tensors on `device`."""

    def reduce_scatter_each(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        """`reduce_scatter` of each bucket, together, as one operation of the backend."""

    def scratch_bytes(self, bucket: Tensor, fixed_order: bool = False) -> int:
        """What a `reduce_scatter` of `bucket` holds besides its arguments, until `wait`."""

    def total_scratch_bytes(self, tensor: Tensor, fixed_order: bool) -> int:
        """The same of the sum of an `all_reduce`; `wait` takes half as much again."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        """Combine `tensor` (any shape) over all ranks, in place.

        A sum with `fixed_order` has the bits of `sum_over_ranks`; it communicates a second time in `wait`, so every rank must
        wait for its collectives of this kind in the same order, and call nothing else on the channel in between.
        Traffic: this rank receives 2 (W - 1) / W of the tensor.
        """

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        """Overwrite `tensor` (any shape) with that of rank `source` of the group."""

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        """Every rank's picklable `thing`, by rank. Slow: for construction and errors."""

    def recent(self) -> Sequence[str]:
        """The last calls on this rank, oldest first: what, and for which unit."""

    def epoch(self) -> int:
        """Grows with every step that is abandoned, by whichever model on the channel."""

    def begin_again(self, unit: str) -> PeerFailed | None:
        """A forward begins, though no backward came to the one before: go on when that is so on every rank.

        If the others are in that backward, they give it up, and what they are told is returned.
        """

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """This rank gives up a step: let the others know, who may wait for it. Does not wait for them."""

    def completed(self) -> None:
        """A backward has ended well."""

    def connect_anew(self) -> None:
        """After an abandoned step: meet the others and be ready for the next one."""


# The three collectives of every step go to the group itself: torch's functions around them cost 3 to 5 µs a call, and
# 2.13 renamed two of them, while the group's methods have the same names since 2.11.
_GATHER: Final = c10d.AllgatherOptions()  # type: ignore[attr-defined]
_REDUCE: Final = c10d.ReduceScatterOptions()
_EXCHANGE: Final = c10d.AllToAllOptions()
for _options in (_GATHER, _REDUCE, _EXCHANGE):
    _options.asyncOp = True
_LARGE: Final = 2**16
"""Bytes of a chunk from which on W broadcasts over gloo take less time than its gather."""


def _broadcasts(group: dist.ProcessGroup, chunks: Sequence[Tensor]) -> Iterator[Callable[[], Any]]:
    """Launches of one from each rank, of its chunk."""
    for source, chunk in enumerate(chunks):
        yield partial(group.broadcast, [chunk], _from(source))


def _from(source: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.asyncOp = source, True
    return options


class Alone:
    """A channel of one rank, over nothing."""

    rank: Final = 0
    size: Final = 1

    def can_carry(self, device: torch.device) -> bool:
        return True

    def all_gather(self, whole: Tensor, label: str, own: Tensor | None = None) -> Work:
        return DONE

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        into.copy_(bucket)
        return DONE

    def coalesces(self, device: torch.device, fixed_order: bool = False) -> bool:
        return False

    def reduce_scatter_each(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        raise NotImplementedError

    def scratch_bytes(self, bucket: Tensor, fixed_order: bool = False) -> int:
        return 0

    def total_scratch_bytes(self, tensor: Tensor, fixed_order: bool) -> int:
        return 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        return DONE

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        return DONE

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        return [thing]

    def recent(self) -> Sequence[str]:
        return ()

    def epoch(self) -> int:
        return 0

    def begin_again(self, unit: str) -> PeerFailed | None:
        return None

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        return

    def completed(self) -> None:
        return

    def connect_anew(self) -> None:
        return


class ProcessGroupCollectives:
    """A channel over one torch process group, of two ranks at least.

    On CPU a reduction is an exchange of chunks and a local sum: gloo's own reduce-scatter is an
    all-reduce in disguise, which moves twice the bytes.
    """

    def __init__(self, group: dist.ProcessGroup, channel: str, lines: Lines | None) -> None:
        # torch owns the group: a strong reference would keep its threads alive beyond destroy_process_group()
        self._reference = weakref.ref(group)
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._channel = channel
        self._lines = lines
        self._over_gloo = lines is not None and bool(lines.connections)
        """For what is on the host. gloo's own gather goes through a second buffer, which costs as much again."""
        self._recent: deque[tuple[str, str]] = deque(maxlen=RECENT)

    def _launch(self, kind: str, label: str, tensor: Tensor, launch: Callable[[Any], Any], nbytes: int = 0) -> Work:
        """Launch a collective that every rank is about to call. On a device `wait` makes a stream wait, not the host.

        `nbytes`: what it is about, if that is more than `tensor`.
        """
        self._recent.append((kind, label))
        group, lines = self.group, self._lines
        if lines is None:
            return cast(Work, launch(group))
        if lines.down or lines.refusal is not None:
            lines.connect_anew()
        channel = self._channel
        note = lines.trails[channel].before(kind, label, nbytes or tensor.nbytes)
        if tensor.device.type != "cpu":
            return cast(Work, lines.launch_on_device(channel, note, partial(launch, group)))
        try:
            return WatchedWork(launch(lines.connections.get(channel, group)), lines.watch, note)
        except RuntimeError as failure:
            lines.watch.explain(failure)
            raise

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:
            raise ShardingError(
                "the process group this model was wrapped over has been destroyed; wrap a new model after making a new one."
            )
        return group

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def can_carry(self, device: torch.device) -> bool:
        return any(device.type == known.type for known in self.group._device_types)

    def all_gather(self, whole: Tensor, label: str, own: Tensor | None = None) -> Work:
        chunk = whole.numel() // self._size
        if own is None:
            own = whole.narrow(0, self._rank * chunk, chunk)
        if self._swaps(whole):
            return self._launch("all_gather", label, whole, partial(self._exchange, own, self._of_peer(whole)))
        if self._over_gloo and whole.device.type == "cpu" and chunk >= _LARGE:
            chunks = torch.split(whole, chunk)
            return self._launch("all_gather", label, whole, lambda group: Together(_broadcasts(group, chunks)))
        return self._launch("all_gather", label, whole, lambda group: group._allgather_base(whole, own, _GATHER))

    def _swaps(self, tensor: Tensor) -> bool:
        """Whether a gather or a reduction is an exchange of one chunk for another."""
        return self._over_gloo and self._size == 2 and tensor.device.type == "cpu"

    def _of_peer(self, both: Tensor) -> Tensor:
        """Of two ranks: the chunk of the other one."""
        chunk = both.numel() // 2
        return both.narrow(0, (1 - self._rank) * chunk, chunk)

    def _exchange(self, mine: Tensor, theirs: Tensor, group: dist.ProcessGroup) -> Any:
        """Of two ranks: send `mine`, receive `theirs`."""
        count = mine.numel()
        lengths = [count * self._rank, count * (1 - self._rank)]
        return group.alltoall_base(theirs, mine, lengths, lengths, _EXCHANGE)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        if bucket.device.type != "cpu" and not fixed_order:
            return self._launch("reduce_scatter", label, bucket, lambda group: group._reduce_scatter_base(into, bucket, _REDUCE))
        if self._swaps(bucket):
            received = torch.empty_like(into)
            work = self._launch("reduce_scatter", label, bucket, partial(self._exchange, self._of_peer(bucket), received))
            return ExchangedSum(work, received, into, bucket.narrow(0, self._rank * into.numel(), into.numel()))
        received = torch.empty_like(bucket)
        work = self._launch(
            "reduce_scatter", label, bucket, lambda group: group.alltoall_base(received, bucket, [], [], _EXCHANGE)
        )
        return ExchangedSum(work, received, into)

    def coalesces(self, device: torch.device, fixed_order: bool = False) -> bool:
        # on the host a reduction is an exchange, which gloo cannot coalesce
        backend = None if device.type == "cpu" or fixed_order else self.group._get_backend(device)
        return bool(getattr(backend, "supports_coalescing", False))

    def reduce_scatter_each(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        device = buckets[0].device

        def launch(group: dist.ProcessGroup) -> Any:
            group._start_coalescing(device)
            try:
                for bucket, chunk in zip(buckets, into, strict=True):
                    group._reduce_scatter_base(chunk, bucket, _REDUCE)
            finally:
                work = group._end_coalescing(device)
            return work

        return self._launch("reduce_scatter", label, buckets[0], launch, sum(bucket.nbytes for bucket in buckets))

    def scratch_bytes(self, bucket: Tensor, fixed_order: bool = False) -> int:
        if bucket.device.type != "cpu":
            return bucket.nbytes if fixed_order else 0
        return bucket.nbytes // (2 if self._swaps(bucket) else 1)

    def total_scratch_bytes(self, tensor: Tensor, fixed_order: bool) -> int:
        chunk = -(-tensor.numel() // self._size)
        return 2 * self._size * chunk * tensor.element_size() if fixed_order else 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        if fixed_order and op == "sum":
            return self._exchange_all(tensor, label)
        how = c10d.AllreduceOptions()
        how.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        how.asyncOp = True
        return self._launch("all_reduce", label, tensor, lambda group: group.allreduce([tensor], how))

    def _exchange_all(self, tensor: Tensor, label: str) -> Work:
        """A sum over all ranks, in chunks of a tensor padded to the number of ranks."""
        chunk = -(-tensor.numel() // self._size)
        padded = tensor.new_zeros(self._size, chunk)
        padded.view(-1)[: tensor.numel()].copy_(tensor.view(-1))
        received = torch.empty_like(padded)
        work = self._launch(
            "reduce_scatter", label, padded, lambda group: group.alltoall_base(received, padded, [], [], _EXCHANGE)
        )
        return FixedOrderTotal(work, padded, received, tensor, lambda sums: self.all_gather(sums, label), self._rank)

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        return self._launch("broadcast", label, tensor, lambda group: group.broadcast([tensor], _from(source)))

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        if dist.get_backend(self.group) == "fake":
            return [thing] * self._size  # a fake group has no peers: all ranks are taken to be alike
        things: list[Any] = [None] * self._size
        dist.all_gather_object(things, thing, group=self.group)
        return things

    def recent(self) -> Sequence[str]:
        return [f"{kind} {label}" for kind, label in self._recent]

    def epoch(self) -> int:
        return 0 if self._lines is None else self._lines.epoch

    def begin_again(self, unit: str) -> PeerFailed | None:
        return None if self._lines is None else self._lines.begin_again(self._channel, unit)

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        if self._lines is not None:
            self._lines.abandon(unit, failure)

    def completed(self) -> None:
        if self._lines is not None:
            self._lines.completed += 1

    def connect_anew(self) -> None:
        if self._lines is not None and self._lines.down:
            self._lines.connect_anew()
