"""What the ranks of a job wait for, in the store that all of them have.

A group sees only the calls of its own ranks. So a rank that has waited long, and found no reason in its group, also publishes its
call for all ranks of the job, with the number of calls it has made in each of its groups and of messages to and from each rank.
If each of some ranks waits for a call that another one of these has not made, none of them can go on.

[Note: waiting for a message]
A collective is awaited again and again, for STALL_SECONDS each. If a wait for a message timed out, gloo would end all connections
of the group. So the host stays in the backend until the message is there, and a thread publishes what it waits for.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Final, NamedTuple

from fsdp.comm.failure.desync import STALL_SECONDS, Peers, Store
from fsdp.comm.failure.pending_call import PendingCall, absent_ranks

_IDLE: Final = 20
"""How often the thread looks without finding a wait before it ends."""


class JobWaits:
    """The calls that ranks of the job wait for."""

    def __init__(self, store: Store, rank: int) -> None:
        """`rank`: this one, as the user counts it."""
        self._store = store
        self._rank = rank
        self.publish(None)  # a world before this one, with the same store, may have ended while this rank waited

    def publish(self, pending: PendingCall | None) -> None:
        """Write the call that this rank waits for; None: it waits no longer. The names in it are those of no other group."""
        self._store.set(f"{self._rank}", json.dumps(pending))

    def find_stuck(self) -> dict[int, PendingCall]:
        """If this rank waits for ever: the ranks that wait for each other, and the call of each. Otherwise nothing."""
        found = _stuck(self._read())
        if self._rank not in found:
            return {}
        time.sleep(STALL_SECONDS / 4)
        again = self._read()  # the calls were read at different times, and are now known to hold at one time
        return _awaited(found) if all(again.get(rank) == one for rank, one in found.items()) else {}

    def _read(self) -> dict[int, PendingCall]:
        """The calls that this rank waits for, directly or through other ranks."""
        found: dict[int, PendingCall] = {}
        ranks = [self._rank]
        while ranks:
            rank = ranks.pop()
            key = f"{rank}"
            if rank not in found and self._store.check([key]) and (fields := json.loads(self._store.get(key))) is not None:
                found[rank] = PendingCall(*fields)
                ranks.extend(found[rank].among)
        return found


def _stuck(found: dict[int, PendingCall]) -> dict[int, PendingCall]:
    """Those of the ranks that wait for one of these ranks, which waits for one of these in turn."""
    while free := [rank for rank, one in found.items() if not absent_ranks(one, found)]:
        for rank in free:
            del found[rank]
    return found


def _awaited(found: dict[int, PendingCall]) -> dict[int, PendingCall]:
    """Those of ranks that are stuck for which another one of these waits. How many more wait for them depends on the moment."""
    while (awaited := {rank for one in found.values() for rank in absent_ranks(one, found)}) != found.keys():
        found = {rank: found[rank] for rank in sorted(awaited)}
    return found


class _Wait(NamedTuple):
    """The host waits for a message."""

    monitor: Peers
    """That of the group."""
    describe: Callable[[], PendingCall]
    begin: float


class MessageWaits:
    """The thread that publishes for which message the host of this process waits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: Thread | None = None
        self._wait: _Wait | None = None
        self._published = False

    @contextmanager
    def waiting(self, monitor: Peers, describe: Callable[[], PendingCall]) -> Iterator[None]:
        """The host waits inside for a message."""
        with self._lock:
            self._wait = _Wait(monitor, describe, time.monotonic())
            if self._thread is None or not self._thread.is_alive():  # a fork has no thread of its parent
                self._thread = Thread(target=self._run, name="fsdp message waits", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._wait = None
                if self._published:
                    self._published = False
                    monitor.end_joint_wait()

    def _run(self) -> None:
        idle, looked = 0, 0.0
        while True:
            time.sleep(STALL_SECONDS / 4)
            with self._lock:
                wait = self._wait
                idle = 0 if wait is not None else idle + 1
                if idle > _IDLE:
                    self._thread = None
                    return
            if wait is not None and time.monotonic() > max(wait.begin, looked) + STALL_SECONDS:
                with suppress(RuntimeError):  # the store may have gone, or a rank has started again, which ends the wait
                    self._look(wait)
                looked = time.monotonic()

    def _look(self, wait: _Wait) -> None:
        """Publish the wait, and end it if the message will never come."""
        with self._lock:
            if self._wait is not wait:
                return
            if not self._published:
                self._published = True
                wait.monitor.publish_joint_wait(wait.describe())
        why = wait.monitor.find_joint_deadlock()
        with self._lock:
            if why is not None and self._wait is wait:
                wait.monitor.end_wait_in_vain(why)
