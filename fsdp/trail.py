"""Whether the ranks of a real group call the same collectives in the same order: asked before a wrong one is launched.

[Note: who asks whom]
So far all ranks have made the same calls, so all of them predict the same next one. A rank that makes the predicted
call asks nobody: a steady training loop costs nothing. A rank about to make any other call says so in the group's
store, and goes on when every rank has said the same. If a peer made the predicted call meanwhile, it waits for a rank
that will not come; whoever has waited for PATIENCE writes down what for, reads what the others have written, and both
know who disagrees with whom. A collective that does not match is never launched: over gloo it would mix the
parameters of two units of one size, and end the process at two of different size.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

from fsdp.errors import WorldError

PATIENCE: Final = 2.0
"""Seconds a rank waits before it looks for the reason."""
RECENT: Final = 8
"""How many calls a channel remembers to tell of."""
MEMORY: Final = 4
"""Calls a prediction is made from."""
REMEDY: Final = "Call the same in the same order."
LAG: Final = 64
"""Agreements that stay in the store; a rank that has launched the call after one may be sure that all have read it."""


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Note(NamedTuple):
    """What one rank waits for."""

    channel: str
    number: int
    """Of the call, on its channel."""
    call: str
    asks: str
    """Not empty: it has not made the call yet, and counts here who else wants to."""
    launched: dict[str, int]
    """How many calls it has made on each channel."""


class Watch:
    """What the channels of one group share: the store, and who waits for what."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.launched: dict[str, int] = {}
        self.trouble: str | None = None
        """Why the group is of no use any more."""
        self.ask_for_peers: Callable[[bool], None] = _nothing
        """Raises PeerFailed if a peer is why this rank waits, or (if True) why its connections broke."""
        self.hang_up: Callable[[], None] = _nothing
        """Closes the connections."""

    def look(self, note: Note) -> None:
        """This rank has waited long: say what for, and find out whether it waits in vain.

        Raises:
            PeerFailed: it does, because a rank is gone or has abandoned the step.
            WorldError: it does, because the ranks disagree.
        """
        self.ask_for_peers(False)
        self.store.set(f"waits/{self.rank}", json.dumps(note))
        if self.trouble is None and self.store.check(["trouble"]):
            self.trouble = self.store.get("trouble").decode()
        if self.trouble is None:
            notes = self._read()
            self.trouble = self._disagreement(notes)
            if self.trouble is None and _nobody_can_go_on(notes, self.size):
                time.sleep(PATIENCE / 4)
                if self._read() == notes:  # what was read one after the other was true at one time
                    self.trouble = _describe_deadlock(notes)
            if self.trouble is not None:
                self.store.set("trouble", self.trouble)
        if self.trouble is not None:
            raise WorldError(self.trouble)

    def explain(self, failure: RuntimeError) -> None:
        """A collective failed: if a peer is the reason, say so instead; or where everyone is, as far as they have said.

        Raises:
            PeerFailed: a rank is gone or has abandoned the step.
            WorldError: the ranks disagree.
        """
        with suppress(RuntimeError):  # the store may be gone as well
            if self.trouble is None and self.store.check(["trouble"]):
                self.trouble = self.store.get("trouble").decode()
        if self.trouble is not None:
            raise WorldError(self.trouble) from failure
        late = "imed out" in str(failure)
        try:
            self.ask_for_peers(not late)
        except WorldError as reason:
            raise reason from failure
        except RuntimeError:
            failure.add_note("fsdp: the store of the group does not answer; the process that holds it may have ended.")
            return
        waits = [f"rank {rank} waits for {note.call}" for rank, note in self._read().items()]
        failure.add_note(f"fsdp: {'; '.join(waits) or 'no rank has waited long'}. Ranks that are not named compute, or hang.")

    def goes_on(self) -> None:
        """It did not wait in vain."""
        self.store.set(f"waits/{self.rank}", "null")

    def _disagreement(self, notes: dict[int, Note]) -> str | None:
        """Two ranks that want different calls in one place, if there are any."""
        for rank, note in notes.items():
            place = f"The ranks disagree on operation {note.number} of channel {note.channel!r}"
            for other, theirs in notes.items():
                if theirs.channel == note.channel and theirs.number == note.number and theirs.call != note.call:
                    return f"{place}: rank {rank} called {note.call} where rank {other} called {theirs.call}. {REMEDY}"
                made = theirs.launched[note.channel] >= note.number
                if made and note.asks and self.store.add(note.asks, 0) < self.size:
                    return f"{place}: rank {rank} is about to call {note.call}, rank {other} has made another call. {REMEDY}"
        return None

    def _read(self) -> dict[int, Note]:
        keys = {rank: f"waits/{rank}" for rank in range(self.size)}
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        return {rank: Note(*fields) for rank, fields in found.items() if fields is not None}


