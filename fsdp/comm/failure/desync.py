"""Detects ranks of a process group that call different collectives, before a wrong collective is launched.

[Note: agreeing on calls]
As long as all ranks have made the same calls, each predicts the next one from the last ones. A rank that makes the predicted
call does not communicate about it: a steady training loop costs nothing. A rank that is about to make any other call counts
itself in the group's store and launches the call when all ranks are counted. If another rank made the predicted call meanwhile,
that rank waits for a collective that this one will not launch. A rank that has waited for STALL_SECONDS publishes its pending
call and reads those of the other ranks, so both find out which ranks disagree. A collective that does not match is never
launched: over gloo it would mix the parameters of two units of the same size, and end the process if their sizes differ.

A rank that waits for a call between steps, such as a save, also says so once on stderr: others may be outside this package.

[Note: a step that fails where no hook fires]
No hook sees an exception in the loss. That rank's next forward begins although the previous one had no backward, and the rank
first announces this as if it were a collective (`RESTART_CALL`). If all ranks leave backwards out, all make this call and
predict it from then on. If the other ranks are already in that backward, they raise an error: this rank abandoned it.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final, NoReturn, Protocol, TypeGuard

from fsdp.comm.failure.pending_call import (
    BETWEEN_STEPS,
    History,
    PendingCall,
    Wait,
    absent_ranks,
    describe_deadlock,
    evaluated_alone,
    is_deadlock,
    remedies_for,
    text_of,
    where_of,
)
from fsdp.errors import EVERY_RANK, FEWER_BATCHES, PeerFailed, WorldError, name_ranks
from fsdp.log import write_to_stderr

STALL_SECONDS: Final = 2.0
"""Seconds that a rank waits before it looks for the reason."""
TIME_OUT: Final = 1800.0
"""Seconds that a rank waits for the others to make a call, unless the group has another time-out. This is torch's."""
RECENT: Final = 8
"""The number of calls that a communicator remembers for stories."""
MEMORY: Final = 4
"""The number of calls from which the next one is predicted."""
REMEDY: Final = "Call the same in the same order."
LAG: Final = 64
"""The number of counts that stay in the store. When all ranks are counted for a call, all have read the counts before it."""


