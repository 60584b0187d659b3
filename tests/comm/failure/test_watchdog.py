"""Collectives on a device: who looks after them, and what is over when a peer does not join. Threads for ranks, no device."""

import os
import time
from collections.abc import Callable, Iterator
from threading import Event, current_thread
from typing import Any

import pytest
import torch

import fsdp
from fsdp.comm.failure import desync, watchdog
from fsdp.comm.failure import peer_monitor as lines_module
from fsdp.comm.failure.peer_monitor import PendingError
from fsdp.comm.failure.pending_call import PendingCall
from fsdp.comm.failure.watchdog import DevicePeerMonitor, DeviceWatchdog
from fsdp.comm.process_group import ProcessGroupCommunicator
from fsdp.comm.work import DONE
from fsdp.errors import PeerFailed
from tests.support.stores import MemoryStore, Scope, said, together

STEADY = "ababababa"
"""So often that all predict the next call, which is "b"."""


opened: list[DevicePeerMonitor] = []
PATIENCE = 0.05
"""Seconds without a launch after which a thread looks for a reason."""
SEVERAL_LOOKS = 4 * PATIENCE


def comes_true(condition: Callable[[], bool]) -> None:
    """Within ten seconds."""
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Rank:
    """One rank of a group whose collectives are on a device; these count, and carry nothing."""

    def __init__(self, store: MemoryStore, rank: int, size: int) -> None:
        self.aborted = Event()
        self.device = DeviceWatchdog()
        self.lines = self.open_group(store, rank, size)

    def open_group(self, store: MemoryStore, rank: int, size: int) -> DevicePeerMonitor:
        ranks = [10 + r for r in range(size)]
        lines = DevicePeerMonitor(self.device, store, lambda name: Scope(store, name), ranks, rank, None)
        lines.aborts.append(self.aborted.set)
        lines.open("shard")
        opened.append(lines)
        return lines

    def launch(self, *labels: str) -> None:
        """As `ProcessGroupCommunicator` does."""
        for label in labels:
            if self.lines.down or self.lines.pending_error is not None:
                self.lines.reconnect()
            self.launch_at_once(label)

    def launch_at_once(self, label: str, launch: Callable[[], object] = lambda: DONE) -> None:
        note = self.lines.sequences["shard"].check_call("all_gather", label, 8)
        self.lines.launch_on_device("shard", note, launch)

    def refused(self) -> fsdp.WorldError:
        """What the next call raises, at last."""
        comes_true(lambda: self.lines.pending_error is not None)
        return said(lambda: self.launch("next"))


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watchdog, "POLL", 0.005)
    monkeypatch.setattr(watchdog, "STALL_SECONDS", PATIENCE)
    monkeypatch.setattr(desync, "STALL_SECONDS", PATIENCE)
    monkeypatch.setenv(lines_module.RETURN_SECONDS, "5")
    yield
    while opened:
        opened.pop().close()


def ranks_that_launched(*labels: str, size: int = 2) -> list[Rank]:
    store = MemoryStore()
    ranks = [Rank(store, rank, size) for rank in range(size)]
    assert not any(together(*(lambda one=one: one.launch(*labels) for one in ranks)))
    return ranks


def held_by(one: Rank) -> dict[str, Any]:
    """What is in the store."""
    held: dict[str, Any] = one.lines._store.held  # type: ignore[attr-defined]
    return held


def asks_on(channel: str, one: Rank) -> None:
    """Agree on a call that nobody has made before."""
    one.lines.sequences[channel].check_call("reduce", "x", 8)


def has_time(ranks: list[Rank]) -> None:
    """For every thread to look several times, and to see that nobody waits in vain."""
    time.sleep(SEVERAL_LOOKS)
    assert not any(one.aborted.is_set() or one.lines.down or one.lines.pending_error for one in ranks)


