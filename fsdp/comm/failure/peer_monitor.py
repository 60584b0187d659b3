"""Monitors the peers of a group: who abandoned a step, who ended, and how ranks connect again.

[Note: how a failure travels]
Over gloo each communicator has connections of its own. A rank that abandons a step writes its rank, the unit and the reason to
the group's store and closes the connections. Every collective that waits for it then fails at once, on every rank, and nothing
is in flight that could write to released memory. A rank whose collective failed reads the store. A rank that died has written
nothing: its peers look for its process if it was on the same host, and otherwise every rank signs in, and the missing one is
named. When every rank has disconnected and wants to go on, they meet in the store and reconnect. As long as nothing fails, no
rank reads the store. NCCL has no connections that could be closed: see watchdog.py.
"""

import atexit
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import util
from textwrap import shorten
from typing import Any, Final, NamedTuple, NoReturn

from fsdp.comm.failure.desync import TIME_OUT, DesyncDetector, Store
from fsdp.comm.failure.ended_processes import Neighbours
from fsdp.comm.failure.job_waits import JobWaits
from fsdp.comm.failure.pending_call import OPENS, RESTART_CALL, RESTARTED, PendingCall, describe_deadlock, steps_apart
from fsdp.comm.failure.unreachable_hosts import Connections
from fsdp.errors import EVERY_RANK, FEWER_BATCHES, PeerFailed, ShardingError, WorldError

_GONE: Final = ("has ended", "does not answer", "has not come back")
"""How the reasons begin that a rank gives for one that cannot speak for itself."""
_ABSENT: Final = "has not called"
"""How the reason begins that a rank gives for one that has not made a call within the time-out, and may still come."""
_KILLED: Final = "it was killed"
_LONGEST: Final = 500
"""Characters of an error that other ranks read."""
RESTART: Final = "Start the job again from a checkpoint."
OVER_HERE_TOO: Final = " This step is over here too; start it again on all ranks, or end."


class Exit(NamedTuple):
    """What a process writes when it ends by itself."""

    launched: dict[str, int]
    """Its launches on a device, by communicator."""
    failure: str
    """The first line of the exception that ended it. Empty if there was none."""


class Abandonment(NamedTuple):
    """What a rank writes when it abandons a step."""

    rank: int
    """The rank that is the reason, as the user counts it."""
    unit: str | None
    reason: str
    writer: int
    """The rank that wrote this, in the group."""
    launched: dict[str, int]
    """The launches of that one on a device, by communicator."""


def abandoned_by(rank: int, unit: str | None, reason: str, remedy: str = OVER_HERE_TOO) -> PeerFailed:
    if reason.startswith(_GONE):  # another rank has found that
        return PeerFailed(f"rank {rank} {reason}. {RESTART}", rank, unit, reason)
    if reason.startswith(_ABSENT):
        return PeerFailed(f"rank {rank} {reason}.{remedy}", rank, unit, reason)
    where = "" if unit is None else f", in unit {unit!r},"
    return PeerFailed(f"rank {rank} has abandoned the step{where} with {reason}.{remedy}", rank, unit, reason)


def at_end(function: Callable[[], None]) -> None:
    """Call `function`, perhaps twice, when this process ends, and in each fork of it when that ends. Signals call nothing.

    `atexit` alone is not enough. Up to Python 3.12, a process that `multiprocessing` has forked leaves it out. Since Python 3.13
    it forgets what was registered before the fork.
    """
    atexit.register(function)
    # it runs in the fork after `multiprocessing` has dropped what was registered
    util.register_after_fork(function, lambda one: util.Finalize(None, one, exitpriority=0))


def seconds(variable: str, otherwise: float) -> float:
    """Read a time from the environment.

    Raises:
        ShardingError: the variable is not a positive number of seconds.
    """
    text = os.environ.get(variable, "")
    try:
        found = float(text or otherwise)
    except ValueError:
        found = -1.0
    if found <= 0:
        raise ShardingError(f"{variable} must be a number of seconds, not {text!r}.")
    return found


