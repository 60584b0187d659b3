"""Virtual streams, and who touches what on them: a race that a device might lose is found on the host.

The engine's own `DeviceStreams` runs on streams that only count. Every operation of torch is a read or a write of some
bytes of some memory on the stream that is current; a collective runs on a stream of its channel's own, which begins
after the launching stream, and `wait` makes the current stream wait for it, never the host. Vector clocks then say
which of two accesses comes first, if either does.

Rule 1: two accesses to the same bytes, one of them a write, are ordered.
Rule 2: memory that was given back may be handed out again at the next allocation on the stream it was allocated on, as
        torch's caching allocator does: by then every access to it must be over, as that stream sees it.
Rule 3: the host is ahead of every stream, and orders nothing, but for where it waits for a value (`item`, `tolist`).
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp.api import wrap
from fsdp.building import attach
from fsdp.comm.communicator import Communicator, ReduceOp
from fsdp.comm.context import CommContext, Lane
from fsdp.comm.open_communicators import open_comms
from fsdp.comm.work import Work
from fsdp.compat.fairscale import groups
from fsdp.device import storage, streams
from fsdp.device.storage import storage_key
from fsdp.shards.shard_tensor import local_operators

Clock = dict[str, int]
"""Of every stream, how far it has come as somebody knows."""


class Site(NamedTuple):
    """A place in the engine that waits, or records what others wait for."""

    what: str
    where: str


class Access(NamedTuple):
    """Bytes that were touched. `time`: of the stream's own clock."""

    start: int
    end: int
    write: bool
    stream: str
    time: int
    what: str


class Block:
    """Memory, from its allocation until it is given back."""

    def __init__(self, stream: "VirtualStream", owner: StorageWeakRef | None, name: str) -> None:
        self.stream = stream
        self.owner = owner
        self.released = False
        self.name = name
        self.accesses: list[Access] = []

    @property
    def gone(self) -> bool:
        # what `owner.expired()` comes to: this is asked of all memory at every allocation
        return self.released or (self.owner is not None and _expired(self.owner.cdata))


class VirtualStream:
    """Counts what runs on it, and knows how far the others have come before its next operation."""

    def __init__(self, name: str, recorder: "Recorder") -> None:
        self.name = name
        self.clock: Clock = {}
        self._recorder = recorder
        self.blocks: list[Block] = []
        """Allocated on it, and not yet handed out again."""

    def wait_stream(self, other: "VirtualStream") -> None:
        self.after(other.clock)

    def wait_event(self, event: "VirtualEvent") -> None:
        self.after(event.clock)

    def after(self, clock: Clock) -> None:
        if not self._recorder.skips():
            join(self.clock, clock)


class VirtualEvent:
    """How far a stream had come when it was recorded."""

    def __init__(self, recorder: "Recorder") -> None:
        self.clock: Clock = {}
        self._recorder = recorder

    def record(self, stream: VirtualStream) -> None:
        if not self._recorder.skips():
            self.clock = dict(stream.clock)

    def wait(self) -> None:
        self._recorder.running.after(self.clock)