class Store(Protocol):
    """The methods of torch.distributed's stores that this package uses."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Peers(Protocol):
    """The methods of the monitor of a group that a detector uses: see `PeerMonitor`."""

    def check_peers(self, broken: bool, where: str = "", stalled: bool = False) -> None: ...
    def report_restart(self, rank: int) -> NoReturn: ...
    def disconnect(self) -> None: ...
    def publish_joint_wait(self, pending: PendingCall) -> None: ...
    def find_joint_deadlock(self) -> str | None: ...
    def end_joint_wait(self) -> None: ...
    def end_wait_in_vain(self, why: str) -> None: ...


class DesyncDetector:
    """The pending calls of all ranks of one group, in its store, during one epoch."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], peers: Peers, time_out: float = TIME_OUT) -> None:
        """`rank`: this one, in the group. `ranks`: those of the group as the user counts them, in the default group."""
        self.time_out = time_out
        """Seconds that this rank waits for others to make a call."""
        self.wait: Wait | None = None
        """The call that the host waits for, if it has waited long."""
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.sequences: dict[str, CallSequence] = {}
        """The calls on each communicator."""
        self.fatal: str | None = None
        """Why no rank of this group can go on."""
        self.host_waits = False
        """True while the pending call in the store is one that the host waits for."""
        self.peers = peers
        self.messages = Counter[str]()
        """The number of messages from one rank to another."""

    def open(self, comm: str) -> "CallSequence":
        """Begin the sequence of calls on a communicator."""
        sequence = self.sequences[comm] = CallSequence(self, comm)
        return sequence

    def launched(self) -> dict[str, int]:
        """The number of calls on each communicator, and of messages."""
        return {comm: sequence.launched for comm, sequence in list(self.sequences.items())} | self.messages

    def diagnose_stall(self, pending: PendingCall) -> None:
        """Publish the call that this rank has waited for, and find out whether it waits in vain.

        Raises:
            PeerFailed: it does, because a rank has ended or has abandoned the step.
            WorldError: it does, because the ranks disagree.
        """
        wait, self.wait = self.wait, None
        self.peers.check_peers(False, pending.where, stalled=True)
        self.host_waits = True
        self.publish(pending)
        if self.fatal is None:
            found = self.read_calls()
            fatal = self._find_desync(found)
            if fatal is None and is_deadlock(found, self.size):
                time.sleep(STALL_SECONDS / 4)
                if self.read_calls() == found:  # all were read at different times, and are now known to hold at one time
                    for rank, one in found.items():
                        if one.is_restart:
                            self.peers.report_restart(rank)
                    fatal = describe_deadlock(found, self.ranks)
            if fatal is None:
                self.peers.publish_joint_wait(pending)
                fatal = self.peers.find_joint_deadlock()
            if fatal is not None:
                self.store.set("fatal", fatal)
            else:
                same = wait is not None and wait.pending[:2] == pending[:2]
                begin = wait.begin if wait is not None and same else time.monotonic() - STALL_SECONDS
                absent = sorted({*range(self.size)} - {*found} | {*absent_ranks(pending, found)})
                self.wait = Wait(begin, pending, self.ranks[self.rank], tuple(self.ranks[one] for one in absent))
        self.raise_fatal()

    def publish(self, pending: PendingCall) -> None:
        """Write this rank's pending call into the store, and read whether another rank has found a desync or a deadlock."""
        self.store.set(f"waits/{self.rank}", json.dumps(pending))
        self.read_fatal()

    def raise_fatal(self) -> None:
        """Raise WorldError if a rank has found that no rank can go on."""
        self.read_fatal()
        if self.fatal is not None:
            self.peers.disconnect()  # so that ranks that wait for this one read the reason at once
            self._let_others_read()
            raise WorldError(self.fatal)

    def _let_others_read(self) -> None:
        """Wait a moment until the other ranks know the reason: the store ends with rank 0 if that holds it."""
        end = time.monotonic() + STALL_SECONDS
        while self.rank == 0 and time.monotonic() < end and self.store.add("fatal known", 0) < self.size - 1:
            time.sleep(0.01)

    def declare_fatal(self, why: str) -> None:
        """No rank of this group can go on: every further call raises a WorldError that says why."""
        if self.fatal is None:
            with suppress(RuntimeError):  # the store may have gone
                self._count_as_known()
        self.fatal = why

    def explain_failure(self, failure: RuntimeError, where: str = "") -> None:
        """A collective failed: raise the reason if a peer is the reason, else add to `failure` which calls ranks wait for.

        `where`: the call.

        Raises:
            PeerFailed: a rank has ended or has abandoned the step.
            WorldError: the ranks disagree.
        """
        self.wait = None
        with suppress(RuntimeError):  # the store may have gone as well
            self.read_fatal()
        if self.fatal is not None:
            raise WorldError(self.fatal) from failure
        # the kernel says "Connection timed out" of a host that is lost; gloo waited for a call in the other case
        timed_out = "imed out" in str(failure).replace("Connection timed out", "")
        try:
            self.peers.check_peers(not timed_out, where)
        except WorldError as reason:
            raise reason from failure
        except RuntimeError:
            failure.add_note("fsdp: the store of the group does not answer; the process that holds it may have ended.")
            return
        waits = [f"rank {self.ranks[rank]} waits for {pending.call}" for rank, pending in self.read_calls().items()]
        failure.add_note(
            f"fsdp: {'; '.join(waits) or 'no rank has waited long'}. Ranks that are not named compute, hang, or wait in another "
            f"library. {FEWER_BATCHES}"
        )

    def clear(self) -> None:
        """The call that the host waited for has ended: remove it from the store."""
        self.host_waits, self.wait = False, None
        self.store.set(f"waits/{self.rank}", "null")
        self.peers.end_joint_wait()

    def read_fatal(self) -> None:
        """Read whether a rank has found that no rank can go on."""
        if self.fatal is None and self.store.check(["fatal"]):
            self.fatal = self.store.get("fatal").decode()
            self._count_as_known()

    def _count_as_known(self) -> None:
        """This rank knows why no rank can go on: the first one need not wait for it."""
        if self.rank:
            self.store.add("fatal known", 1)

    def _find_desync(self, found: dict[int, PendingCall]) -> str | None:
        """Name the ranks that wait for different calls in one place; None if there are none.

        Raises:
            PeerFailed: one of them has started another forward.
        """
        desync = None
        for rank, pending in found.items():
            calls: dict[str, list[int]] = {pending.call: []}
            for other, theirs in found.items():
                if theirs.comm == pending.comm and theirs.number == pending.number:
                    calls.setdefault(theirs.call, []).append(other)
            ahead = [other for other, one in found.items() if pending.key and one.launched_on(pending.comm) >= pending.number]
            if ahead and self.store.add(pending.key, 0) >= self.size:
                ahead = []  # all ranks are counted by now: the others have launched the same call
            if pending.is_restart and (ahead or len(calls) > 1):
                self.peers.report_restart(rank)
            if ahead or len(calls) > 1:
                followers = sorted({*calls.pop(pending.agreed, ()), *ahead})
                parts = [f"{self._name_all(ranks)} called {call}" for call, ranks in calls.items()]
                counts = {other: theirs.evaluated for other, theirs in found.items() if theirs.comm == pending.comm}
                alone = [self.ranks[one] for one in evaluated_alone(counts)]
                causes = remedies_for([*calls, *([pending.agreed] if followers else [])], alone)
                remedy = " ".join(causes if alone else (REMEDY, *causes))
                agreed = f"the agreed schedule has {pending.agreed}, which {self._name_all(followers)} followed"
                first, others = map(" and ".join, (parts, [agreed]) if followers else (parts[:1], parts[1:]))
                place = f"operation {pending.number} of communicator {pending.comm!r}"
                desync = desync or f"The ranks disagree on {place}: {first} where {others}. {remedy}"
        return desync

    def _name_all(self, ranks: Sequence[int]) -> str:
        return name_ranks([self.ranks[rank] for rank in ranks])

    def read_calls(self) -> dict[int, PendingCall]:
        """The pending calls of the ranks that have published one."""
        keys = {rank: f"waits/{rank}" for rank in range(self.size)}
        found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        return {rank: PendingCall(*fields) for rank, fields in found.items() if fields is not None}


