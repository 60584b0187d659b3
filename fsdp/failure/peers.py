"""The connections of a group's channels, which a rank hangs up when it abandons a step, so that the others hear of it.

[Note: how a failure travels]
Over gloo the channels have connections of their own. A rank that abandons a step writes who, where and why to the group's store
and closes them: whatever waits for it breaks at once, on every rank, and nothing is in flight any more that could write memory
that was given back. On whom it breaks, reads the store. A rank that died has written nothing: it is looked for among the
processes of this host, and then the others call the roll. When every rank has hung up and wants to go on, they meet in the store
and connect anew. While all goes well nobody asks anything. Over NCCL there are no connections to break: see watchdog.py.
"""

import atexit
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, Final, NoReturn

from fsdp.errors import PeerFailed, ShardingError, WorldError
from fsdp.failure.desync import AGAIN, Note, Store, Trail, Watch
from fsdp.failure.liveness import is_dead, this_process

SECONDS: Final = "FSDP_PEER_SECONDS"
"""The environment variable for how long a rank whose connections broke looks for the reason; 2 if it is not set."""
RETURN_SECONDS: Final = "FSDP_RETURN_SECONDS"
"""The one for how long a rank that wants to go on waits for the others; 60 if it is not set."""
CLOSING: Final = 2.0
"""Seconds that are spent on closing connections at an end."""
RESTART: Final = "Start the job again from a checkpoint."


