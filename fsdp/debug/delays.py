"""Random delays before computing and communicating: a mode for tests, switched on by FSDP_DELAYS=seed.

Whoever counts on being early or late fails under them; whoever waits for what he needs gives the same bits. On CUDA the
current stream does nothing for a while; the host sleeps; in the simulated world other ranks run first.
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
"""The environment variable with the seed, read when a model is wrapped."""
LONGEST: Final = 0.002
"""Seconds."""


def delayed(streams: Streams, rank: int, device: torch.device) -> Streams:
    """The same streams, with delays if the environment asks for them. Each rank draws its own."""
    seed = os.environ.get(DELAYS)
    return DelayedStreams(streams, f"{seed} of rank {rank}", device) if seed else streams


class DelayedStreams:
    """Streams on which nothing begins when it could."""

    def __init__(self, streams: Streams, seed: str, device: torch.device) -> None:
        self._streams = streams
        self.on_host = streams.on_host
        self._choices = random.Random(seed)
        self._device = device

    def pass_begins(self) -> None:
        self.wait()
        self._streams.pass_begins()

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

    def await_reductions(self) -> None:
        self._streams.await_reductions()
        self.wait()

    @contextmanager
    def _late(self, entered: AbstractContextManager[Any]) -> Iterator[None]:
        with entered:
            self.wait()
            yield

    def wait(self) -> None:
        """A delay, in half of the cases."""
        seconds = max(0.0, self._choices.uniform(-LONGEST, LONGEST))
        rank = current_rank()
        if rank is not None:
            for _ in range(int(4 * seconds / LONGEST)):
                rank.let_others_run()
        elif self._device.type == "cuda":
            stall(seconds)
        else:
            time.sleep(seconds)