def test_a_rank_that_waits_for_one_that_abandoned_the_step_is_freed_and_notified() -> None:
    waiting, failing = ranks_that_launched(*STEADY)
    failing.lines.abandon("blocks.1", ValueError("no"))
    waiting.launch("b")  # asks nobody, and on a device nobody waits
    error = waiting.refused()
    assert isinstance(error, PeerFailed) and waiting.aborted.wait(5)
    assert (error.rank, error.unit, error.reason) == (11, "blocks.1", "ValueError: no")
    assert "What was in flight on the device of rank 10 has been aborted" in str(error)
    assert "Start the job again from a checkpoint." in str(error) and "start it again on all ranks" not in str(error)
    for one in (waiting, failing):  # neither goes on
        error = said(lambda one=one: one.launch("a"))
        assert "rank 11 has abandoned the step, in unit 'blocks.1'" in str(error) and "of rank 10 has been aborted" in str(error)
    assert failing.aborted.wait(5)


def test_a_rank_that_may_wait_in_a_group_of_the_user_is_freed_as_well() -> None:
    """Its launches are not known there."""
    waiting, failing = ranks_that_launched(*STEADY)
    users = [Event(), Event()]
    for one, aborted in zip((waiting, failing), users, strict=True):
        one.lines.aborts.append(aborted.set)
        one.lines.counts_all = False
    has_time([waiting, failing])
    failing.lines.abandon("blocks.1", ValueError("no"))
    error = waiting.refused()
    assert isinstance(error, PeerFailed) and error.rank == 11
    assert all(aborted.wait(5) for aborted in (*users, waiting.aborted, failing.aborted))


def test_ranks_that_failed_alike_keep_the_groups_of_the_user() -> None:
    ranks = ranks_that_launched(*STEADY)
    for one in ranks:
        one.lines.counts_all = False
    assert not any(together(*(lambda one=one: one.lines.abandon("blocks.1", ValueError("no")) for one in ranks)))
    assert not any(together(*(lambda one=one: one.launch("b") for one in ranks)))
    has_time(ranks)


def test_a_rank_that_waits_for_nobody_is_notified_at_its_next_call_and_all_go_on() -> None:
    """It was computing on the host when the other one failed."""
    waiting, failing = ranks_that_launched("a", "b")
    failing.lines.abandon("blocks.1", ValueError("no"))
    error = waiting.refused()
    assert isinstance(error, PeerFailed) and (error.rank, error.unit) == (11, "blocks.1")
    assert "start it again on all ranks" in str(error)
    waiting.lines.abandon("Net", error)
    assert not any(together(*(lambda one=one: one.launch("a", "b", "a") for one in (waiting, failing))))
    has_time([waiting, failing])


def test_ranks_that_failed_alike_go_on() -> None:
    ranks = ranks_that_launched("a", "b", size=3)
    for _ in range(3):
        for one in ranks:
            one.lines.abandon("Net", MemoryError("no"))
        assert not any(together(*(lambda one=one: one.launch("a", "b") for one in ranks)))
    has_time(ranks)


def test_a_first_call_that_could_not_be_launched_was_not() -> None:
    ranks = ranks_that_launched(*STEADY)
    for one in ranks:
        one.lines.open("reduce")

    def fails() -> None:
        raise RuntimeError("out of memory")

    note = lambda: PendingCall("reduce", 1, "reduce", "", {})  # noqa: E731
    with pytest.raises(RuntimeError, match="out of memory"):
        ranks[0].lines.launch_on_device("reduce", note, fails)
    for one in ranks:
        one.lines.abandon("Net", MemoryError("no"))
    assert not any(together(*(lambda one=one: one.launch("a") for one in ranks)))
    has_time(ranks)


def test_ranks_that_failed_after_different_calls_do_not() -> None:
    """What one of them launched and the other did not is on the device for good."""
    one, other = ranks_that_launched(*STEADY)
    one.launch("b")
    for rank in (one, other):
        rank.lines.abandon("Net", MemoryError("no"))
    for error in together(*(lambda rank=rank: rank.launch("a") for rank in (one, other))):
        assert isinstance(error, fsdp.WorldError)
        assert "rank 11 and rank 10 have launched different collectives on their devices" in str(error)
    assert one.aborted.wait(5) and other.aborted.wait(5)