class Lines:
    """The channels of one group: their connections, and what is known of the peers."""

    def __init__(
        self,
        store: Store,
        scope: Callable[[str], Store],
        ranks: Sequence[int],
        rank: int,
        connect: Callable[[str], Any] | None,
    ) -> None:
        self.completed = 0
        """Backwards that ended well."""
        self._store = store
        self._scope = scope
        self._ranks = tuple(ranks)
        """As the user counts them."""
        self._rank = rank
        self._channels: list[str] = []
        self._connect = connect
        self._speaks = connect is not None
        """Whether the others hear of a failure."""
        self._patience = seconds(SECONDS, 2.0)
        self._return_patience = seconds(RETURN_SECONDS, 60.0)
        self._epoch = 0
        self._neighbours: list[Any] = []
        """The processes of this host, each with its rank, in the order in which they said so."""
        self._process, self._said_gone = os.getpid(), False
        self.connections: dict[str, Any] = {}
        """What carries the collectives of a channel on the host, unless that is the group itself."""
        self._in_vain = True
        """Whether something may wait on a device for ever, if nobody can go on."""
        self._closing: Thread | None = None
        self.down = False
        """Hung up; the next call connects anew."""
        self.refusal: Any = None
        """If not None, the next call asks `connect_anew` whether it may be made."""
        self._host = f"on/{this_process()[0]}"
        number = store.add(self._host, 1)
        store.set(f"{self._host}/{number}", json.dumps((rank, this_process())))
        _living.add(self)
        self._start()

    def _start(self) -> None:
        epoch = self._epoch
        self.watch = Watch(self._scope(f"{epoch}"), self._rank, len(self._ranks))
        self.watch.ask_for_peers, self.watch.hang_up, self.watch.blame = self._ask_for_peers, self.hang_up, self._blame
        self.trails: dict[str, Trail] = {}
        for channel in self._channels:
            self._connect_channel(channel)
        self.down = False

    def open(self, channel: str) -> None:
        """One more channel. Every rank opens the same ones in the same order."""
        self._channels.append(channel)
        if not self.down:
            self._connect_channel(channel)

    def _connect_channel(self, channel: str) -> None:
        self.trails[channel] = Trail(self.watch, channel)
        if self._connect is not None:
            self.connections[channel] = self._connect(f"{self._epoch}/{channel}")

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """This rank gives up a step: say why, and hang up."""
        if not self._speaks:
            return
        if isinstance(failure, WorldError) and not isinstance(failure, PeerFailed):
            self._say_hopeless(str(failure))
        if self.down:
            return
        # on a mesh, who hears of a failure in one group tells those of the others
        why: tuple[int, str | None, str]
        if isinstance(failure, PeerFailed):
            why = failure.rank, failure.unit, failure.reason
        else:
            why = self._ranks[self._rank], unit, "an error" if failure is None else f"{type(failure).__name__}: {failure}"
        with suppress(RuntimeError):  # the store may be gone
            number = self._store.add(f"abandoned/{self._epoch}", 1)
            self._store.set(f"abandoned/{self._epoch}/{number}", json.dumps((*why, self._rank, self.launched())))
        self.hang_up()

    def launched(self) -> dict[str, int]:
        """How many collectives on a device, by channel, as far as anybody looks after them."""
        return {}

    def launch_on_device(self, channel: str, note: Callable[[], Note], launch: Callable[[], Any]) -> Any:
        """Call `launch`. The host does not wait for what it launches."""
        return launch()

    def _say_hopeless(self, why: str) -> None:
        """Nobody can go on, in any group of this model: those who want to, and wait for this rank, are told."""
        self.watch.trouble = self.watch.trouble or why
        with suppress(RuntimeError):
            if not self._store.check(["hopeless"]):
                self._store.set("hopeless", json.dumps((self.watch.trouble, self._in_vain)))

    def _refuse_hopeless(self) -> None:
        if self._store.check(["hopeless"]):
            self.watch.trouble, self._in_vain = json.loads(self._store.get("hopeless"))
            raise WorldError(self.watch.trouble)

    def begin_again(self, channel: str, unit: str) -> PeerFailed | None:
        """A forward begins, though no backward came to the one before: go on when that is so on every rank.

        If the others are in that backward, they give it up, and what they are told is returned.
        """
        if not self._speaks or self.down:
            return None
        try:
            self.trails[channel].before(AGAIN, unit, 0)
        except PeerFailed as told:
            return told  # whoever is gone for good is missed when this rank connects anew
        return None

    @property
    def epoch(self) -> int:
        """Grows with every step that is abandoned, by whichever model on the group."""
        return self._epoch + self.down  # connecting anew makes no difference

    def hang_up(self) -> None:
        """Close the connections. Idempotent."""
        if self.down:
            return
        self.down = self._speaks
        connections, self.connections = self.connections, {}
        # closing waits for collectives in flight, which may wait for the peers to hang up as well
        self._closing = Thread(target=connections.clear, name="fsdp hangs up", daemon=True)
        self._closing.start()

    def close(self) -> None:
        """The group is destroyed, or the process ends: a thread that still closes something then would abort it."""
        self.hang_up()
        self._connect, self._speaks = None, False
        if self._closing is not None:
            self._closing.join(CLOSING)

    def connect_anew(self) -> None:
        """Meet the others, who have all abandoned the step, and connect.

        Raises:
            PeerFailed: a rank is gone, or does not come back.
            WorldError: some ranks have completed a backward that others abandoned, or launched more on a device, or they
                disagreed before.
        """
        if self.watch.trouble is not None:
            raise WorldError(self.watch.trouble)
        epoch = self._epoch + 1
        keys = [f"back/{epoch}/{rank}" for rank in range(len(self._ranks))]
        self._store.set(keys[self._rank], json.dumps((self.completed, self.launched())))
        begin, pause = time.monotonic(), 0.001
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            gone = self._gone()
            # who has ended since has said before that it came back, or that nobody can go on
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:
                self._refuse_hopeless()
            if ended := [rank for rank in gone if rank in missing]:
                self._fail(ended, "has ended, while this rank waited for it to go on after an abandoned step")
            if missing and time.monotonic() - begin > self._return_patience:
                self._fail(missing, f"has not come back within {self._return_patience:g} s after a step was abandoned")
        said = [json.loads(self._store.get(key)) for key in keys]
        more = next((rank for rank, (_, launched) in enumerate(said) if launched != said[0][1]), None)
        counts = [completed for completed, _ in said]
        if len(set(counts)) > 1:
            self._in_vain = more is not None
            ahead, behind = counts.index(max(counts)), counts.index(min(counts))
            self.watch.trouble = (
                f"rank {self._ranks[ahead]} has completed a backward that rank {self._ranks[behind]} has abandoned, so their "
                "parameters may be a step apart: load a checkpoint, on all ranks."
            )
            raise WorldError(self.watch.trouble)
        if more is not None:
            self.watch.trouble = (
                f"rank {self._ranks[more]} and rank {self._ranks[0]} have launched different collectives on their devices in the "
                f"step they abandoned, and what waits for them there cannot be taken back. {RESTART}"
            )
            raise WorldError(self.watch.trouble)
        self._epoch = epoch
        try:
            self._start()
        except RuntimeError as failure:
            self.down = True
            self.watch.explain(failure)
            raise

    def _ask_for_peers(self, broken: bool) -> None:
        """This rank waits, or its connections broke: is a peer the reason?

        Raises:
            PeerFailed: it is.
            WorldError: it has given up because nobody can go on.
        """
        begin = time.monotonic()
        if broken:
            self._store.set(f"here/{self._epoch}/{self._rank}", "")
        while True:
            gone = self._gone()  # asked first: who has ended since may have abandoned the step before
            if self._store.add(f"abandoned/{self._epoch}", 0):
                self._refuse_hopeless()
                self._refuse_abandoned()
            if gone:
                self._fail(gone, "has ended, while this rank waited for it")
            if not broken:
                return
            if time.monotonic() - begin > self._patience:
                missing = [rank for rank in range(len(self._ranks)) if not self._store.check([f"here/{self._epoch}/{rank}"])]
                if missing:
                    self._fail(missing, f"does not answer: its connections broke {self._patience:g} s ago")
                return
            time.sleep(0.02)

    def _refuse_abandoned(self) -> None:
        key = f"abandoned/{self._epoch}/1"
        if self._store.check([key]):  # or it is being written
            raise abandoned_by(*json.loads(self._store.get(key))[:3])

    def _blame(self, rank: int) -> NoReturn:
        name, reason = self._ranks[rank], f"a {AGAIN}, which failed outside the model or was left out there"
        raise abandoned_by(name, None, reason)

    def _gone(self) -> list[int]:
        """The others that have ended."""
        some = self._store.check(["ended"])
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        dead = self._dead()
        return [rank for rank in others if rank in dead or (some and self._store.check([f"gone/{rank}"]))]

    def _dead(self) -> set[int]:
        """The ranks whose processes were on this host and are no more."""
        while self._store.check([key := f"{self._host}/{len(self._neighbours) + 1}"]):
            self._neighbours.append(json.loads(self._store.get(key)))
        return {rank for rank, process in self._neighbours if is_dead(process)}

    def _say_gone(self) -> None:
        if self._said_gone or os.getpid() != self._process:
            return  # a child of this process ends
        self._said_gone = True
        with suppress(RuntimeError):
            self._store.set(f"gone/{self._rank}", json.dumps(self.launched()))
            self._store.set("ended", "")

    def say_goodbye(self) -> None:
        """This process ends."""
        self._say_gone()
        self.close()

    def _fail(self, ranks: Sequence[int], reason: str, remedy: str = f" {RESTART}") -> NoReturn:
        names = [self._ranks[rank] for rank in ranks]
        who = f"rank {names[0]}" if len(names) == 1 else f"each of the ranks {', '.join(map(str, names))}"
        raise PeerFailed(f"{who} {reason}.{remedy}", names[0], None, reason)


def abandoned_by(
    rank: int, unit: str | None, reason: str, remedy: str = " This step is over here too; start it again on all ranks, or end."
) -> PeerFailed:
    where = "" if unit is None else f", in unit {unit!r},"
    return PeerFailed(f"rank {rank} has abandoned the step{where} with {reason}.{remedy}", rank, unit, reason)


_living: "weakref.WeakSet[Lines]" = weakref.WeakSet()


@atexit.register
def _say_goodbye() -> None:
    for lines in list(_living):
        lines.say_goodbye()


def seconds(variable: str, otherwise: float) -> float:
    """A time from the environment.

    Raises:
        ShardingError: it is no number of seconds.
    """
    text = os.environ.get(variable, "")
    try:
        found = float(text or otherwise)
    except ValueError:
        found = -1.0
    if found <= 0:
        raise ShardingError(f"{variable} must be a number of seconds, not {text!r}.")
    return found
