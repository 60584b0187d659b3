"""Collectives on a device: a thread looks after them, because the host that launched them has gone on.

[Note: waiting on a device]
A wait on a device makes a stream wait. The host goes on until it wants a number, and waits in CUDA, where nobody can look for a
reason. So a thread does: when nothing was launched for PATIENCE seconds, it says in the store what came last, and reads what
the others have said, as a host that waits does (trail.py). While calls are launched it asks nobody.

A rank that has launched more than a peer that abandoned the step or ended waits for ever. The thread aborts the communicators,
which frees the streams, and the next call of the engine raises. There is no going on from there: the host may have been a step
ahead, and computed with what the aborted collectives left. Ranks that failed alike have launched the same, and go on.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Thread, current_thread
from typing import Final

from fsdp.trail import PATIENCE, Note

POLL: Final = 0.5
"""Seconds between two looks at what was launched last."""
ABORTING: Final = 10.0
"""Seconds after which an abort is left to itself."""


class Device:
    """The collectives that one group has launched on its device."""

    def __init__(self) -> None:
        self.launched = Counter[str]()
        """How many, by channel, since the group was opened."""
        self.last: Callable[[], Note] | None = None
        """What to say of the last one."""
        self._aborts: list[Callable[[], None]] = []
        self._ended = Event()
        self._thread: Thread | None = None

    def carried_by(self, abort: Callable[[], None]) -> None:
        """One more communicator carries them; `abort` ends what it has in flight."""
        self._aborts.append(abort)

    def count(self, channel: str, note: Callable[[], Note]) -> None:
        """One was launched."""
        self.launched[channel] += 1
        self.last = note

    def is_ahead_of(self, launched: Mapping[str, int]) -> bool:
        """Whether this rank has launched something that a rank with these counts has not."""
        return any(count > launched.get(channel, 0) for channel, count in self.launched.items())

    def look_after(self, look: Callable[[Callable[[], Note] | None], bool]) -> None:
        """Call `look` from a thread, twice a second, until it returns False.

        Its argument is None, but every PATIENCE seconds in which nothing was launched: what to say of the last call.
        """
        self._thread = Thread(target=self._run, args=(look,), name="fsdp looks after a device", daemon=True)
        self._thread.start()

    def _run(self, look: Callable[[Callable[[], Note] | None], bool]) -> None:
        last, since = self.last, time.monotonic()
        while not self._ended.wait(POLL):
            now = time.monotonic()
            if self.last is not last:
                last, since = self.last, now
            late = now - since >= PATIENCE
            if not look(last if late else None):
                return
            since = now if late else since

    def abort(self) -> None:
        """End whatever is in flight. Communicators may wait for each other in that, so none waits for another's turn."""
        threads = [Thread(target=_quietly, args=(abort,), name="fsdp aborts", daemon=True) for abort in self._aborts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORTING)

    def end(self, seconds: float) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread not in (None, current_thread()):
            self._thread.join(seconds)


def _quietly(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the group may have been destroyed
        abort()
