"""What may run at the same time on a device. The only file that uses device streams.

[Note: who waits for whom on a device]
Unsharded buffers are allocated on the gather stream and read by the compute stream. Releasing one records an event on the
compute stream, and the next allocation makes the gather stream wait for that event. So memory is reused only after its last
reader. Shards are written by the compute stream (the optimizer). Each pass, forward or backward, begins by making the gather
stream wait for the compute stream once; prefetch can then run ahead for the rest of the pass. A gather of shards that were
written after the forward began waits for the compute stream once more. Buckets are allocated and filled on the compute
stream, and released only after that stream has waited for their reduction. Reduced gradients are allocated on a reduction
stream, which waits for the compute stream before each of them. So `record_stream` is not needed, and memory is reused in a
fixed pattern.

[Note: several compute streams]
A pass begins on one stream, and the program may call units on others, which it orders by itself: branches of a model, or a step
on another stream than the last one. Autograd accumulates a gradient on the stream on which its node was made. That is the stream
of the forward, or of an earlier one if a part of its graph is alive. So the streams on which units and gradients were computed
are known here. Releasing a buffer records an event on each of them. Buckets are filled, launched, awaited and released on the
stream on which the pass began, after all others, which then wait for it. A unit that is called on another stream while it is
unsharded waits for the others: one of them has waited for the gather.

[Note: shards in host memory]
With an offload policy, unsharded buffers are allocated on an upload stream, which copies shards from the host into them. It waits
for the last reader of their memory, and the gather stream waits for it. Reduced gradients are copied to the host on the
reduction stream that made them. The host program does not wait for these copies one by one. At the end of each pass it waits for
all of them: then it may use what they wrote, and change what they read. Copies of an abandoned step are not waited for: nothing
uses what they read or write.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

_NOTHING: Final = nullcontext()


class Streams:
    """The order of computing, gathering and reducing on one device. As they stand here, the streams of a CPU: none.

    There the order follows from waiting for collectives.
    """

    on_host = True
    """Whether this is a CPU, where everything runs in the order of the program."""

    def pass_begins(self) -> None:
        """Let later gathers see all that the compute stream has written so far. The current stream computes from now on."""

    def computes(self) -> None:
        """Note that the current stream computes a gradient or a unit of this model."""

    def unit_begins(self, has_waited: bool) -> None:
        """A unit computes on the current stream. `has_waited`: this stream has just waited for the gather of the unit."""

    def gathering(self) -> AbstractContextManager[Any]:
        """A context whose work runs on the gather stream, after the last reader of released memory."""
        return _NOTHING

    def gathered(self) -> Sequence[Any]:
        """Events to wait for: the end of all copies made in `gathering` so far. Collectives have works of their own."""
        return ()

    def released(self) -> None:
        """Record that the compute stream has used an unsharded buffer for the last time."""

    def reducing(self, lane: int = 0) -> AbstractContextManager[Any]:
        """A context whose work runs on a reduction stream, after all that the compute stream has done so far."""
        return _NOTHING

    def landing(self, lane: int = 0) -> AbstractContextManager[Any]:
        """A context whose work runs on a reduction stream, without waiting for the compute stream."""
        return _NOTHING

    def computing(self) -> AbstractContextManager[Any]:
        """A context whose work runs on the stream on which the last pass began, after all others on which units have computed.

        It need not be the current one: a gradient may be accumulated on another one, and autograd's thread for a device may clean
        up after a failed backward. Memory that is released in this context can be handed out again on the compute stream at once.
        The others wait for it at the end.
        """
        return _NOTHING

    def await_reductions(self) -> None:
        """Make the current stream, which computes, wait for the reduction streams."""

    def uploading(self) -> AbstractContextManager[Any]:
        """A context whose work runs on the upload stream, after the last reader of released memory."""
        return _NOTHING

    def uploaded(self) -> None:
        """Make the gather stream wait for what the upload stream has copied so far."""

    def copied(self) -> None:
        """Record the end of what the current stream has copied from or to the host."""

    def await_copies(self) -> None:
        """Return when all copies from and to the host, so far, are complete. The host program waits, and no stream does."""


class Queues:
    """Makes the streams and events of a device, with the classes of torch's module for its type, such as `torch.cuda`.

    Tests give virtual ones, which record each access to memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def stream(self) -> Any:
        """A stream, with `wait_stream` and `wait_event`."""
        return self._module.Stream(self._device, priority=-1)

    def event(self) -> Any:
        """An event, with `record(stream)`, `wait` and `synchronize`."""
        return self._module.Event()

    def current(self) -> Any:
        """The current stream, which computes."""
        return self._module.current_stream(self._device)

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """A context whose work runs on `stream`."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context


class DeviceStreams(Streams):
    """A gather stream and one reduction stream for each lane, in addition to the compute stream.

    With `offloads`, also an upload stream.
    """

    on_host = False

    def __init__(self, queues: Queues, lanes: int, offloads: bool = False) -> None:
        self._queues = queues
        self._compute = queues.current()
        """The stream on which the last pass began, or on which weights were read again in the middle of it."""
        self._known: dict[Any, None] = {}
        """Every stream on which a pass has begun, or a unit or a gradient was computed."""
        self._gather = queues.stream()
        self._reduce = [queues.stream() for _ in range(lanes)]
        self._last_readers: dict[Any, Any] = {}
        """By compute stream, the last reader of released memory."""
        self._upload = queues.stream() if offloads else None
        self._copies: dict[Any, Any] = {}
        """By stream, the end of its last copy from or to the host, if the host program has not waited for it."""

    def pass_begins(self) -> None:
        self._compute = self._queues.current()
        self._known[self._compute] = None
        for stream in self._known:
            self._gather.wait_stream(stream)

    def computes(self) -> None:
        self._known[self._queues.current()] = None

    def unit_begins(self, has_waited: bool) -> None:
        self.computes()
        if len(self._known) > 1 and not has_waited:
            for stream in self._known:
                self._queues.current().wait_stream(stream)

    def gathering(self) -> AbstractContextManager[Any]:
        for reader in self._last_readers.values():
            self._gather.wait_event(reader)
        return self._queues.entered(self._gather)

    def gathered(self) -> Sequence[Any]:
        # a single rank launches no collective, so there is only its copy to wait for
        event = self._queues.event()
        event.record(self._gather)
        return (event,)

    def released(self) -> None:
        self.computes()
        for stream in self._known:
            if stream not in self._last_readers:
                self._last_readers[stream] = self._queues.event()
            self._last_readers[stream].record(stream)

    def reducing(self, lane: int = 0) -> AbstractContextManager[Any]:
        self._reduce[lane].wait_stream(self._queues.current())
        return self._queues.entered(self._reduce[lane])

    def landing(self, lane: int = 0) -> AbstractContextManager[Any]:
        return self._queues.entered(self._reduce[lane])

    def computing(self) -> AbstractContextManager[Any]:
        current = self._queues.current()
        is_alone = current == self._compute and len(self._known) <= 1
        return _NOTHING if is_alone else self._after_others({**self._known, current: None})

    @contextmanager
    def _after_others(self, others: Iterable[Any]) -> Iterator[None]:
        compute = self._compute
        for other in others:
            compute.wait_stream(other)
        try:
            with self._queues.entered(compute):
                yield
        finally:  # gradients that were read here are memory of the others, which may be handed out again there
            for other in others:
                other.wait_stream(compute)

    def await_reductions(self) -> None:
        for stream in self._reduce:
            self._queues.current().wait_stream(stream)

    def uploading(self) -> AbstractContextManager[Any]:
        assert self._upload is not None, "no unit is offloaded"
        for reader in self._last_readers.values():
            self._upload.wait_event(reader)
        return self._queues.entered(self._upload)

    def uploaded(self) -> None:
        self._gather.wait_stream(self._upload)

    def copied(self) -> None:
        stream = self._queues.current()
        if stream not in self._copies:
            self._copies[stream] = self._queues.event()
        self._copies[stream].record(stream)

    def await_copies(self) -> None:
        copies, self._copies = self._copies, {}
        for copy in copies.values():
            copy.synchronize()


META: Final = torch.device("meta")


def readable_device(device: torch.device) -> torch.device:
    """The device for small tensors whose values the host reads: `device`, and in a rehearsal on the meta device the CPU."""
    return torch.device("cpu") if device == META else device


def default_device(supports_device: Callable[[torch.device], bool]) -> torch.device:
    """The device for new parameters: the current accelerator if the group can communicate there, else the CPU.

    In a rehearsal (fsdp/commands/planning) it is the meta device, on which tensors have no memory.
    """
    if supports_device(META) and not supports_device(torch.device("cpu")):
        return META
    accelerator = current_accelerator()
    return accelerator if accelerator is not None and supports_device(accelerator) else torch.device("cpu")


def current_accelerator() -> torch.device | None:
    """The accelerator that is current on this rank; None on a machine without one that has streams."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not _has_streams(accelerator):
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def call_on(stream: Any, function: Callable[[Tensor], object], tensor: Tensor) -> None:
    """Call a function of a tensor on a stream of the user: after what the current stream has so far, which then waits for it."""
    queues = Queues(tensor.device)
    current = queues.current()
    stream.wait_stream(current)
    with queues.entered(stream):
        function(tensor)
    current.wait_stream(stream)


def stall(seconds: float) -> None:
    """Keep the current CUDA stream busy for about `seconds`."""
    torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]


def make_streams(device: torch.device, lanes: int, offloads: bool) -> Streams:
    """The streams of a device, with `lanes` reduction streams. `offloads`: some shards are in host memory."""
    return DeviceStreams(Queues(device), lanes, offloads) if _has_streams(device) else Streams()


def _has_streams(device: torch.device) -> bool:
    """Whether torch has streams for devices of this type: for CUDA, and for accelerators whose module offers the same names."""
    if device.type in ("cpu", "meta"):
        return False
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("Stream", "Event", "current_stream", "stream"))
