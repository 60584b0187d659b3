"""Watches collectives on a device in a thread, because the host that launched them does not wait for them.

[Note: waiting on a device]
A wait on a device makes a stream wait. The host goes on until it needs a number, and then waits inside CUDA, where no code of
ours can look for a reason. So a thread does: when nothing was launched for STALL_SECONDS, it publishes the last call and reads
those of the other ranks, as a waiting host does (desync.py). While calls are launched it does not use the store.

A rank that has launched more than a peer that abandoned the step or ended waits for ever. The thread aborts the communicators,
which frees the streams, and the next call of the engine raises. The job cannot go on after that: the host may have been a step
ahead, and computed with what the aborted collectives left. Ranks that failed after the same launches do go on.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Thread, current_thread
from typing import Any, Final

from fsdp.comm.failure.desync import STALL_SECONDS
from fsdp.comm.failure.peer_monitor import CLOSING, ENDED, RESTART, PeerMonitor, PendingError, abandoned_by
from fsdp.comm.failure.pending_call import PendingCall
from fsdp.errors import PeerFailed, WorldError

POLL: Final = 0.5
"""Seconds between two checks of a group."""
ABORTING: Final = 10.0
"""Seconds that the thread waits for an abort."""
FAILURES: Final = 5
"""The number of consecutive checks that the store must fail before it is taken to be gone."""
ABORTED: Final = "What was in flight on the device of rank"


class DeviceWatchdog:
    """The thread that watches all groups of this process that communicate on a device."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[DevicePeerMonitor]] = []
        self._ended = Event()
        self._thread: Thread | None = None

    def add(self, monitor: "DevicePeerMonitor") -> None:
        """Watch one more group."""
        self._groups.append(weakref.ref(monitor))
        if self._thread is None:
            self._ended = Event()
            self._thread = Thread(target=self._run, args=(self._ended,), name="fsdp device watchdog", daemon=True)
            self._thread.start()

    def remove(self, monitor: "DevicePeerMonitor") -> None:
        """Watch a group no longer."""
        self._groups = [group for group in self._groups if group() not in (None, monitor)]
        if not self._groups and self._thread is not None:
            self._ended.set()
            thread, self._thread = self._thread, None
            if thread is not current_thread():
                thread.join(CLOSING)

    def _run(self, ended: Event) -> None:
        while not ended.wait(POLL):
            for monitor in self._monitors():
                monitor.poll()

    def _monitors(self) -> "list[DevicePeerMonitor]":
        return [monitor for group in self._groups if (monitor := group()) is not None]

    def abort_all(self, failure: WorldError) -> None:
        """Abort the collectives in flight in all groups, because those of one group may wait for those of another."""
        monitors = self._monitors()
        for monitor in monitors:
            monitor.prepare_abort(failure)
        # an abort may wait for the abort of another communicator, so all run at the same time
        aborts = [abort for monitor in monitors for abort in monitor.aborts]
        threads = [Thread(target=_quietly, args=(abort,), name="fsdp aborts", daemon=True) for abort in aborts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORTING)