class Trail:
    """The calls of one channel."""

    def __init__(self, watch: Watch, channel: str) -> None:
        self._watch = watch
        self._channel = channel
        self._number = 0
        self._calls: dict[tuple[str, str, int], int] = {}
        """A number for each different call."""
        self._recent: tuple[int, ...] = (-1,) * MEMORY
        self._followed_by: dict[tuple[int, ...], int] = {}
        self._agreed: list[str] = []
        watch.launched[channel] = 0

    def before(self, kind: str, label: str, size: int) -> Callable[[], Note]:
        """A call is about to be made; return what to say if it takes long.

        Raises:
            WorldError: other ranks make another call.
        """
        watch = self._watch
        if watch.trouble is not None:
            raise WorldError(watch.trouble)
        call = (kind, label, size)
        known = self._calls.setdefault(call, len(self._calls))
        recent = self._recent
        number = self._number = self._number + 1

        def note() -> Note:
            return Note(self._channel, number, f"{kind}({label!r}, {size} bytes)", "", dict(watch.launched))

        if self._followed_by.get(recent) != known:
            self._agree(note())
            self._followed_by[recent] = known
        self._recent = (*recent[1:], known)
        watch.launched[self._channel] = number
        return note

    def _agree(self, note: Note) -> None:
        """Go on when every rank is about to make this call."""
        store, size = self._watch.store, self._watch.size
        key = f"{note.channel}/{note.number}/{sha256(note.call.encode()).hexdigest()[:16]}"
        note = note._replace(asks=key)
        said = store.add(key, 1)
        begin, pause, told = time.monotonic(), 0.0002, False
        while said < size:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            said = store.add(key, 0)
            if said < size and time.monotonic() - begin > PATIENCE:
                self._watch.look(note)
                begin, told = time.monotonic() - PATIENCE / 2, True
        if told:
            self._watch.goes_on()
        self._agreed.append(key)
        if len(self._agreed) > LAG:
            oldest = self._agreed.pop(0)
            if self._watch.rank == 0:
                store.delete_key(oldest)


class WatchedWork:
    """A collective in flight on the host. Its `wait` looks for the reason if it takes long."""

    __slots__ = ("_note", "_watch", "_work")

    def __init__(self, work: Any, watch: Watch, note: Callable[[], Note]) -> None:
        self._work = work
        self._watch = watch
        self._note = note

    def wait(self) -> None:
        """Return when the result may be used.

        Raises:
            PeerFailed: it will never be, because a rank is gone or has abandoned the step.
            WorldError: it will never be, because the ranks disagree.
        """
        told = False
        try:
            while True:
                if self._watch.trouble is not None and not self._work.is_completed():
                    raise WorldError(self._watch.trouble)
                try:
                    self._work.wait(_PATIENCE)
                except RuntimeError as failure:
                    if self._work.is_completed():
                        # a peer that was told of a disagreement may have gone already
                        self._watch.explain(failure)
                        raise
                    self._watch.look(self._note())
                    told = True
                else:
                    if told:
                        self._watch.goes_on()
                    return
        except WorldError:
            self._end()
            raise

    def _end(self) -> None:
        """What it may yet write is given back now: it must be over before."""
        self._watch.hang_up()
        begin = time.monotonic()
        while not self._work.is_completed() and time.monotonic() - begin < PATIENCE:
            time.sleep(0.01)


_PATIENCE: Final = timedelta(seconds=PATIENCE)


def _nothing(*_: bool) -> None:
    return


def _nobody_can_go_on(notes: dict[int, Note], size: int) -> bool:
    """Every rank waits for a call that some rank has not made."""
    return len(notes) == size and all(_absent(note, notes) for note in notes.values())


def _absent(note: Note, notes: dict[int, Note]) -> list[int]:
    """The ranks that have not made the call that `note` waits for, nor ask for it."""
    return [
        rank
        for rank, theirs in notes.items()
        if theirs.launched[note.channel] < note.number and not (theirs.asks and theirs.asks == note.asks)
    ]


def _describe_deadlock(notes: dict[int, Note]) -> str:
    stories = [
        f"Rank {rank} waits for {note.call}, operation {note.number} of channel {note.channel!r}, which "
        f"{' and '.join(f'rank {other}' for other in _absent(note, notes))} did not call."
        for rank, note in sorted(notes.items())
    ]
    return " ".join(["Deadlock: nobody can go on.", *stories])
