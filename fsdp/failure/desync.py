"""Whether the ranks of a real group call the same collectives in the same order: asked before a wrong one is launched.

[Note: who asks whom]
So far all ranks have made the same calls, so all of them predict the same next one. A rank that makes the predicted
call asks nobody: a steady training loop costs nothing. A rank about to make any other call says so in the group's
store, and goes on when every rank has said the same. If a peer made the predicted call meanwhile, it waits for a rank
that will not come; whoever has waited for PATIENCE writes down what for, reads what the others have written, and both
know who disagrees with whom. A collective that does not match is never launched: over gloo it would mix the
parameters of two units of one size, and end the process at two of different size.

[Note: a step that fails where nothing hears it]
An exception in the loss, on one rank, is seen by no hook. Its next forward begins though no backward came to the last
one, and says so first, as if it were a collective (`AGAIN`). Where all ranks leave backwards out, all of them say it, and
predict it the next time. If the others have gone on into that backward, they are told that the rank gave it up.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

from fsdp.errors import WorldError, name_ranks

PATIENCE: Final = 2.0
"""Seconds a rank waits before it looks for the reason."""
RECENT: Final = 8
"""How many calls a channel remembers to tell of."""
MEMORY: Final = 4
"""Calls a prediction is made from."""
REMEDY: Final = "Call the same in the same order."
AGAIN: Final = "forward before the backward of its last one"
"""Not a collective, see the note above."""
LAG: Final = 64
"""Agreements that stay in the store; a rank that has launched the call after one may be sure that all have read it."""


Made = tuple[str, str, int]
"""What, for which unit, bytes."""


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
    agreed: str = ""
    """The call that all ranks have made here so far, if they were here."""
    on_device: bool = False
    """It was launched last. Whether the host waits for it is not known."""

    def made_on(self, channel: str) -> int:
        """How many calls it has made on a channel, which it may have opened since."""
        return self.launched.get(channel, 0)

    @property
    def begins_again(self) -> bool:
        """See the note on steps that fail where nothing hears it."""
        return self.call.startswith(AGAIN)


class Watch:
    """What the channels of one group share: the store, and who waits for what."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.launched: dict[str, int] = {}
        self.trouble: str | None = None
        """Why the group is of no use any more."""
        self.host_waits = False
        """It has said so in the store."""
        self.ask_for_peers: Callable[[bool], None] = _nothing
        """Raises PeerFailed if a peer is why this rank waits, or (if True) why its connections broke."""
        self.hang_up: Callable[[], None] = _nothing
        """Closes the connections."""
        self.blame: Callable[[int], None] = _nothing
        """Raises PeerFailed: a rank has begun again, while this one waited for it."""

    def look(self, note: Note) -> None:
        """This rank has waited long: say what for, and find out whether it waits in vain.

        Raises:
            PeerFailed: it does, because a rank is gone or has abandoned the step.
            WorldError: it does, because the ranks disagree.
        """
        self.ask_for_peers(False)
        self.host_waits = True
        self.tell(note)
        if self.trouble is None:
            notes = self._read()
            self.trouble = self._disagreement(notes)
            if self.trouble is None and _nobody_can_go_on(notes, self.size):
                time.sleep(PATIENCE / 4)
                if self._read() == notes:  # what was read one after the other was true at one time
                    for rank, one in notes.items():
                        if one.begins_again:
                            self.blame(rank)
                    self.trouble = _describe_deadlock(notes)
            if self.trouble is not None:
                self.store.set("trouble", self.trouble)
        if self.trouble is not None:
            self.hang_up()  # whoever waits for this rank looks for the reason at once
            raise WorldError(self.trouble)

    def tell(self, note: Note) -> None:
        """Say what this rank waits for, and hear whether somebody knows that nobody can go on."""
        self.store.set(f"waits/{self.rank}", json.dumps(note))
        if self.trouble is None and self.store.check(["trouble"]):
            self.trouble = self.store.get("trouble").decode()

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
        self.host_waits = False
        self.store.set(f"waits/{self.rank}", "null")

    def _disagreement(self, notes: dict[int, Note]) -> str | None:
        """The ranks that want different calls in one place, if there are any.

        Raises:
            PeerFailed: one of them has begun again.
        """
        apart = None
        for rank, note in notes.items():
            here: dict[str, list[int]] = {note.call: []}
            for other, theirs in notes.items():
                if theirs.channel == note.channel and theirs.number == note.number:
                    here.setdefault(theirs.call, []).append(other)
            gone_on = [other for other, theirs in notes.items() if note.asks and theirs.made_on(note.channel) >= note.number]
            if gone_on and self.store.add(note.asks, 0) >= self.size:
                gone_on = []  # with the same call, since they wrote
            if note.begins_again and (gone_on or len(here) > 1):
                self.blame(rank)
            if gone_on or len(here) > 1:
                followers = sorted({*here.pop(note.agreed, ()), *gone_on})
                calls = [f"{name_ranks(ranks)} called {call}" for call, ranks in here.items()]
                if followers:
                    agreed = f"the agreed schedule has {note.agreed}, which {name_ranks(followers)} followed"
                    apart = apart or f"{_place(note)}: {' and '.join(calls)} where {agreed}. {REMEDY}"
                else:
                    apart = apart or f"{_place(note)}: {calls[0]} where {' and '.join(calls[1:])}. {REMEDY}"
        return apart

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
        self._here = Here(())
        self._known = {self._here.recent: self._here}
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
        here = self._here
        number = self._number = self._number + 1

        def note() -> Note:
            return Note(self._channel, number, _text(call), "", dict(watch.launched), _text(here.agreed) if here.agreed else "")

        # one comparison, and no hash, for each call of a steady loop
        if here.agreed != call:
            self._agree(note())
            recent = (*here.recent, call)[-MEMORY:]
            here.agreed, here.then = call, self._known.setdefault(recent, Here(recent))
        self._here = here.then
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


class Here:
    """Where a channel is: after these calls. And the call that all ranks have made from here so far."""

    __slots__ = ("agreed", "recent", "then")

    def __init__(self, recent: tuple[Made, ...]) -> None:
        self.recent = recent
        self.agreed: Made | None = None
        self.then: Here
        """Where that leads."""


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


def _nothing(*_: Any) -> None:
    return


def _text(call: Made) -> str:
    kind, label, size = call
    return f"{kind}({label!r}, {size} bytes)"


def _place(note: Note) -> str:
    return f"The ranks disagree on operation {note.number} of channel {note.channel!r}"


def _nobody_can_go_on(notes: dict[int, Note], size: int) -> bool:
    """Every rank waits for a call that some rank has not made."""
    return len(notes) == size and all(_absent(note, notes) and not note.on_device for note in notes.values())


def _absent(note: Note, notes: dict[int, Note]) -> list[int]:
    """The ranks that have not made the call that `note` waits for, nor ask for it."""
    return [
        rank
        for rank, theirs in notes.items()
        if theirs.made_on(note.channel) < note.number and not (theirs.asks and theirs.asks == note.asks)
    ]


def _describe_deadlock(notes: dict[int, Note]) -> str:
    stories = [
        f"Rank {rank} waits for {note.call}, operation {note.number} of channel {note.channel!r}, which "
        f"{' and '.join(f'rank {other}' for other in _absent(note, notes))} did not call."
        for rank, note in sorted(notes.items())
    ]
    return " ".join(["Deadlock: nobody can go on.", *stories])