class CallSequence:
    """The calls of one communicator, and the prediction of the next one."""

    def __init__(self, detector: DesyncDetector, comm: str) -> None:
        self._detector = detector
        self._comm = comm
        self._number = 0
        self._here = History(())
        self._known = {self._here.recent: self._here}
        self._counted: list[str] = []
        """Keys of counts that are still in the store, oldest first."""
        self.launched = 0
        """The number of calls that have been checked."""
        self.evaluated = 0
        """The number of gathers in forwards without gradients."""

    def check_call(self, kind: str, label: str, size: int) -> Callable[[], PendingCall]:
        """Check a call that is about to be made. Returns a function that describes it, for a rank that waits for it long.

        Raises:
            WorldError: other ranks make another call.
        """
        detector = self._detector
        if detector.fatal is not None:
            raise WorldError(detector.fatal)
        call, here = (kind, label, size), self._here
        number = self._number = self._number + 1

        def describe() -> PendingCall:
            agreed, where = text_of(here.agreed) if here.agreed else "", where_of(*call[:2])
            return PendingCall(self._comm, number, text_of(call), "", detector.launched(), agreed, False, where, self.evaluated)

        # one comparison and no hash for each call of a steady loop
        if here.agreed != call:
            self._agree(describe(), kind in BETWEEN_STEPS)
            recent = (*here.recent, call)[-MEMORY:]
            here.agreed, here.then = call, self._known.setdefault(recent, History(recent))
        self._here = here.then
        self.launched = number
        return describe

    def _agree(self, pending: PendingCall, between_steps: bool) -> None:
        """Return when every rank is about to make this call.

        Raises:
            PeerFailed: a rank has ended, has abandoned the step, or has not made the call within the time-out.
            WorldError: the ranks disagree.
        """
        detector, silent = self._detector, not between_steps
        store, size = detector.store, detector.size
        key = f"{pending.comm}/{pending.number}/{sha256(pending.call.encode()).hexdigest()[:16]}"
        pending = pending._replace(key=key)
        count = store.add(key, 1)
        begin, pause, stalled = time.monotonic(), 0.0002, False
        end = begin + detector.time_out
        while count < size:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            count = store.add(key, 0)
            if count < size and time.monotonic() - begin > STALL_SECONDS:
                detector.diagnose_stall(pending)
                begin, stalled = time.monotonic() - STALL_SECONDS / 2, True
                silent = self._report_absent(size - count, silent, time.monotonic() > end)
        if stalled:
            detector.clear()
        self._counted.append(key)
        if len(self._counted) > LAG:
            oldest = self._counted.pop(0)
            if detector.rank == 0:
                store.delete_key(oldest)

    def _report_absent(self, count: int, silent: bool, timed_out: bool) -> bool:
        """Say once who has not made the call that this rank waits for; return whether that need not be said any more.

        Raises:
            PeerFailed: this rank has waited for the time-out.
        """
        wait = self._detector.wait
        # who has made the call says so after a while; until then, more ranks than those seem to be absent
        if wait is None or len(wait.absent) != count:
            return silent
        if timed_out:
            reason = f"has not called {wait.pending.where} within {self._detector.time_out:g} s, the time-out of its group"
            raise PeerFailed(f"{name_ranks(wait.absent)} {reason}. {EVERY_RANK} {FEWER_BATCHES}", wait.absent[0], None, reason)
        if not silent and wait.rank == min(set(self._detector.ranks) - set(wait.absent)):
            write_to_stderr(f"fsdp: {wait.describe()}.")
        return True


