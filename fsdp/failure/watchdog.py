"""Collectives on a device: a thread looks after them, because the host that launched them has gone on.

[Note: waiting on a device]
A wait on a device makes a stream wait. The host goes on until it wants a number, and waits in CUDA, where nobody can look for a
reason. So a thread does: when nothing was launched for PATIENCE seconds, it says in the store what came last, and reads what
the others have said, as a host that waits does (desync.py). While calls are launched it asks nobody.

A rank that has launched more than a peer that abandoned the step or ended waits for ever. The thread aborts the communicators,
which frees the streams, and the next call of the engine raises. There is no going on from there: the host may have been a step
ahead, and computed with what the aborted collectives left. Ranks that failed alike have launched the same, and go on.
"""

import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Thread, current_thread
from typing import Any, Final, NamedTuple

from fsdp.errors import PeerFailed, WorldError
from fsdp.failure.desync import PATIENCE, Note, Store
from fsdp.failure.peers import CLOSING, RESTART, Lines, abandoned_by

POLL: Final = 0.5
"""Seconds between two looks at what was launched last."""
ABORTING: Final = 10.0
"""Seconds after which an abort is left to itself."""
FAILURES: Final = 5
"""Looks at a store that fail, one after the other, until it is taken to be gone."""
ABORTED: Final = "What was in flight on the device of rank"