class Recorder:
    """What happened on one rank. `skipped`: a site whose waits are left out, to see whether that is noticed."""

    def __init__(self, skipped: Site | None = None) -> None:
        self.races: list[str] = []
        self.sites: dict[Site, None] = {}
        self.operations = 0
        self.ignores_local_grads = False
        self._skipped = skipped
        self._blocks: dict[int, Block] = {}
        self._host: Clock = {}
        self.compute = self.running = VirtualStream("compute", self)
        self._streams = 1

    # the protocol of `Queues` --------------------------------------------------------------

    def stream(self) -> VirtualStream:
        self._streams += 1
        return VirtualStream(f"stream {self._streams}", self)

    def current(self) -> VirtualStream:
        return self.running

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)

    @contextmanager
    def entered(self, stream: VirtualStream) -> Iterator[None]:
        before, self.running = self.running, stream
        try:
            yield
        finally:
            self.running = before

    # what the engine and torch do ----------------------------------------------------------

    def skips(self) -> bool:
        """Whether the wait that is asked for is the one to leave out."""
        frame = sys._getframe(1)
        what = ""
        while frame.f_code.co_filename in (__file__, streams.__file__):
            if frame.f_code.co_filename == streams.__file__ or not what:
                what = frame.f_code.co_name
            assert frame.f_back is not None
            frame = frame.f_back
        site = Site(what, f"{frame.f_code.co_qualname}:{frame.f_lineno - frame.f_code.co_firstlineno}")
        self.sites[site] = None
        return site == self._skipped

    def host_waits(self) -> None:
        """The host has waited for the current stream: all that is launched from now on comes after it."""
        join(self._host, self.running.clock)

    def operation(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """One operation of torch on the current stream."""
        self.operations += 1
        for tensor in made:
            if is_memory(tensor) and storage_key(tensor) not in self._blocks:
                self.allocate(tensor, name)
        for tensors, write in ((read, False), (written, True)):
            for tensor in tensors:
                self.touch(self.running, tensor, write, name)

    def allocate(self, tensor: Tensor, name: str, permanent: bool = False) -> None:
        """Memory for `tensor`, on the current stream: whatever was given back to that stream may be taken."""
        stream = self.running
        self._begin(stream)
        for block in [block for block in stream.blocks if block.gone]:
            self._reuse(stream, block, name)
            stream.blocks.remove(block)
        block = Block(stream, None if permanent else StorageWeakRef(tensor.untyped_storage()), name)
        stream.blocks.append(block)
        self._blocks[storage_key(tensor)] = block
        self._touch(stream, block, 0, sys.maxsize, True, f"its allocation by {name}")

    def release(self, key: int) -> None:
        """Memory that was allocated for a while is given back."""
        self._blocks.pop(key).released = True

    def touch(self, stream: VirtualStream, tensor: Tensor, write: bool, name: str) -> None:
        with local_operators():  # a shard shows the sizes of the parameter, and has the memory of a part
            self._touch_memory(stream, tensor, write, name)

    def _touch_memory(self, stream: VirtualStream, tensor: Tensor, write: bool, name: str) -> None:
        if not is_memory(tensor) or not tensor.shape.numel():
            return
        if not tensor.untyped_storage().nbytes():
            self.races.append(f"{name} on {stream.name} touches memory that was given back")
            return
        if storage_key(tensor) not in self._blocks:
            # from before the recording, or made where nobody sees it: from the stream that computes
            with self.entered(self.compute):
                self.allocate(tensor, "something before")
        size = tensor.element_size()
        start = tensor.storage_offset()
        end = start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        block = self._blocks[storage_key(tensor)]
        self._begin(stream)
        self._touch(stream, block, start * size, end * size, write, name)

    def _begin(self, stream: VirtualStream) -> None:
        join(stream.clock, self._host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    def _touch(self, stream: VirtualStream, block: Block, start: int, end: int, write: bool, name: str) -> None:
        kept = []
        for one in block.accesses:
            if one.start < end and start < one.end:
                if (write or one.write) and stream.clock.get(one.stream, 0) < one.time:
                    self.races.append(
                        f"{name} {'writes' if write else 'reads'} memory of {block.name} on {stream.name}, "
                        f"which may come before {one.what} on {one.stream}"
                    )
                if start <= one.start and one.end <= end and (write or (one.stream == stream.name and not one.write)):
                    continue
            kept.append(one)
        kept.append(Access(start, end, write, stream.name, stream.clock[stream.name], name))
        block.accesses = kept

    def _reuse(self, stream: VirtualStream, block: Block, name: str) -> None:
        for one in block.accesses:
            if stream.clock.get(one.stream, 0) < one.time:
                self.races.append(
                    f"{name} on {stream.name} may get the memory of {block.name} while {one.what} on {one.stream} uses it"
                )


class Watching(TorchDispatchMode):
    """Tells a recorder of every operation, also those of a backward."""

    _uses: ClassVar[dict[Any, tuple[tuple[str, ...], dict[str, str]]]] = {}
    """Of an operation, how it uses its arguments: by position, and by name."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._recorder.ignores_local_grads:
            return found
        by_position, by_name = self._uses.get(func) or self._learn(func)
        read: list[Tensor] = []
        written: list[Tensor] = []
        uses = [*zip(by_position, args, strict=False), *((by_name[name], value) for name, value in kwargs.items())]
        for use, value in uses:
            if use != "shape" and isinstance(value, Tensor | list | tuple):
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                (written if use == "write" else read).extend(tensors)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self._recorder.operation(func.__name__, *map(strided, (read, written, made)))
        if func is torch.ops.aten._local_scalar_dense.default:
            self._recorder.host_waits()
        return found

    @classmethod
    def _learn(cls, func: Any) -> tuple[tuple[str, ...], dict[str, str]]:
        name = func.__name__.split(".")[0]
        shape_only = name.startswith("new_") or name.endswith("_like") or name in _KNOWN_TO_THE_HOST

        def use(argument: Any) -> str:
            if argument.alias_info is not None:
                return "write" if argument.alias_info.is_write else "shape"
            return "shape" if shape_only else "read"

        arguments = func._schema.arguments
        found = tuple(use(one) for one in arguments if not one.kwarg_only), {one.name: use(one) for one in arguments}
        cls._uses[func] = found
        return found


class VirtualWork:
    """A collective in flight: the data is there when the current stream has waited, for the host may not have."""

    def __init__(self, work: Work, recorder: Recorder, over: Clock) -> None:
        self._work = work
        self._recorder = recorder
        self._over = over

    def wait(self) -> None:
        with ignores_local_grads(self._recorder):
            self._work.wait()
        self._recorder.running.after(self._over)


class VirtualChannel:
    """A channel whose collectives run on a stream of its own, in order."""

    def __init__(self, inner: Communicator, recorder: Recorder, name: str) -> None:
        self._inner = inner
        self._recorder = recorder
        self._stream = VirtualStream(name, recorder)
        self.rank = inner.rank
        self.size = inner.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _launch(self, what: str, read: Sequence[Tensor], written: Sequence[Tensor], launch: Callable[[], Work]) -> VirtualWork:
        with ignores_local_grads(self._recorder):
            work = launch()
        join(self._stream.clock, self._recorder.running.clock)
        for tensors, write in ((read, False), (written, True)):
            for tensor in tensors:
                self._recorder.touch(self._stream, tensor, write, what)
        return VirtualWork(work, self._recorder, dict(self._stream.clock))

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        return self._launch(f"all_gather of {label}", [], [unsharded], lambda: self._inner.all_gather(unsharded, label))

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        launch = lambda: self._inner.reduce_scatter(bucket, into, label, fixed_order)  # noqa: E731
        return self._launch(f"reduce_scatter of {label}", [bucket], [into], launch)

    def reduce_scatter_coalesced(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        launch = lambda: self._inner.reduce_scatter_coalesced(buckets, into, label)  # noqa: E731
        return self._launch(f"reduce_scatter_each of {label}", buckets, into, launch)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        launch = lambda: self._inner.all_reduce(tensor, op, label, fixed_order)  # noqa: E731
        return self._launch(f"all_reduce of {label}", [], [tensor], launch)

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        return self._launch(f"broadcast of {label}", [], [tensor], lambda: self._inner.broadcast(tensor, source, label))

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        with ignores_local_grads(self._recorder):
            return self._inner.gather_objects(thing, label)


class Harness:
    """Every rank that runs in it has virtual streams. Entered once, around `fsdp.simulate`."""

    def __init__(self, skipped: Site | None = None) -> None:
        self._skipped = skipped
        self._here = threading.local()
        self.recorders: list[Recorder] = []

    @property
    def races(self) -> list[str]:
        return [race for recorder in self.recorders for race in recorder.races]

    @property
    def sites(self) -> dict[Site, None]:
        return {site: None for recorder in self.recorders for site in recorder.sites}

    @contextmanager
    def rank(self) -> Iterator[Recorder]:
        """Around all that one rank does."""
        recorder = self._here.recorder = Recorder(self._skipped)
        self._here.comms = {}
        self.recorders.append(recorder)
        with Watching(recorder):
            yield recorder

    def run(self, fn: Callable[[int], Any]) -> Callable[[int], Any]:
        """`fn` of a rank, recorded."""

        def recorded(rank: int) -> Any:
            with self.rank():
                return fn(rank)

        return recorded

    @contextmanager
    def patched(self) -> Iterator[None]:
        """In place of the streams and channels of the host."""
        allocate, release, tolist = storage.ResizableStorage.allocate, storage.ResizableStorage.release, Tensor.tolist

        def allocated(memory: Any, *args: Any) -> None:
            held = memory._held
            allocate(memory, *args)
            if not held:
                self._here.recorder.allocate(Tensor().set_(memory._storage), memory._kind, permanent=True)

        def released(memory: Any, *args: Any) -> bool:
            held = release(memory, *args)
            if held:
                self._here.recorder.release(int(memory._storage._cdata))
            return held

        def listed(tensor: Tensor) -> Any:
            recorder = getattr(self._here, "recorder", None)
            if recorder is not None and not recorder.ignores_local_grads:
                recorder.touch(recorder.running, tensor, False, "tolist")
                recorder.host_waits()
            return tolist(tensor)

        with (
            mock.patch.object(storage.ResizableStorage, "allocate", allocated),
            mock.patch.object(storage.ResizableStorage, "release", released),
            mock.patch.object(Tensor, "tolist", listed),
            mock.patch.object(
                attach, "make_streams", lambda device, lanes, offloads: streams.DeviceStreams(self._here.recorder, lanes)
            ),
            mock.patch.object(wrap, "open_comms", self._open),
            mock.patch.object(groups, "open_comms", self._open),
        ):
            yield

    def _open(self, *args: Any) -> CommContext:
        known, recorder = self._here.comms, self._here.recorder

        def channel(inner: Communicator) -> Any:
            if inner.size == 1:
                return _alone
            if inner not in known:
                known[inner] = VirtualChannel(inner, recorder, f"collectives {len(known)}")
            return known[inner]

        gathers, world_comm, lanes, *_ = open_comms(*args)
        return CommContext(channel(gathers), channel(world_comm), tuple(Lane(*map(channel, lane)) for lane in lanes))


_alone = Communicator()
_expired: Final = torch.UntypedStorage._expired
_KNOWN_TO_THE_HOST: Final = ("_nnz", "sparse_dim", "dense_dim", "is_coalesced")
"""What is asked of a sparse tensor and lies in no memory of a device."""


@contextmanager
def ignores_local_grads(recorder: Recorder) -> Iterator[None]:
    """What the simulated world does to move data is not what a device would do."""
    before, recorder.ignores_local_grads = recorder.ignores_local_grads, True
    try:
        yield
    finally:
        recorder.ignores_local_grads = before


def join(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        if clock.get(name, 0) < time:
            clock[name] = time


def strided(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In place of each sparse tensor, which has no memory of its own, its indices and its values."""
    return [part for one in tensors for part in ((one._indices(), one._values()) if one.is_sparse else (one,))]


def is_memory(tensor: Tensor) -> bool:
    is_number = tensor.dtype is torch.float64 and not tensor.dim()  # a divisor: on the host, and given to a kernel by its value
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not is_number
