"""Collectives over torch's process groups. Only this file and open_communicators.py import torch.distributed.

On a device a collective is the backend's. On the host gloo's collectives cost more than they must: its reduce-scatter is an
all-reduce that moves twice the bytes, and its all-gather copies through a second buffer. There a reduction is an exchange of
chunks and a local sum, and `GlooCommunicator` has an all-gather of its own.
"""

import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fsdp.autograd.frames import in_backward
from fsdp.comm.communicator import CarriesHostTensors, Communicator, ReduceOp, as_bytes
from fsdp.comm.failure.desync import RECENT, WatchedWork
from fsdp.comm.failure.peer_monitor import PeerMonitor
from fsdp.comm.failure.pending_call import OBJECTS, PendingCall, names_a_unit
from fsdp.comm.work import DeterministicAllReduce, Work, WorkBatch, WorkThen, reduce_scatter_by_exchange, sum_of_two
from fsdp.errors import ShardingError

# The three collectives of every step are methods of the group itself: torch's functions around them cost 3 to 5 µs a call, and
# 2.13 renamed two of them, while the group's methods have had the same names since 2.11.
_GATHER: Final = c10d.AllgatherOptions()  # type: ignore[attr-defined]
_SCATTER: Final = c10d.ReduceScatterOptions()
_EXCHANGE: Final = c10d.AllToAllOptions()
_ALL_REDUCE: Final[dict[str, Any]] = {"sum": c10d.AllreduceOptions(), "max": c10d.AllreduceOptions()}
_ALL_REDUCE["max"].reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
for _options in (_GATHER, _SCATTER, _EXCHANGE, *_ALL_REDUCE.values()):
    _options.asyncOp = True
_LARGE: Final = 2**16
"""Chunks of at least this many bytes are gathered inside a host by W broadcasts, which then take less time than gloo's gather."""
FORKED: Final = (
    "a collective is called in a process that was forked from a rank, such as a worker of a DataLoader, which has no connections "
    "of its own and would wait for ever. Compute in the rank itself; give the worker data or plain tensors."
)