class DevicePeerMonitor(PeerMonitor):
    """The monitor of a group with collectives on a device. Its collectives on the host are watched as `PeerMonitor` does."""

    def __init__(self, watchdog: DeviceWatchdog, *of_group: Any) -> None:
        """`of_group`: the arguments of a `PeerMonitor`."""
        self.aborts: list[Callable[[], None]] = []
        """For each communicator, the function that aborts its collectives in flight."""
        self.counts_all = True
        """Whether all launches that this rank may wait for are counted. Those in a group of the user are not."""
        self._launched = Counter[str]()
        """The number of launches of each communicator since the group was opened."""
        self._last: Callable[[], PendingCall] | None = None
        """Describes the last call."""
        self._checked: tuple[Callable[[], PendingCall] | None, float] = None, 0.0
        """The last call when it was first seen, or last checked, and the time of that."""
        self._failures = 0
        self._aborted: str | None = None
        """Why the collectives of this group have been aborted."""
        self._unwatched = False
        """True once the watchdog leaves this group alone."""
        self._watchdog = watchdog
        super().__init__(*of_group)
        self._publishes = True
        watchdog.add(self)

    def _start(self) -> None:
        self._last = None  # before there is a new detector, which must not publish a call of the old epoch
        super()._start()

    def launched(self) -> dict[str, int]:
        # a communicator whose first call failed has launched nothing
        return {name: count for name, count in dict(self._launched).items() if count}

    def launch_on_device(self, name: str, describe: Callable[[], PendingCall], launch: Callable[[], Any]) -> Any:
        # counted before the launch, because the first call of a communicator waits for all ranks
        self._launched[name] += 1
        self._last = describe
        try:
            return launch()
        except RuntimeError as failure:
            self._launched[name] -= 1
            pending, self.pending_error = self.pending_error, None
            if pending is not None:
                raise pending.error from failure
            raise

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        super().abandon(unit, failure)
        if self._aborted is None:
            self.pending_error = None  # it was about the step that is abandoned here

    def reconnect_alone(self) -> None:
        pending, self.pending_error = self.pending_error, None
        if pending is not None and (pending.epoch is None or (pending.epoch == self._epoch and not self.down)):
            raise pending.error
        if self._aborted is not None:
            raise WorldError(self._aborted)
        if self.down:
            super().reconnect_alone()

    def close(self) -> None:
        self._unwatched = True
        self._publish_exit()
        super().close()
        self._watchdog.remove(self)

    def poll(self) -> None:
        """Check whether this rank waits in vain. The watchdog's thread calls it every POLL seconds."""
        if self._unwatched:
            return
        # read before anything from the store: the other ranks may go on with this one meanwhile, and then it launches more
        launched, epoch, detector, last = self.launched(), self._epoch, self.detector, self._last
        now = time.monotonic()
        if last is not self._checked[0]:
            self._checked = last, now
        try:
            if last is not None and now - self._checked[1] >= STALL_SECONDS:
                self._checked = last, now
                self._check_launches(launched, epoch)
                self._failures = 0
                if last is self._last and not self.down and not detector.host_waits:
                    detector.publish(last()._replace(on_device=True))
            if detector.fatal is not None:
                raise WorldError(detector.fatal)
        except WorldError as failure:
            self._unwatched = True
            if self._device_may_wait_forever:
                self._watchdog.abort_all(failure)
        except RuntimeError:
            self._failures += 1
            self._unwatched = self._failures >= FAILURES

    def _check_launches(self, launched: Mapping[str, int], epoch: int) -> None:
        """Compare the launches of this rank with those of peers that abandoned the step or ended.

        If this rank has launched nothing more than a peer that abandoned the step, its next call raises.

        Raises:
            PeerFailed: this rank has launched more, and waits for ever.
            WorldError: a rank has written that no rank can go on.
        """
        gone = self._ended_ranks()  # read first: a rank that has ended since may have abandoned the step before
        failures = self.abandonments(epoch)
        writers = {writer for *_, writer, _ in failures}
        for rank, unit, reason, _, theirs in failures:
            if _is_more(launched, theirs) or not (self.counts_all or self._rank in writers):
                raise abandoned_by(rank, unit, reason, remedy="")
        # before it is said that a rank has ended: it may have written first why no rank can go on
        self.detector.read_fatal()
        if self.detector.fatal is not None:
            raise WorldError(self.detector.fatal)
        self._raise_fatal()
        # the launches of a rank that failed and then ended may not have run to their end
        if lost := [rank for rank in gone if rank in writers or _is_more(launched, self._exit_of(rank).launched)]:
            self._fail_ended(lost, ENDED, remedy="")
        if failures and self._rank not in writers and self._epoch == epoch and not self.down:
            self.pending_error = PendingError(epoch, abandoned_by(*failures[0][:3]))

    def prepare_abort(self, failure: WorldError) -> None:
        """From now on every call raises, because the collectives in flight are about to be aborted."""
        text, where = str(failure), self.ranks[self._rank]
        if ABORTED not in text:
            text = f"{text} {ABORTED} {where} has been aborted, and its parameters may hold what that left. {RESTART}"
        error = WorldError(text)
        if isinstance(failure, PeerFailed):
            error = PeerFailed(text, failure.rank, failure.unit, failure.reason)
        self._unwatched, self._aborted, self.pending_error = True, text, PendingError(None, error)
        self.detector.declare_fatal(text)
        self._device_may_wait_forever = True
        self._publish_fatal(text)


def _is_more(mine: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether some communicator has more launches in `mine` than in `theirs`."""
    return any(count > theirs.get(name, 0) for name, count in mine.items())


def _quietly(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the group may have been destroyed
        abort()