def test_who_is_refused_its_next_call_says_how_far_it_came() -> None:
    """Two have launched what the third one never will; one of these two abandons, and the other waits for the third."""
    failing, behind, waiting = ranks_that_launched(*STEADY, size=3)
    failing.launch("b")
    waiting.launch("b")
    failing.lines.abandon("blocks.1", ValueError("no"))
    behind.lines.abandon("Net", behind.refused())
    assert isinstance(waiting.refused(), PeerFailed) and waiting.aborted.wait(5)


def test_a_call_that_was_begun_when_a_peer_failed_is_not_forgotten() -> None:
    waiting, failing = ranks_that_launched(*STEADY)
    failing.lines.abandon("blocks.1", ValueError("no"))
    comes_true(lambda: waiting.lines.pending_error is not None)
    waiting.launch_at_once("b")
    assert waiting.aborted.wait(5)


def test_who_failed_and_ended_may_have_taken_what_it_launched_with_it() -> None:
    """Both have launched the same, and nobody knows whether all of that has run."""
    waiting, ending = ranks_that_launched(*STEADY)
    ending.lines.abandon("blocks.1", ValueError("no"))
    ending.lines.on_exit()
    assert waiting.aborted.wait(5)


def test_a_refusal_of_a_step_that_is_over_refuses_nothing() -> None:
    ranks = ranks_that_launched("a", "b")
    for one in ranks:
        one.lines.abandon("Net", MemoryError("no"))
    assert not any(together(*(lambda one=one: one.launch("a") for one in ranks)))
    ranks[0].lines.pending_error = PendingError(0, fsdp.WorldError("of the step before"))
    assert not any(together(*(lambda one=one: one.launch("b") for one in ranks)))
    has_time(ranks)


def test_what_came_last_is_said_in_its_own_step_and_not_where_the_host_speaks() -> None:
    ranks = ranks_that_launched("a", "b")
    ranks[1].lines.detector.host_waits = True
    held = held_by(ranks[0])
    has_time(ranks)
    assert "0/waits/0" in held and "0/waits/1" not in held
    for one in ranks:
        one.lines.abandon("Net", MemoryError("no"))
    assert not any(together(*(one.lines.reconnect for one in ranks)))
    has_time(ranks)
    assert "1/waits/0" not in held


def test_who_has_failed_itself_may_wait_for_what_it_launched() -> None:
    waiting, ending = ranks_that_launched(*STEADY)
    waiting.launch("b")
    waiting.lines.abandon("Net", MemoryError("no"))
    ending.lines.on_exit()
    assert waiting.aborted.wait(5)


def test_the_first_call_of_a_communicator_waits_for_all_ranks_while_it_is_launched() -> None:
    waiting, failing = ranks_that_launched(*STEADY)
    freed = []

    def launch() -> object:
        freed.append(waiting.aborted.wait(5))
        raise RuntimeError("the communicator was aborted")

    failing.lines.abandon("blocks.1", ValueError("no"))
    with pytest.raises(PeerFailed, match="has been aborted") as caught:
        waiting.launch_at_once("b", launch)
    assert freed == [True] and "communicator was aborted" in str(caught.value.__cause__)
    waiting.lines.abandon("Net", caught.value)
    assert type(said(lambda: waiting.launch("a"))) is fsdp.WorldError  # it was told by PeerFailed


def test_a_rank_that_is_notified_last_is_notified_once() -> None:
    ranks = ranks_that_launched(*STEADY, size=4)
    for one in ranks[1:]:
        one.launch("b")
    ranks[0].lines.abandon("blocks.1", ValueError("no"))
    for one in ranks:
        assert one.aborted.wait(5)
        text = str(said(lambda one=one: one.launch("a")))
        assert text.count("has been aborted") == text.count("Start the job again") == 1


