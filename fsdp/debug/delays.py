"""Random delays before computation and communication: a mode for tests, switched on by FSDP_DELAYS=seed.

Code that relies on being early or late fails under delays. Code that waits for its inputs gives the same bits. On CUDA the
current stream is stalled, on the host the thread sleeps, and in a simulated world other ranks run first.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch

from fsdp.comm.simulated import current_rank
from fsdp.device.streams import Streams, stall

DELAYS: Final = "FSDP_DELAYS"
"""The environment variable with the seed. It is read when a model is wrapped."""
LONGEST: Final = 0.002
"""The longest delay, in seconds."""


_INSIDE: Final = ("gathering", "reducing", "landing", "uploading")
"""The contexts of `Streams` that begin with a delay."""
_BEFORE: Final = ("pass_begins", "released")
_AFTER: Final = ("await_reductions", "uploaded", "await_copies")


def delayed(streams: Streams, rank: int, device: torch.device) -> Streams:
    """Delay `streams`, and return them, if FSDP_DELAYS is set. Each rank draws delays of its own."""
    seed = os.environ.get(DELAYS)
    if seed:
        Delays(f"{seed} of rank {rank}", device).add_to(streams)
    return streams


class Delays:
    """Random delays of one rank."""

    def __init__(self, seed: str, device: torch.device) -> None:
        self._choices = random.Random(seed)
        self._device = device

    def add_to(self, streams: Streams) -> None:
        """Delay each operation of `streams` that waits, records or enters a stream of the engine."""
        for names, around in ((_INSIDE, self._inside), (_BEFORE, self._before), (_AFTER, self._after)):
            for name in names:
                setattr(streams, name, partial(around, getattr(streams, name)))
        gathered = streams.gathered
        streams.gathered = lambda: (*gathered(), self)  # type: ignore[method-assign]

    @contextmanager
    def _inside(self, enter: Callable[..., AbstractContextManager[Any]], *lane: int) -> Iterator[None]:
        with enter(*lane):
            self.wait()
            yield

    def _before(self, call: Callable[[], None]) -> None:
        self.wait()
        call()

    def _after(self, call: Callable[[], None]) -> None:
        call()
        self.wait()

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