def is_of_backend(failure: BaseException | None) -> TypeGuard[RuntimeError]:
    """Whether connections of a backend broke, and not the user's program."""
    return isinstance(failure, RuntimeError) and any(name in str(failure) for name in ("gloo/", "NCCL error"))


class WatchedWork:
    """A collective in flight on the host. Its `wait` looks for the reason if it takes long."""

    __slots__ = ("_describe", "_detector", "_work")

    def __init__(self, work: Any, detector: DesyncDetector, describe: Callable[[], PendingCall]) -> None:
        self._work = work
        self._detector = detector
        self._describe = describe

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Return when the result may be used.

        Raises:
            PeerFailed: it will never be, because a rank has ended or has abandoned the step.
            WorldError: it will never be, because the ranks disagree.
        """
        try:
            if self._detector.fatal is not None and not self._work.is_completed():
                raise WorldError(self._detector.fatal)
            try:
                self._work.wait(_STALL_SECONDS)
            except RuntimeError:
                pass  # it timed out or failed
            else:
                return
            self._wait_long()
        except WorldError:
            self._detector.peers.disconnect()
            end = time.monotonic() + 2.0
            while not self._work.is_completed() and time.monotonic() < end:  # the caller releases the memory that it writes to
                time.sleep(0.01)
            raise

    def _wait_long(self) -> None:
        """Look for the reason again and again until the collective is over."""
        while not self._work.is_completed():
            self._detector.diagnose_stall(self._describe())
            with suppress(RuntimeError):
                self._work.wait(_STALL_SECONDS)
        try:
            self._work.wait(_STALL_SECONDS)  # raises if it failed, and not if it ended just after a time-out
        except RuntimeError as failure:
            self._detector.explain_failure(failure, self._describe().where)  # a peer may have disconnected because of a desync
            raise
        self._detector.clear()


_STALL_SECONDS: Final = timedelta(seconds=STALL_SECONDS)