def test_all_groups_of_a_rank_are_lost_together() -> None:
    """What waits behind the aborted collective on the device would go on with what that left."""
    row, failing = ranks_that_launched(*STEADY)
    column = row.open_group(MemoryStore(), 0, 1)
    row.launch("b")
    failing.lines.abandon("blocks.1", ValueError("no"))
    assert row.aborted.wait(5)
    error = said(column.reconnect)
    assert isinstance(error, PeerFailed) and error.rank == 11


def test_what_was_said_of_a_step_is_not_compared_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is slow, and the ranks, which failed alike, have gone on when it has read what was said."""
    slow, other = ranks_that_launched("a", "b")
    store: Any = slow.lines._store
    reads, clear, get = Event(), Event(), store.get

    def read(key: str) -> bytes:
        found: bytes = get(key)
        if key.startswith("abandoned/") and current_thread() is slow.device._thread:
            reads.set()
            clear.wait(5)
        return found

    other.device.remove(other.lines)
    monkeypatch.setattr(store, "get", read)
    other.lines.abandon("Net", MemoryError("no"))
    assert reads.wait(5)
    slow.lines.abandon("Net", MemoryError("no"))
    for _ in range(2):
        assert not any(together(*(lambda one=one: one.launch("a", "b") for one in (slow, other))))
        clear.set()
        has_time([slow, other])


@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_waits_for_one_that_ended_is_freed_and_notified(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, ending = ranks_that_launched(*STEADY)
    if killed:
        monkeypatch.setattr(waiting.lines.neighbours, "dead", lambda: {1})
    else:
        ending.lines.on_exit()
    waiting.launch("b")
    error = waiting.refused()
    assert isinstance(error, PeerFailed) and waiting.aborted.wait(5)
    assert "rank 11 has ended, while this rank waited for it." in str(error)


def test_who_is_done_may_end() -> None:
    one, other = ranks_that_launched("a", "b")
    other.lines.on_exit()
    has_time([one])


def test_who_has_destroyed_the_group_may_end_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ranks_that_launched("a", "b")
    other.lines.close()
    monkeypatch.setattr(one.lines.neighbours, "dead", lambda: {1})
    has_time([one])


def test_a_child_of_a_process_says_no_goodbye_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ranks_that_launched(*STEADY)
    monkeypatch.setattr(other.lines, "_process", 0)
    other.lines.on_exit()
    one.launch("b")
    has_time([one])


def test_who_is_a_step_apart_waits_for_nobody_and_is_not_aborted() -> None:
    ranks = ranks_that_launched(*STEADY)
    ranks[0].lines.backward_completed()
    for one in ranks:
        one.lines.abandon("Net", MemoryError("no"))

    def clear(one: Rank) -> None:
        """As the engine does."""
        try:
            one.launch("a")
        except fsdp.WorldError as error:
            one.lines.abandon("Net", error)
            raise

    def goes_on_late() -> None:
        time.sleep(3 * PATIENCE)  # the other one waits for it in the store meanwhile
        clear(ranks[1])

    errors = together(lambda: clear(ranks[0]), goes_on_late)
    for error in errors:
        assert "may be a step apart" in str(error) and "aborted" not in str(error)
    time.sleep(SEVERAL_LOOKS)
    assert not any(one.aborted.is_set() for one in ranks)


def test_a_store_that_is_gone_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = ranks_that_launched("a")
    asked = []

    def fails(keys: list[str]) -> bool:
        if current_thread() is one.device._thread:
            asked.append(keys)
            raise RuntimeError("no answer")
        return False

    monkeypatch.setattr(one.lines._store, "check", fails)
    comes_true(lambda: len(asked) >= watchdog.FAILURES)
    time.sleep(SEVERAL_LOOKS)  # for several looks more, if there were any
    assert len(asked) == watchdog.FAILURES


def test_a_store_may_fail_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, failing = ranks_that_launched(*STEADY)
    store: Any = waiting.lines._store
    add, failures = store.add, []

    def fails(key: str, amount: int) -> int:
        if current_thread() is waiting.device._thread and not failures:
            failures.append(key)
            raise RuntimeError("no answer")
        return add(key, amount)

    monkeypatch.setattr(store, "add", fails)
    failing.lines.abandon("blocks.1", ValueError("no"))
    waiting.launch("b")
    assert waiting.aborted.wait(5) and failures


def test_a_communicator_that_was_opened_since_a_rank_said_what_it_launched_is_asked_on() -> None:
    one, other = ranks_that_launched(*STEADY)
    comes_true(lambda: "0/waits/1" in held_by(other))
    for rank in (one, other):
        rank.lines.open("reduce 1")

    def comes_late() -> None:
        for _ in range(40):
            time.sleep(0.01)
            other.launch("b", "a")
        asks_on("reduce 1", other)

    assert not any(together(lambda: asks_on("reduce 1", one), comes_late))


def test_a_rank_that_has_launched_more_on_one_communicator_may_come_to_another_late() -> None:
    """If it waited for what it launched, nobody could go on; but it computes on its host."""
    one, other = ranks_that_launched(*STEADY)
    for rank in (one, other):
        rank.lines.open("reduce")
    other.launch("b")
    comes_true(lambda: b", 10, " in held_by(other).get("0/waits/1", b""))

    def comes_late() -> None:
        time.sleep(6 * PATIENCE)  # several times as long as the other one waits before it asks who is to blame
        asks_on("reduce", other)

    assert not any(together(lambda: asks_on("reduce", one), comes_late))
    one.launch("b")
    has_time([one, other])


def test_ranks_that_disagree_are_freed() -> None:
    """One asks for another call than the predicted one, which its peer has launched."""
    one, other = ranks_that_launched(*STEADY)
    one.launch("b")
    error = said(lambda: other.launch("c"))
    assert "rank 11 called all_gather('c', 8 bytes) where the agreed schedule has all_gather('b', 8 bytes)" in str(error)
    assert "which rank 10 followed" in str(error)
    assert "rank 11 called all_gather('c', 8 bytes)" in str(one.refused())
    assert one.aborted.wait(5) and other.aborted.wait(5)


def test_a_slow_rank_is_waited_for() -> None:
    """Nobody knows whether a host waits for what it launched, so this is no deadlock."""
    one, other = ranks_that_launched(*STEADY)
    one.launch("b")
    time.sleep(SEVERAL_LOOKS)
    assert not one.aborted.is_set() and one.lines.pending_error is None
    other.launch("b")
    has_time([one, other])


def test_while_calls_are_launched_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.6)  # longer than between two calls, also on a busy machine
    ranks = ranks_that_launched(*STEADY)
    store: MemoryStore = ranks[0].lines._store  # type: ignore[assignment]
    check_call = store.asked
    for _ in range(80):
        time.sleep(0.01)
        for one in ranks:
            one.launch("b", "a")
    assert store.asked == check_call


def test_nobody_looks_after_a_group_that_was_closed() -> None:
    (one, _) = ranks_that_launched("a")
    thread = one.device._thread
    assert thread is not None and thread.is_alive()
    one.lines.close()
    assert not thread.is_alive()


def test_what_is_on_a_device_is_counted_and_what_is_on_the_host_is_not() -> None:
    (one,) = ranks_that_launched(size=1)
    channel = ProcessGroupCommunicator.__new__(ProcessGroupCommunicator)
    channel._recent, channel.monitor, channel.name = [], one.lines, "shard"  # type: ignore[assignment]
    channel._process = os.getpid()
    channel._reference = lambda: one  # type: ignore[assignment, return-value]
    launch: Callable[[object], object] = lambda group: DONE  # noqa: E731
    channel._launch("all_gather", "a", torch.empty(2), launch)
    assert not one.lines.launched() and one.lines._last is None
    assert channel._launch("all_gather", "a", torch.empty(2, device="meta"), launch) is DONE
    assert one.lines.launched() == {"shard": 1}
    assert one.lines._last is not None and one.lines._last().call == "all_gather('a', 8 bytes)"