class ProcessGroupCommunicator(Communicator):
    """A communicator over a torch process group of at least two ranks."""

    def __init__(self, group: dist.ProcessGroup, name: str, peers: PeerMonitor | None) -> None:
        # torch owns the group: a strong reference would keep its threads alive after destroy_process_group()
        self._reference = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.name = name
        self._process = os.getpid()
        self.monitor = peers
        self._recent: deque[tuple[str, str]] = deque(maxlen=RECENT)

    def _launch(self, kind: str, label: str, tensor: Tensor, launch: Callable[[Any], Any], nbytes: int | None = None) -> Work:
        """Launch a collective, which every rank must call. On a device, its `wait` makes a stream wait and not the host.

        `nbytes`: the size of the collective, if it is not that of `tensor`. It must be the same on all ranks.
        """
        if self.recorder is None:
            return self._launch_unrecorded(kind, label, tensor, launch, nbytes)
        total = (tensor.nbytes if nbytes is None else nbytes) * (2 if kind == "all_reduce" else 1)
        received = total if kind == "broadcast" else total * (self.size - 1) // self.size
        return self.recorder(kind, label, received, lambda: self._launch_unrecorded(kind, label, tensor, launch, nbytes))

    def _launch_unrecorded(self, kind: str, label: str, tensor: Tensor, launch: Callable[[Any], Any], nbytes: int | None) -> Work:
        self._recent.append((kind, label))
        group, peers = self.group, self.monitor
        if peers is None:
            work: Work = launch(group)
            return work
        if peers.down or peers.pending_error is not None:
            peers.reconnect()
        name = self.name
        if kind == "all_gather" and not torch.is_grad_enabled() and not in_backward() and names_a_unit(label):
            peers.sequences[name].evaluated += 1
        describe = peers.sequences[name].check_call(kind, label, tensor.nbytes if nbytes is None else nbytes)
        if tensor.device.type != "cpu":
            return cast(Work, peers.launch_on_device(name, describe, partial(launch, group)))
        try:
            return WatchedWork(launch(peers.connections.get(name, group)), peers.detector, describe)
        except RuntimeError as failure:
            self._explain(peers, failure, describe)
            raise

    def _explain(self, peers: PeerMonitor, failure: RuntimeError, describe: Callable[[], PendingCall]) -> None:
        """Raise the reason why a call could not be launched, if a peer is the reason."""
        peers.detector.explain_failure(failure, describe().where)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:
            raise ShardingError(
                "the process group this model was wrapped over has been destroyed; wrap a new model after making a new one."
            )
        if os.getpid() != self._process:
            raise ShardingError(FORKED)
        return group

    def supports_device(self, device: torch.device) -> bool:
        return any(device.type == known.type for known in self.group._device_types)

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        if own is None:
            unsharded = as_bytes(unsharded)
            chunk = unsharded.numel() // self.size
            own = unsharded.narrow(0, self.rank * chunk, chunk)
        return self._launch("all_gather", label, unsharded, partial(self._start_gather, unsharded, own))

    def _start_gather(self, unsharded: Tensor, own: Tensor, group: dist.ProcessGroup) -> Any:
        return group._allgather_base(unsharded, own, _GATHER)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        if fixed_order or bucket.device.type == "cpu":
            return reduce_scatter_by_exchange(partial(self._exchange, label), bucket.view(self.size, -1), into)
        return self._launch("reduce_scatter", label, bucket, lambda group: group._reduce_scatter_base(into, bucket, _SCATTER))

    def supports_coalescing(self, device: torch.device, fixed_order: bool = False) -> bool:
        # on the host a reduction is an exchange, which gloo cannot coalesce
        backend = None if device.type == "cpu" or fixed_order else self.group._get_backend(device)
        return bool(getattr(backend, "supports_coalescing", False))

    def reduce_scatter_coalesced(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        device = buckets[0].device

        def launch(group: dist.ProcessGroup) -> Any:
            group._start_coalescing(device)
            try:
                for bucket, chunk in zip(buckets, into, strict=True):
                    group._reduce_scatter_base(chunk, bucket, _SCATTER)
            finally:
                work = group._end_coalescing(device)
            return work

        return self._launch("reduce_scatter", label, buckets[0], launch, sum(bucket.nbytes for bucket in buckets))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        if fixed_order and op == "sum":
            gather = partial(self.all_gather, label=label)
            return DeterministicAllReduce(partial(self._exchange, label), gather, tensor, self.rank, self.size)
        return self._launch("all_reduce", label, tensor, lambda group: group.allreduce([tensor], _ALL_REDUCE[op]))

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        data = as_bytes(tensor)
        return self._launch("broadcast", label, tensor, lambda group: group.broadcast([data], _from(source)))

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        if dist.get_backend(self.group) == "fake":
            return [thing] * self.size  # a fake group has no peers: all ranks are taken to be alike
        with torch.device("cpu"):  # the caller may build its model under torch.device("meta")
            pickled = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
            sizes = self._gather_rows(torch.tensor([pickled.numel()]), label).view(-1).tolist()
            rows = self._gather_rows(torch.nn.functional.pad(pickled, (0, max(sizes) - pickled.numel())), label)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gather_rows(self, row: Tensor, label: str) -> Tensor:
        """Gather a row (N,) of each rank, and wait: (W, N), on the host."""
        row = row.to(c10d._get_object_coll_device(self.group))
        rows = row.new_empty(self.size * row.numel())
        # the same call whatever the size, so that a save every few steps is predicted
        work = self._launch(OBJECTS, label, rows, lambda group: group._allgather_base(rows, row, _GATHER), nbytes=0)
        work.wait()
        return rows.view(self.size, -1).cpu()

    def _exchange(self, label: str, received: Tensor, sent: Tensor) -> Work:
        """Send chunk r of `sent` to rank r. Chunk r of `received` comes from rank r."""
        return self._launch("reduce_scatter", label, sent, lambda group: group.alltoall_base(received, sent, [], [], _EXCHANGE))

    def recent(self) -> Sequence[str]:
        return [f"{kind} {label}" for kind, label in self._recent]


class DeviceCommunicator(CarriesHostTensors, ProcessGroupCommunicator):
    """A communicator over a group that sends no tensors of the host."""

    @property
    def carrier(self) -> torch.device:
        return torch.device(c10d._get_object_coll_device(self.group))


class GlooCommunicator(ProcessGroupCommunicator):
    """A communicator whose collectives on the host are gloo's, each replaced by a cheaper one of gloo where there is one.

    Two ranks exchange one chunk for another. More ranks of one host gather large chunks by broadcasts. Between hosts, a broadcast
    sends a chunk over the same link several times. gloo's own all-gather is a ring, which sends it over each link at most once
    where the ranks of a host follow each other, as torchrun numbers them.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, peers: PeerMonitor) -> None:
        super().__init__(group, name, peers)
        self._on_one_host = peers.neighbours.count_hosts() == 1

    def _start_gather(self, unsharded: Tensor, own: Tensor, group: dist.ProcessGroup) -> Any:
        on_host, chunk = unsharded.device.type == "cpu", own.numel()
        if on_host and self.size == 2:
            return self._swap(own, self._of_peer(unsharded), group)
        if on_host and chunk >= _LARGE and self._on_one_host:
            chunks = enumerate(torch.split(unsharded, chunk))
            return WorkBatch(partial(group.broadcast, [one], _from(source)) for source, one in chunks)
        return super()._start_gather(unsharded, own, group)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        if self.size > 2 or bucket.device.type != "cpu":
            return super().reduce_scatter(bucket, into, label, fixed_order)
        received = torch.empty_like(into)
        work = self._launch("reduce_scatter", label, bucket, partial(self._swap, self._of_peer(bucket), received))
        own = bucket.narrow(0, self.rank * into.numel(), into.numel())
        return WorkThen(work, partial(sum_of_two, own, received, into), received.nbytes)

    def _of_peer(self, both: Tensor) -> Tensor:
        """The other rank's chunk in a tensor of two."""
        chunk = both.numel() // 2
        return both.narrow(0, (1 - self.rank) * chunk, chunk)

    def _swap(self, mine: Tensor, theirs: Tensor, group: dist.ProcessGroup) -> Any:
        """Send `mine` to the other of two ranks, and receive `theirs` from it."""
        count = mine.numel()
        lengths = [count * self.rank, count * (1 - self.rank)]
        return group.alltoall_base(theirs, mine, lengths, lengths, _EXCHANGE)


def _from(source: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.asyncOp = source, True
    return options