SECONDS: Final = "FSDP_PEER_SECONDS"
"""The environment variable for the time in which a rank whose connections broke looks for the reason. 2 by default."""
RETURN_SECONDS: Final = "FSDP_RETURN_SECONDS"
"""The environment variable for the time in which a rank that wants to go on waits for the others. 60 by default."""
HOST_SECONDS: Final = "FSDP_HOST_SECONDS"
"""The environment variable for the time after which a host that acknowledges nothing is lost. 30 by default."""
CLOSING: Final = 2.0
"""Seconds that are spent on closing connections when a group is destroyed or the process ends."""
ENDED: Final = "has ended, while this rank waited for it"
ROUTED: Final = "routed"
"""The communicator of a group of the user: see routed_group.py."""
OPENING: Final = "opening"
"""The calls of ranks that are about to connect to each other, as if on a communicator of this name."""


class PendingError(NamedTuple):
    """An error that the next call on a group raises."""

    epoch: int | None
    """The epoch in which it is raised, and no later one. None: in every epoch."""
    error: WorldError


class PeerMonitor:
    """The connections of the communicators over one group, and the state of its other ranks."""

    def __init__(
        self,
        store: Store,
        scope: Callable[[str], Store],
        ranks: Sequence[int],
        rank: int,
        connect: Callable[[str], Any] | None,
        time_out: float = TIME_OUT,
    ) -> None:
        self._time_out = time_out
        """Seconds that a rank waits for the others to make a call."""
        self._completed = 0
        """The number of backwards that ended without an error."""
        self._store = store
        self._scope = scope
        self.ranks = tuple(ranks)
        """The ranks as the user counts them: in the default group."""
        self._rank = rank
        """This rank in this group."""
        self.group = ""
        """The name of the group, which no other group has."""
        self.job: JobWaits
        """What the ranks of the job wait for."""
        self.joined: Sequence[weakref.ref[PeerMonitor]] = ()
        """If a model lies on several groups: the monitors of all of them, in an order that all ranks have."""
        self._comms: list[str] = []
        """The names of the communicators."""
        self._connect = connect
        self._publishes = connect is not None
        """Whether failures of this rank are written to the store."""
        self._patience = seconds(SECONDS, 2.0)
        self._return_patience = seconds(RETURN_SECONDS, 60.0)
        self._tcp = Connections(seconds(HOST_SECONDS, 30.0))
        self._epoch = 0
        self._abandoned = -1
        """The last epoch whose abandoned step this rank has written to the store, or tried to."""
        self.neighbours = Neighbours(store, rank)
        self._process, self._exit_published = os.getpid(), False
        self.connections: dict[str, Any] = {}
        """For each communicator with connections of its own: the process group for its collectives on the host."""
        self._device_may_wait_forever = True
        """True if collectives launched on a device may never finish once this group is declared dead. The watchdog then aborts
        the communicators."""
        self.down = False
        """True if this rank has disconnected. The next call reconnects."""
        self.pending_error: PendingError | None = None
        """If not None, the next call must ask `reconnect` whether it may be made."""
        _living.add(self)
        self._start()

    def _start(self) -> None:
        """Begin an epoch: a new detector and new connections."""
        self.detector = DesyncDetector(self._scope(f"{self._epoch}"), self._rank, self.ranks, self, self._time_out)
        self.sequences = self.detector.sequences
        self.detector.open(OPENING)
        self.end_joint_wait()  # nobody looks any more for the reason of a wait that has failed
        for name in self._comms:
            self._connect_comm(name)
        self.down = False

    def open(self, name: str) -> None:
        """Add a communicator. Every rank adds the same ones in the same order, after it met the others."""
        self._comms.append(name)
        if not self.down:
            self._connect_comm(name)

    def meet(self) -> None:
        """Wait until every rank wraps a module: torch connects ranks without asking whether the others will come.

        Raises:
            PeerFailed: another rank has ended.
            WorldError: another rank waits in another call.
        """
        self.sequences[OPENING].check_call(OPENS, OPENS, 0)

    def _connect_comm(self, name: str) -> None:
        self.detector.open(name)
        if self._connect is not None:
            self.connections[name] = self._tcp.opened_by(partial(self._connect, f"{self._epoch}/{name}"))

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """Write to the store why this rank abandons the step, and disconnect."""
        if not self._publishes:
            return
        if isinstance(failure, WorldError) and not isinstance(failure, PeerFailed):
            self._publish_fatal(str(failure))
        if self._abandoned == self._epoch:
            return
        self._abandoned = self._epoch  # a rank that found a failure while it waited has disconnected, and not said why
        # on a mesh a rank passes the failure of a peer in one group on to its peers in another
        why: tuple[int, str | None, str]
        if isinstance(failure, PeerFailed):
            why = failure.rank, failure.unit, failure.reason
        else:
            why = self.ranks[self._rank], unit, "an error" if failure is None else f"{type(failure).__name__}: {failure}"
        with suppress(RuntimeError):  # the store may have gone
            number = self._store.add(f"abandoned/{self._epoch}", 1)
            self._store.set(f"abandoned/{self._epoch}/{number}", json.dumps((*why, self._rank, self.launched())))
        self.disconnect()

    def backward_completed(self) -> None:
        """Count a backward that ended without an error."""
        self._completed += 1

    def launched(self) -> dict[str, int]:
        """The number of collectives launched on a device, by communicator. Empty if no watchdog watches this group."""
        return {}

    def launch_on_device(self, name: str, describe: Callable[[], PendingCall], launch: Callable[[], Any]) -> Any:
        """Call `launch`. The host will not wait for the collective that it launches."""
        return launch()

    def _publish_fatal(self, why: str) -> None:
        """Declare that no rank can go on, in any group of this model, and write it for the ranks that wait for this one."""
        fatal = self.detector.fatal or why
        self.detector.declare_fatal(fatal)
        with suppress(RuntimeError):
            if not self._store.check(["fatal"]):
                self._store.set("fatal", json.dumps((fatal, self._device_may_wait_forever)))

    def _raise_fatal(self) -> None:
        """Raise WorldError if a rank has written that no rank can go on."""
        if self._store.check(["fatal"]):
            fatal, self._device_may_wait_forever = json.loads(self._store.get("fatal"))
            self._fail_for_good(fatal)

    def _fail_for_good(self, why: str) -> NoReturn:
        self.detector.declare_fatal(why)
        raise WorldError(why)

    def announce_restart(self, name: str, unit: str) -> PeerFailed | None:
        """See `Communicator.announce_restart`; `name`: the communicator on which it is announced."""
        if not self._publishes or self.down:
            return None
        try:
            self.sequences[name].check_call(RESTART_CALL, unit, 0)
        except PeerFailed as failure:
            return failure  # if it is about a rank that has ended, reconnecting will raise
        return None

    @property
    def epoch(self) -> int:
        """A number that increases with every abandoned step of any model on this group."""
        return self._epoch + self.down  # the same before and after reconnecting

    def disconnect(self) -> None:
        """Close the connections. Idempotent."""
        if self.down:
            return
        self.down = self._publishes
        connections, self.connections = self.connections, {}
        is_routed = ROUTED in connections
        self._tcp.close(connections)
        if is_routed:
            self._tcp.cut()  # the user may hold messages in flight, which keep connections open

    def close(self) -> None:
        """Disconnect for good, at the end of the group or process. Waits, because an end would abort a closing thread.

        A fork leaves the connections of its parent alone.
        """
        if os.getpid() != self._process:
            return
        self._wait_until_known()
        self.disconnect()
        self._connect, self._publishes = None, False
        self._tcp.wait_until_closed(CLOSING)

    def reconnect(self) -> None:
        """After an abandoned step, connect in all groups of the model, in one order on all ranks. See `reconnect_alone`.

        A rank that waits in one group may be awaited in another. The group of all ranks is the first: when they meet there, all
        know of the failure.
        """
        for one in [monitor for reference in self.joined if (monitor := reference()) is not None] or [self]:
            if one is self or one.down:
                one.reconnect_alone()

    def reconnect_alone(self) -> None:
        """Wait until every rank has abandoned the step, and connect to all.

        Raises:
            PeerFailed: a rank has ended, or does not come back.
            WorldError: some ranks have completed a backward that others abandoned, or launched more on a device, or the ranks
                have disagreed before.
        """
        self.detector.raise_fatal()
        epoch = self._epoch + 1
        keys = [f"back/{epoch}/{rank}" for rank in range(len(self.ranks))]
        self._store.set(keys[self._rank], json.dumps((self._completed, self.launched())))
        self._wait_for_all(keys)
        states = [json.loads(self._store.get(key)) for key in keys]
        other = next((rank for rank, (_, launched) in enumerate(states) if launched != states[0][1]), None)
        apart = steps_apart({rank: completed for rank, (completed, _) in zip(self.ranks, states, strict=True)})
        if apart is not None:
            self._device_may_wait_forever = other is not None
            self._fail_for_good(apart)
        if other is not None:
            self._fail_for_good(
                f"rank {self.ranks[other]} and rank {self.ranks[0]} have launched different collectives on their devices in "
                f"the step they abandoned, and what waits for them there cannot be taken back. {RESTART}"
            )
        self._epoch = epoch
        try:
            self._start()
        except RuntimeError as failure:
            self.down = True
            self.detector.explain_failure(failure)
            raise

    def _wait_for_all(self, keys: Sequence[str]) -> None:
        """Wait until every rank has set its key in the store.

        Raises:
            PeerFailed: a rank has ended, or does not come back.
            WorldError: a rank has written that no rank can go on.
        """
        begin, pause = time.monotonic(), 0.001
        while not self._store.check(list(keys)):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            gone = self._ended_ranks()
            # read after `gone`: a rank that has ended since set its key before, or wrote that no rank can go on
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:
                self.detector.raise_fatal()
                self._raise_fatal()
            if ended := [rank for rank in gone if rank in missing]:
                self._fail_ended(ended, f"{ENDED} to go on after an abandoned step")
            if missing and time.monotonic() - begin > self._return_patience:
                self._fail(missing, f"has not come back within {self._return_patience:g} s after a step was abandoned")

    def check_peers(self, broken: bool, where: str = "", stalled: bool = False) -> None:
        """Find out whether a peer is the reason why this rank waits (in the call `where`), or, if `broken`, why its connections
        broke. `stalled`: they are broken as well if a host does not answer. After a time-out gloo has closed them itself.

        Raises:
            PeerFailed: it is.
            WorldError: a rank has written that no rank can go on.
        """
        begin = time.monotonic()
        broken = broken or (stalled and self._tcp.stay_lost())
        if broken:
            self._store.set(f"here/{self._epoch}/{self._rank}", "")
        while True:
            # read first: a rank that has ended since may have abandoned the step before, or found why no rank can go on
            gone = self._ended_ranks()
            self.detector.raise_fatal()
            if found := self.abandonments(self._epoch):
                self._raise_fatal()
                raise abandoned_by(*found[0][:3])
            if gone:
                self._fail_ended(gone, ENDED, f" in {where}" if where else "")
            if not broken:
                return
            if time.monotonic() - begin > self._patience:
                missing = [rank for rank in range(len(self.ranks)) if not self._store.check([f"here/{self._epoch}/{rank}"])]
                if missing:
                    self._tcp.cut()
                    self._fail(missing, f"does not answer: its connections broke {self._patience:g} s ago")
                return
            time.sleep(0.02)

    def abandonments(self, epoch: int) -> list[Abandonment]:
        """What ranks have written about the step of an epoch."""
        keys = [f"abandoned/{epoch}/{number + 1}" for number in range(self._store.add(f"abandoned/{epoch}", 0))]
        # the number is counted before the text is written
        return [Abandonment(*json.loads(self._store.get(key))) for key in keys if self._store.check([key])]

    def _wait_until_known(self) -> None:
        """Wait until the other ranks know of the step that this one has abandoned: the store may end with rank 0."""
        end, here = time.monotonic() + self._patience, self.ranks[self._rank] == 0 and self._abandoned == self._epoch
        with suppress(RuntimeError):
            while here and time.monotonic() < end:
                found = self.abandonments(self._epoch)
                know = {*(one.writer for one in found), *self._ended_ranks()}
                lost = {one.rank for one in found if one.reason.startswith(_GONE)}
                if {self.ranks[rank] for rank in know} | lost >= {*self.ranks}:
                    return
                time.sleep(0.02)

    def publish_joint_wait(self, pending: PendingCall) -> None:
        """If this is one of several groups of a model: write for all ranks of the job that this one waits for a call in it."""
        if not self.joined:
            return
        launched = {f"{one.group}/{name}": count for one in list(_living) for name, count in one.detector.launched().items()}
        key, among = pending.key and f"{self.group}/{pending.key}", pending.among or self.ranks
        self.job.publish(pending._replace(comm=f"{self.group}/{pending.comm}", key=key, launched=launched, among=[*among]))

    def find_joint_deadlock(self) -> str | None:
        """Return the error if ranks of the job wait for each other in different groups, and this one for them.

        Raises:
            PeerFailed: they do, because a rank has started another forward.
        """
        found = self.job.find_stuck() if self.joined else {}
        if restarted := [rank for rank, one in found.items() if one.is_restart]:
            raise abandoned_by(restarted[0], None, RESTARTED)
        return describe_deadlock(found, range(max(found) + 1)) if found else None

    def end_joint_wait(self) -> None:
        """This rank waits no longer."""
        if self.joined:
            with suppress(RuntimeError):  # the store may have gone
                self.job.publish(None)

    def end_wait_in_vain(self, why: str) -> None:
        """End the wait of the host for a message that will not come: no rank can go on."""
        self._publish_fatal(why)
        self.disconnect()

    def report_restart(self, rank: int) -> NoReturn:
        """Raise PeerFailed: `rank` has started another forward while this rank waited for it."""
        raise abandoned_by(self.ranks[rank], None, RESTARTED)

    def _ended_ranks(self) -> list[int]:
        """The other ranks that have ended."""
        some = self._store.check(["ended"])
        others = [rank for rank in range(len(self.ranks)) if rank != self._rank]
        dead = self.neighbours.dead()
        return [rank for rank in others if rank in dead or (some and self._store.check([f"gone/{rank}"]))]

    def _publish_exit(self) -> None:
        if self._exit_published or os.getpid() != self._process:
            return  # the process that ends is a child of the one that made this monitor
        self._exit_published = True
        with suppress(RuntimeError):
            # the interpreter keeps the exception that ends it
            failure = getattr(sys, "last_value", None)
            why = "" if failure is None else f"{type(failure).__name__}: {failure}".partition("\n")[0].rstrip(". ")
            why = shorten(why, _LONGEST, placeholder=" …")
            self._store.set(f"gone/{self._rank}", json.dumps(Exit(self.launched(), why)))
            self._store.set("ended", "")

    def on_exit(self) -> None:
        """Write to the store that this process ends, and close."""
        self._publish_exit()
        self.close()

    def _exit_of(self, rank: int) -> Exit:
        """What a rank that has ended has written. If it was killed, it has written nothing."""
        key = f"gone/{rank}"
        return Exit(*json.loads(self._store.get(key))) if self._store.check([key]) else Exit({}, _KILLED)

    def _fail_ended(self, ranks: Sequence[int], reason: str, where: str = "", remedy: str = f" {RESTART}") -> NoReturn:
        """Raise PeerFailed: these ranks have ended. If no exception ended one of them, it may have run out of batches."""
        failures = [self._exit_of(rank).failure for rank in ranks]
        if not all(failures):
            remedy = f" {EVERY_RANK} {FEWER_BATCHES}{remedy}"
        # an error about another rank says nothing of this one
        own = [(r, why) for r, why in zip(ranks, failures, strict=True) if why and not why.startswith(("PeerFailed:", _KILLED))]
        cause = "".join(f". The error that ended rank {self.ranks[rank]} is {why}" for rank, why in own[:1])
        self._fail(ranks, reason, f"{where}{cause}.{remedy}", reason + cause)

    def _fail(self, ranks: Sequence[int], reason: str, rest: str = f". {RESTART}", passed_on: str = "") -> NoReturn:
        """`passed_on`: the reason that this rank passes on, if it is longer."""
        names = [self.ranks[rank] for rank in ranks]
        who = f"rank {names[0]}" if len(names) == 1 else f"each of the ranks {', '.join(map(str, names))}"
        raise PeerFailed(f"{who} {reason}{rest}", names[0], None, passed_on or reason)


_living: "weakref.WeakSet[PeerMonitor]" = weakref.WeakSet()


def _on_exit() -> None:
    for monitor in list(_living):
        monitor.on_exit()


at_end(_on_exit)
