"""Simulated ranks that compute on the pretend accelerator: rank r on pretend:r, with collectives like NCCL's.

Rule 1: a collective is enqueued on a stream of its communicator, after what the launching stream has so far. `wait` makes the
        current stream wait, and never the host.
Rule 2: the host of a rank waits for its peers only where it waits for a value that depends on them.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Final, TypeVar
from unittest import mock

import torch
from torch import Tensor

import fsdp
from fsdp.autograd import frames
from fsdp.comm import simulated
from fsdp.comm.communicator import CarriesHostTensors, ReduceOp, as_bytes
from fsdp.comm.simulated import SimulatedCommunicator, current_rank
from fsdp.comm.simulated_ops import Operation, Side, describe, mark_written
from fsdp.comm.work import DeterministicAllReduce, Work, reduce_scatter_by_exchange
from fsdp.errors import ShardingError
from tests.support.accelerator.device import NAME, Scheduler, configure, load

T = TypeVar("T")
_GATHER, _SCATTER, _SUM, _MAX, _BROADCAST, _EXCHANGE = range(6)
_BLOCKED: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class PretendWork:
    """A collective in flight on the stream of its communicator."""

    __slots__ = ("_event", "_tensors")

    def __init__(self, event: Any, tensors: Sequence[Tensor]) -> None:
        self._event = event
        self._tensors = tensors
        """What the collective uses. It is kept until a stream has been made to wait."""

    def wait(self) -> None:
        self._event.wait()
        self._tensors = ()


class _OnDevice(SimulatedCommunicator):
    """A communicator of a simulated rank for tensors on its pretend device alone."""

    _stream: Any = None

    def supports_device(self, device: torch.device) -> bool:
        return device.type == NAME

    def supports_coalescing(self, device: torch.device, fixed_order: bool = False) -> bool:
        return device.type == NAME and not fixed_order

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        unsharded = as_bytes(unsharded)
        chunk = unsharded.numel() // self.size
        own = unsharded.narrow(0, self.rank * chunk, chunk)
        text = f"all_gather({label!r}, {unsharded.numel()} bytes)"
        return self._on_device("all_gather", label, text, _GATHER, own, unsharded, chunk, unsharded.numel() - chunk)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        if fixed_order:
            return reduce_scatter_by_exchange(partial(self._exchange, label), bucket.view(self.size, -1), into)
        text = f"reduce_scatter({label!r}, {describe(bucket)})"
        received = bucket.nbytes - into.nbytes
        return self._on_device("reduce_scatter", label, text, _SCATTER, bucket, into, into.numel(), received)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        if fixed_order and op == "sum":
            gather = partial(self.all_gather, label=label)
            return DeterministicAllReduce(partial(self._exchange, label), gather, tensor, self.rank, self.size)
        text, kind = f"all_reduce({label!r}, {describe(tensor)}, {op})", _SUM if op == "sum" else _MAX
        received = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._on_device("all_reduce", label, text, kind, tensor, tensor, tensor.numel(), received)

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        text, data = f"broadcast({label!r}, {describe(tensor)}, from rank {source})", as_bytes(tensor)
        received = 0 if self.rank == source else tensor.nbytes
        return self._on_device("broadcast", label, text, _BROADCAST, data, data, data.numel(), received, source)

    def _exchange(self, label: str, received: Tensor, sent: Tensor) -> Work:
        """Send chunk r of `sent` to rank r. Chunk r of `received` comes from rank r."""
        text, chunk = f"all_to_all({label!r}, {describe(sent)})", sent.numel() // self.size
        nbytes = sent.nbytes * (self.size - 1) // self.size
        return self._on_device("reduce_scatter", label, text, _EXCHANGE, sent, received, chunk, nbytes)

    def _on_device(
        self,
        kind: str,
        label: str,
        text: str,
        number: int,
        given: Tensor,
        into: Tensor,
        elements: int,
        received: int,
        source: int = 0,
    ) -> Work:
        if given.device != into.device or not given.is_contiguous() or not into.is_contiguous():
            raise ShardingError(f"{label!r}: a collective on a device takes contiguous tensors of one device.")
        if given.untyped_storage().nbytes() == 0 and given.numel():
            raise ShardingError(f"{label!r}: a buffer was released before the collective was called.")
        module = torch.get_device_module(given.device)
        if self._stream is None:
            self._stream = module.Stream(given.device)
        mark_written(into)
        self._stream.wait_stream(module.current_stream(given.device))
        # enqueued first: once the launch returns, other ranks may already wait for this part
        epoch = self._world.epoch_of(self.name, self.ranks[self.rank])
        called = self._called if epoch == self._epoch else 0
        key = _key_of(self._world, (self.name, epoch, called))
        load().pa_launch(
            *(key, self.size, self.rank, number, source, _scalar_type(given.dtype), given.device.index, self._stream.stream_id),
            *(given.data_ptr(), into.data_ptr(), elements),
        )
        event = module.Event()
        event.record(self._stream)
        try:
            self._launch(kind, Side(text, label, lambda sides: None), received)
        except BaseException:
            load().pa_abort(key)
            raise
        return PretendWork(event, (given, into))

    def _meet(self, side: Side) -> Operation:
        operation = super()._meet(side)
        _operations[_key_of(self._world, (operation.comm, *operation.order))] = operation
        return operation


class PretendCommunicator(CarriesHostTensors, _OnDevice):
    """A communicator of a simulated rank on its pretend device. Host tensors travel as copies, as they do with NCCL alone."""

    @property
    def carrier(self) -> torch.device:
        return torch.device(NAME, self.ranks[self.rank])


_keys: Final[dict[tuple[int, tuple[str, int, int]], int]] = {}
_operations: Final[dict[int, Operation]] = {}
_numbers: Final = count()
failures: Final[list[BaseException]] = []
"""Why hosts could not wait for a collective, in this world."""


def _key_of(world: Any, place: tuple[str, int, int]) -> int:
    """The number by which the device knows a collective."""
    key = (id(world), place)
    if key not in _keys:
        _keys[key] = next(_numbers)
        names[_keys[key]] = place
    return _keys[key]


names: Final[dict[int, tuple[str, int, int]]] = {}


def _scalar_type(dtype: torch.dtype) -> int:
    """The number of a dtype in c10::ScalarType."""
    return _SCALAR_TYPES.index(dtype)


_SCALAR_TYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
    *(torch.qint8, torch.quint8, torch.qint32, torch.bfloat16),
)


@_BLOCKED
def _on_blocked(key: int) -> int:
    """The host of a rank waits for a collective that a peer has not launched: the peers run. Returns whether it was launched."""
    rank = current_rank()
    world = simulated._world
    if rank is None or world is None:
        return 0
    try:
        name, epoch, number = names[key]
        operation = world._operations.get((name, epoch, number)) or _operations.get(key)
        if operation is None:
            rank.let_others_run()
        else:
            world.wait(rank.rank, operation)
    except BaseException as failure:
        failures.append(failure)
        return 0
    return 1


def run(world_size: int, fn: Callable[[int], T], scheduler: Scheduler, seed: int = 0) -> list[T]:
    """`fsdp.simulate` with rank r on pretend:r. The same (world_size, fn, scheduler, seed) gives the same run."""
    with accelerated(scheduler, seed):
        return fsdp.simulate(world_size, on_own_device(fn), seed)


def on_own_device(fn: Callable[[int], T]) -> Callable[[int], T]:
    """`fn` of a rank, with pretend:rank as its current device. All that it has enqueued is over when it returns."""

    def ranked(rank: int) -> T:
        module = torch.get_device_module(NAME)
        module.set_device(rank)
        _threads[threading.get_ident()] = rank
        try:
            result = fn(rank)
            module.synchronize(rank)
        except RuntimeError as failure:
            if failures:
                raise failure from failures[0]
            raise
        return result

    return ranked


_threads: Final[dict[int, int]] = {}
"""The rank that a thread runs."""


def _frames_of_this_rank() -> Iterator[FrameType]:
    """The frames of all threads but those of other ranks, which would be other processes."""
    here = current_rank()
    for thread, innermost in sys._current_frames().items():
        if here is None or _threads.get(thread, here.rank) == here.rank:
            yield from frames._outwards(innermost)


@contextmanager
def accelerated(scheduler: Scheduler, seed: int) -> Iterator[None]:
    """Inside, simulated ranks may communicate on pretend devices."""
    lib = load()
    configure(scheduler, seed)
    lib.pa_on_blocked(_on_blocked)
    with (
        mock.patch.object(simulated, "SimulatedCommunicator", PretendCommunicator),
        mock.patch.object(frames, "_all_frames", _frames_of_this_rank),
    ):
        try:
            yield
        finally:
            lib.pa_reset()
            for known in (_keys, _operations, names, _threads):
                known.clear()
            failures.clear()
