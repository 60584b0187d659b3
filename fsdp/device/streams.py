"""What may overlap what. The only file that names a device stream.

[Note: who waits for whom on CUDA]
Whole buffers are allocated on the gather stream and read by the compute stream. Releasing one
records an event on the compute stream; the next allocation makes the gather stream wait for it,
so memory is reused only after its last reader. Shards are written by the compute stream (the
optimizer): a pass, forward or backward, begins by making the gather stream wait for it once, which
leaves prefetch free to run ahead for the rest of the pass. Buckets are allocated and filled on the compute stream and
released only after it has waited for their reduction. Reduced gradients are allocated on the
reduction stream, which waits for the compute stream before each of them. So nothing needs
`record_stream`, and memory is reused in a fixed pattern.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import torch


class Streams(Protocol):
    """The order between computing, gathering and reducing on one device."""

    on_host: bool
    """Whether there are none, but the host's own order."""

    def pass_begins(self) -> None:
        """Gathers launched from now on see what the compute stream has written so far."""

    def gathering(self) -> AbstractContextManager[Any]:
        """Work inside runs on the gather stream, after the last reader of released memory."""

    def gathered(self) -> Sequence[Any]:
        """Work to wait for: what has run in `gathering` so far, beside the collectives, which are waited for themselves."""

    def released(self) -> None:
        """The compute stream has made its last use of a whole buffer."""

    def reducing(self, lane: int = 0) -> AbstractContextManager[Any]:
        """Work inside runs on a reduction stream, after what the compute stream has done so far."""

    def landing(self, lane: int = 0) -> AbstractContextManager[Any]:
        """Work inside runs on a reduction stream, without waiting for the compute stream."""

    def await_reductions(self) -> None:
        """The compute stream waits for the reduction streams."""


_NOTHING: Final = nullcontext()


class HostStreams:
    """On CPU the `Work` handles alone give the order."""

    on_host = True

    def pass_begins(self) -> None:
        return

    def gathering(self) -> AbstractContextManager[Any]:
        return _NOTHING

    def gathered(self) -> Sequence[Any]:
        return ()

    def released(self) -> None:
        return

    def reducing(self, lane: int = 0) -> AbstractContextManager[Any]:
        return _NOTHING

    def landing(self, lane: int = 0) -> AbstractContextManager[Any]:
        return _NOTHING

    def await_reductions(self) -> None:
        return


class Queues(Protocol):
    """Where `CudaStreams` gets streams and events from. Tests give virtual ones, which record who touches what."""

    def stream(self) -> Any:
        """A stream, with `wait_stream` and `wait_event`."""

    def event(self) -> Any:
        """An event, with `record(stream)` and `wait`."""

    def current(self) -> Any:
        """The stream that computes now."""

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside runs on `stream`."""


class CudaQueues:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


class CudaStreams:
    """One stream for gathers and one for each lane of reductions beside the compute stream, with events between."""

    on_host = False

    def __init__(self, queues: Queues, lanes: int) -> None:
        self._queues = queues
        self._gather = queues.stream()
        self._reduce = [queues.stream() for _ in range(lanes)]
        self._last_reader = queues.event()

    def pass_begins(self) -> None:
        self._gather.wait_stream(self._queues.current())

    def gathering(self) -> AbstractContextManager[Any]:
        self._gather.wait_event(self._last_reader)
        return self._queues.entered(self._gather)

    def gathered(self) -> Sequence[Any]:
        # one rank alone communicates with nobody, and its copy is all there is to wait for
        event = self._queues.event()
        event.record(self._gather)
        return (event,)

    def released(self) -> None:
        self._last_reader.record(self._queues.current())

    def reducing(self, lane: int = 0) -> AbstractContextManager[Any]:
        self._reduce[lane].wait_stream(self._queues.current())
        return self._queues.entered(self._reduce[lane])

    def landing(self, lane: int = 0) -> AbstractContextManager[Any]:
        return self._queues.entered(self._reduce[lane])

    def await_reductions(self) -> None:
        for stream in self._reduce:
            self._queues.current().wait_stream(stream)


def default_device(can_carry: Callable[[torch.device], bool]) -> torch.device:
    """Where a rank's new parameters go: its current CUDA device if the group can communicate there, else the host."""
    cuda = torch.cuda.is_available() and can_carry(torch.device("cuda"))
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def stall(seconds: float) -> None:
    """The current stream of the current device does nothing for about as long."""
    torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]


def make_streams(device: torch.device, lanes: int) -> Streams:
    """The streams of a device, with so many for reductions."""
    return CudaStreams(CudaQueues(device), lanes) if device.type == "cuda" else HostStreams()