class Device:
    """The device of this process: one thread looks after all groups that communicate there."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[DeviceLines]] = []
        self._ended = Event()
        self._thread: Thread | None = None

    def add(self, lines: "DeviceLines") -> None:
        """Look after one more group."""
        self._groups.append(weakref.ref(lines))
        if self._thread is None:
            self._ended = Event()
            self._thread = Thread(target=self._run, args=(self._ended,), name="fsdp looks after a device", daemon=True)
            self._thread.start()

    def remove(self, lines: "DeviceLines") -> None:
        """Look after it no more."""
        self._groups = [group for group in self._groups if group() not in (None, lines)]
        if not self._groups and self._thread is not None:
            self._ended.set()
            thread, self._thread = self._thread, None
            if thread is not current_thread():
                thread.join(CLOSING)

    def _run(self, ended: Event) -> None:
        while not ended.wait(POLL):
            for group in self._living():
                group.look()

    def _living(self) -> "list[DeviceLines]":
        return [lines for group in self._groups if (lines := group()) is not None]

    def lose(self, failure: WorldError) -> None:
        """This rank waits for ever: end whatever is in flight, in all groups, which may wait for each other on the device."""
        groups = self._living()
        for lines in groups:
            lines.is_lost(failure)
        # communicators may wait for each other in an abort as well, so none waits for another's turn
        aborts = [abort for lines in groups for abort in lines.aborts]
        threads = [Thread(target=_quietly, args=(abort,), name="fsdp aborts", daemon=True) for abort in aborts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ABORTING)


class Refusal(NamedTuple):
    """What the next call raises."""

    epoch: int | None
    """Unless this one is over by then; None: in any case."""
    error: WorldError


class DeviceLines(Lines):
    """The channels of a group whose collectives are on a device, those on the host as they are elsewhere."""

    def __init__(
        self,
        store: Store,
        scope: Callable[[str], Store],
        ranks: Sequence[int],
        rank: int,
        connect: Callable[[str], Any] | None,
        device: Device,
    ) -> None:
        self.aborts: list[Callable[[], None]] = []
        """For each communicator: ends what it has in flight."""
        self._launched = Counter[str]()
        """By channel, since the group was opened."""
        self._last: Callable[[], Note] | None = None
        """What to say of the last call."""
        self._looked: tuple[Callable[[], Note] | None, float] = None, 0.0
        """What was the last call, and when that was seen to be so, or asked about."""
        self._failures = 0
        self._lost: str | None = None
        """Why everything here has been aborted."""
        self._over = False
        """Nobody looks any more."""
        self._device = device
        super().__init__(store, scope, ranks, rank, connect)
        self._speaks = True
        device.add(self)

    def _start(self) -> None:
        self._last = None  # before the new watch, which must not hear of it
        super()._start()

    def launched(self) -> dict[str, int]:
        # one whose first call failed has launched nothing
        return {channel: count for channel, count in dict(self._launched).items() if count}

    def launch_on_device(self, channel: str, note: Callable[[], Note], launch: Callable[[], Any]) -> Any:
        # counted before, because the first call of a communicator waits for all ranks
        self._launched[channel] += 1
        self._last = note
        try:
            return launch()
        except RuntimeError as failure:
            self._launched[channel] -= 1
            refusal, self.refusal = self.refusal, None
            if refusal is not None:
                raise refusal.error from failure
            raise

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        super().abandon(unit, failure)
        if self._lost is None:
            self.refusal = None  # this is the step it is about

    def connect_anew(self) -> None:
        refusal, self.refusal = self.refusal, None
        if refusal is not None and (refusal.epoch is None or (refusal.epoch == self._epoch and not self.down)):
            raise refusal.error
        if self._lost is not None:
            raise WorldError(self._lost)
        if self.down:
            super().connect_anew()

    def close(self) -> None:
        self._over = True
        self._say_gone()
        super().close()
        self._device.remove(self)

    def look(self) -> None:
        """Called by a thread again and again: does this rank wait in vain?"""
        if self._over:
            return
        # read before anything that others have said: they may go on with this rank meanwhile, and it launches more
        launched, epoch, watch, last = self.launched(), self._epoch, self.watch, self._last
        now = time.monotonic()
        if last is not self._looked[0]:
            self._looked = last, now
        try:
            if last is not None and now - self._looked[1] >= PATIENCE:
                self._looked = last, now
                self._ask(launched, epoch)
                self._failures = 0
                if last is self._last and not self.down and not watch.host_waits:
                    watch.tell(last()._replace(on_device=True))
            if watch.trouble is not None:
                raise WorldError(watch.trouble)
        except WorldError as failure:
            self._over = True
            if self._in_vain:
                self._device.lose(failure)
        except RuntimeError:
            self._failures += 1
            self._over = self._failures >= FAILURES

    def _ask(self, launched: Mapping[str, int], epoch: int) -> None:
        """Has a peer abandoned the step, or ended? If this rank has launched nothing more than it, its next call is refused.

        Raises:
            PeerFailed: it has launched more.
            WorldError: a peer has given up because nobody can go on.
        """
        gone = self._gone()  # asked first: who has ended since may have abandoned the step before
        keys = [f"abandoned/{epoch}/{number + 1}" for number in range(self._store.add(f"abandoned/{epoch}", 0))]
        notes = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]  # or it is being written
        for rank, unit, reason, _, theirs in notes:
            if _is_more(launched, theirs):
                raise abandoned_by(rank, unit, reason, remedy="")
        writers = {writer for *_, writer, _ in notes}
        # what was launched by one that failed and ended may not have run to its end
        if lost := [rank for rank in gone if rank in writers or _is_more(launched, self._launched_by(rank))]:
            self._fail(lost, "has ended, while this rank waited for it", remedy="")
        self._refuse_hopeless()
        if notes and self._rank not in writers and self._epoch == epoch and not self.down:
            self.refusal = Refusal(epoch, abandoned_by(*notes[0][:3]))

    def _launched_by(self, rank: int) -> dict[str, int]:
        """All that a rank which has ended had launched; nothing if it did not say so."""
        key = f"gone/{rank}"
        found: dict[str, int] = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return found

    def is_lost(self, failure: WorldError) -> None:
        """What is in flight here is about to be aborted."""
        text, where = str(failure), self._ranks[self._rank]
        if ABORTED not in text:
            text = f"{text} {ABORTED} {where} has been aborted, and its parameters may hold what that left. {RESTART}"
        error = WorldError(text)
        if isinstance(failure, PeerFailed):
            error = PeerFailed(text, failure.rank, failure.unit, failure.reason)
        self._over, self._lost, self.refusal = True, text, Refusal(None, error)
        self.watch.trouble, self._in_vain = text, True
        self._say_hopeless(text)


def _is_more(mine: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether something was launched here and not there."""
    return any(count > theirs.get(channel, 0) for channel, count in mine.items())


def _quietly(abort: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the group may have been destroyed
        abort()
