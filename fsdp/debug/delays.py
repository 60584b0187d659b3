"""Random delays before computation and communication: a mode for tests, switched on by FSDP_DELAYS=seed.

Code that relies on being early or late fails under delays. Code that waits for its inputs gives the same bits. On CUDA the
current stream is stalled, on the host the thread sleeps, and in a simulated world other ranks run first.
"""

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from fsdp.comm.simulated import current_rank
from fsdp.device.streams import Streams, stall

DELAYS: Final = "FSDP_DELAYS"
"""The environment variable with the seed. It is read when a model is wrapped."""
LONGEST: Final = 0.002
"""The longest delay, in seconds."""


def delayed(streams: Streams, rank: int, device: torch.device) -> Streams:
    """Return `streams` with delays if FSDP_DELAYS is set, else as they are. Each rank draws delays of its own."""
    seed = os.environ.get(DELAYS)
    return DelayedStreams(streams, f"{seed} of rank {rank}", device) if seed else streams


class DelayedStreams(Streams):
    """Streams with a random delay before each operation that waits, records or enters a stream of the engine."""

    def __init__(self, streams: Streams, seed: str, device: torch.device) -> None:
        self._streams = streams
        self.on_host = streams.on_host
        self._choices = random.Random(seed)
        self._device = device

    def pass_begins(self) -> None:
        self.wait()
        self._streams.pass_begins()

    def computes(self) -> None:
        self._streams.computes()

    def unit_begins(self, has_waited: bool) -> None:
        self._streams.unit_begins(has_waited)

    def gathering(self) -> AbstractContextManager[Any]:
        return self._late(self._streams.gathering())

    def gathered(self) -> Sequence[Any]:
        return (*self._streams.gathered(), self)

    def released(self) -> None:
        self.wait()
        self._streams.released()

    def reducing(self, lane: int = 0) -> AbstractContextManager[Any]:
        return self._late(self._streams.reducing(lane))

    def landing(self, lane: int = 0) -> AbstractContextManager[Any]:
        return self._late(self._streams.landing(lane))

    def computing(self) -> AbstractContextManager[Any]:
        return self._streams.computing()

    def await_reductions(self) -> None:
        self._streams.await_reductions()
        self.wait()

    def uploading(self) -> AbstractContextManager[Any]:
        return self._late(self._streams.uploading())

    def uploaded(self) -> None:
        self._streams.uploaded()
        self.wait()

    def copied(self) -> None:
        self._streams.copied()

    def await_copies(self) -> None:
        self._streams.await_copies()
        self.wait()

    @contextmanager
    def _late(self, entered: AbstractContextManager[Any]) -> Iterator[None]:
        with entered:
            self.wait()
            yield

    def wait(self) -> None:
        """Wait for a random time in half of the calls."""
        seconds = max(0.0, self._choices.uniform(-LONGEST, LONGEST))
        rank = current_rank()
        if rank is not None:
            for _ in range(int(4 * seconds / LONGEST)):
                rank.let_others_run()
        elif self._device.type == "cuda":
            stall(seconds)
        else:
            time.sleep(seconds)
