"""What ranks know of each other's failures: through the store, and by calling the roll. Threads for ranks, no connections."""

import errno
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp
from fsdp.comm.failure import desync
from fsdp.comm.failure import peer_monitor as module
from fsdp.comm.failure.ended_processes import is_dead, this_process
from fsdp.comm.failure.job_waits import JobWaits
from fsdp.comm.failure.peer_monitor import PeerMonitor, seconds
from fsdp.comm.failure.pending_call import PendingCall
from fsdp.errors import FEWER_BATCHES, PeerFailed
from tests.support.stores import MemoryStore, Scope, said, together


def make(size: int, connect: Callable[[str], Any] | None = str, store: MemoryStore | None = None) -> list[PeerMonitor]:
    store = store or MemoryStore()
    ranks = [10 + r for r in range(size)]
    lines = [PeerMonitor(store, lambda name: Scope(store, name), ranks, rank, connect) for rank in range(size)]
    for one in lines:
        one.open("shard")
    return lines


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desync, "STALL_SECONDS", 0.1)
    monkeypatch.setenv(module.SECONDS, "0.1")
    monkeypatch.setenv(module.RETURN_SECONDS, "0.3")


def test_who_abandons_says_why_to_those_who_wait() -> None:
    failing, waiting, other = make(3)
    failing.abandon("blocks.1", ValueError("no"))
    assert failing.down
    for one in (waiting, other):
        for broken in (False, True):
            error = said(lambda one=one, broken=broken: one.check_peers(broken))
            assert isinstance(error, PeerFailed)
            assert (error.rank, error.unit, error.reason) == (10, "blocks.1", "ValueError: no")
            assert "rank 10 has abandoned the step, in unit 'blocks.1', with ValueError: no." in str(error)


def test_a_wait_that_has_failed_is_forgotten_when_ranks_connect_again() -> None:
    ranks, store = make(2), MemoryStore()
    for one, rank in zip(ranks, (10, 11), strict=True):
        one.job, one.joined = JobWaits(store, rank), [weakref.ref(one)]
        one.publish_joint_wait(PendingCall("shard", 1, "a gather", "", {}))
        one.abandon("Net", None)
    # others may still look for the reason why they wait
    assert all(b"a gather" in store.get(key) for key in ("10", "11"))
    together(*(one.reconnect for one in ranks))
    assert [store.get(key) for key in ("10", "11")] == [b"null", b"null"]


def test_a_rank_that_is_notified_of_a_failure_passes_it_on_as_it_is() -> None:
    """On a mesh the groups of a rank are different ones."""
    messenger, waiting = make(2)
    messenger.abandon("blocks.7", PeerFailed("text", 3, "blocks.1", "ValueError: no"))
    error = said(lambda: waiting.check_peers(False))
    assert isinstance(error, PeerFailed)
    assert (error.rank, error.unit, error.reason) == (3, "blocks.1", "ValueError: no")


def test_the_first_rank_ends_when_all_others_know_why_a_step_was_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may end with its process. A rank that has ended, or is lost, needs to know nothing."""
    monkeypatch.setenv(module.SECONDS, "9")
    first, second, third, lost = make(4, store=(store := MemoryStore()))
    for one, ranks in zip((first, second, third, lost), [(0, 1, 2, 3)] * 4, strict=True):
        one.ranks = ranks
    failure = PeerFailed("text", 3, None, "does not answer: its connections broke 2 s ago")
    order: list[str] = []

    def end(one: PeerMonitor, name: str) -> None:
        one.on_exit()
        order.append(name)

    first.abandon("Net", failure)
    ends = threading.Thread(target=end, args=(first, "first"))
    ends.start()
    end(third, "third")  # it knows nothing, and its end waits for nobody
    asked = store.asked
    while store.asked < asked + 20:
        time.sleep(0.01)
    second.abandon("Net", failure)
    order.append("second")
    ends.join(9)
    assert order == ["third", "second", "first"]


def test_the_first_rank_waits_only_so_long_for_others() -> None:
    """A wait without end would be ended by the time-out of tests."""
    first, _ = make(2)
    first.ranks = (0, 1)
    first.abandon("Net", ValueError("no"))
    begin = time.monotonic()
    first.on_exit()
    assert time.monotonic() - begin >= 0.1


def test_ranks_that_all_abandoned_connect_anew_and_start_from_nothing() -> None:
    connected: list[str] = []
    ranks = make(2, lambda name: connected.append(name) or object())
    assert connected == ["0/shard"] * 2
    for one in ranks:
        one.abandon("Net", None)
    assert together(*(lambda one=one: one.reconnect() for one in ranks)) == [None, None]
    assert connected == ["0/shard"] * 2 + ["1/shard"] * 2
    for one in ranks:
        assert not one.down
        one.check_peers(False)  # what is over is forgotten


def test_who_does_not_come_back_is_named() -> None:
    ranks = make(3)
    for one in ranks:
        one.abandon("Net", None)
    errors = together(*(lambda one=one: one.reconnect() for one in ranks[:2]))
    for error in errors:
        assert "rank 12 has not come back within 0.3 s" in str(error)


def test_ranks_that_completed_different_backwards_do_not_go_on() -> None:
    ranks = make(2)
    ranks[1].backward_completed()
    for one in ranks:
        one.disconnect()
    errors = together(*(lambda one=one: one.reconnect() for one in ranks))
    for error in errors:
        assert type(error) is fsdp.WorldError
        assert "rank 11 has completed a backward that rank 10 has abandoned" in str(error)
    assert "may be a step apart" in str(said(lambda: ranks[0].reconnect()))


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_waits_for_one_that_cannot_go_on_is_notified(ends: bool) -> None:
    """On a mesh it is found in one group, and the ranks of the others wait; also when it has ended since."""
    knows, asks, comes_back = make(3)
    comes_back.abandon("Net", None)
    knows.abandon("Net", fsdp.WorldError("The ranks disagree."))
    if ends:
        knows.on_exit()
    for error in (said(lambda: asks.check_peers(False)), said(comes_back.reconnect), said(knows.reconnect)):
        assert type(error) is fsdp.WorldError and str(error) == "The ranks disagree."


def test_the_count_of_abandoned_steps_is_the_same_however_far_a_rank_is() -> None:
    ranks = make(2)
    assert [one.epoch for one in ranks] == [0, 0]
    for one in ranks:
        one.abandon("Net", None)
    assert [one.epoch for one in ranks] == [1, 1]
    together(*(one.reconnect for one in ranks))
    assert [one.epoch for one in ranks] == [1, 1]


def test_who_does_not_answer_the_roll_is_named() -> None:
    ranks = make(4)
    errors = together(*(lambda one=one: one.check_peers(True) for one in ranks[:3]))
    for error in errors:
        assert isinstance(error, PeerFailed) and error.rank == 13
        assert "rank 13 does not answer: its connections broke 0.1 s ago" in str(error)


def test_when_all_answer_nobody_is_named() -> None:
    ranks = make(2)
    assert together(*(lambda one=one: one.check_peers(True) for one in ranks)) == [None, None]


def test_who_ended_is_named_at_once() -> None:
    ranks = make(2)
    ranks[1].on_exit()
    assert "rank 11 has ended" in str(said(lambda: ranks[0].check_peers(False)))


def test_who_ends_by_an_exception_did_not_run_out_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for failure, remedy in ((None, True), (ValueError("no"), False)):
        monkeypatch.setattr(sys, "last_value", failure, raising=False)
        one, other = make(2)
        other.on_exit()
        text = str(said(lambda one=one: one.check_peers(False, "all_gather of blocks.3")))
        assert text.startswith("rank 11 has ended, while this rank waited for it in all_gather of blocks.3. ")
        assert (f"Every rank must call it. {FEWER_BATCHES}" in text) is remedy
        assert ("The error that ended rank 11 is ValueError: no. " in text) is (failure is not None)
        assert text.endswith("Start the job again from a checkpoint.")


def test_the_error_that_ended_a_rank_is_passed_on_and_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of it, cut if it is long. An error about another rank is none of its own."""
    first, second, third = make(3)
    own = "rank 12 has ended, while this rank waited for it. The error that ended rank 12 is ValueError: no. Start the job again"
    for one, failure in ((third, ValueError("no.\nmore")), (second, PeerFailed("text", 12, None, "has ended"))):
        monkeypatch.setattr(sys, "last_value", failure, raising=False)
        if one is second:
            found = said(lambda: second.check_peers(False))
            assert isinstance(found, PeerFailed)
            second.abandon("Net", found)
        one.on_exit()
    assert own in str(found)
    assert own in str(said(lambda: first.check_peers(False)))
    text = str(said(first.reconnect))
    assert text.startswith("each of the ranks 11, 12 has ended") and "The error that ended rank 12 is ValueError: no." in text
    monkeypatch.setattr(sys, "last_value", ValueError("no " * 200))
    (one, other) = make(2)
    other.on_exit()
    assert "no no …. Start the job again" in str(said(lambda: one.check_peers(False)))


class EndsMeanwhile(MemoryStore):
    """A store in which a peer finds a disagreement, writes it and ends, just before a rank asks who has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.before_asking: list[Callable[[], object]] = []

    def check(self, keys: list[str]) -> bool:
        if keys == ["ended"] and self.before_asking:
            self.before_asking.pop()()
        return super().check(keys)


@pytest.mark.parametrize("looks", ["waits", "is cut off", "wants to go on", "launches"])
@pytest.mark.parametrize("tells_all", [False, True], ids=["outside a step", "in a step"])
def test_the_verdict_of_a_peer_comes_before_its_end(looks: str, tells_all: bool) -> None:
    store = EndsMeanwhile()
    finder, other = make(2, store=store)
    verdict = fsdp.WorldError("The ranks disagree.")

    def find_and_end() -> None:
        finder.detector.store.set("fatal", str(verdict))
        if tells_all:
            finder.abandon("Net", verdict)
        finder.on_exit()

    store.before_asking.append(find_and_end)
    pending = other.sequences["shard"].check_call if looks == "launches" else None
    if looks == "wants to go on":
        other.abandon("Net", None)
    error = said(
        {
            "waits": lambda: other.check_peers(False),
            "is cut off": lambda: other.detector.explain_failure(RuntimeError("Connection closed by peer")),
            "wants to go on": other.reconnect,
            "launches": lambda: pending and pending("all_gather", "a", 64),
        }[looks]
    )
    assert type(error) is fsdp.WorldError and str(error) == "The ranks disagree."
    assert not store.before_asking


def test_who_wraps_alone_is_notified_that_the_others_have_ended() -> None:
    one, other = make(2)
    other.on_exit()
    error = said(one.meet)
    assert isinstance(error, PeerFailed) and error.rank == 11
    assert "rank 11 has ended, while this rank waited for it in fully_shard." in str(error)
    assert together(*(monitor.meet for monitor in make(3))) == [None] * 3


def test_a_process_is_known_by_when_it_began() -> None:
    host, pid, begin = this_process()
    assert host, "where the tests run there is /proc"
    assert not is_dead((host, pid, begin))
    assert is_dead((host, pid, "1"))  # another one has its number now
    assert is_dead((host, 2**22 + 1, begin))
    assert not is_dead(("another host", 2**22 + 1, begin))
    assert not is_dead(("", 2**22 + 1, begin))


def test_who_cannot_look_takes_nobody_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(path: Path, encoding: str | None = None) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    process = this_process()
    monkeypatch.setattr(Path, "read_text", too_many)
    assert not is_dead(process)


def test_a_group_without_connections_of_its_own_has_none_of_this() -> None:
    one, other = make(2, None)
    one.abandon("Net", ValueError("no"))
    assert not one.down and not one.connections
    other.check_peers(False)


def test_what_is_raised_can_be_sent_to_another_process() -> None:
    failure = PeerFailed("text", 3, "blocks.1", "ValueError: no")
    failure.add_note("a note")
    copy = pickle.loads(pickle.dumps(failure))
    assert type(copy) is PeerFailed and str(copy) == "text" and copy.__notes__ == ["a note"]
    assert (copy.rank, copy.unit, copy.reason) == (3, "blocks.1", "ValueError: no")


def test_seconds_must_be_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "0", "-1"):
        monkeypatch.setenv(module.SECONDS, text)
        with pytest.raises(fsdp.ShardingError, match=f"FSDP_PEER_SECONDS must be a number of seconds, not '{text}'"):
            seconds(module.SECONDS, 2.0)


def test_a_rank_that_disconnected_while_it_waited_still_says_why_it_abandons() -> None:
    """It found the failure in a wait, where it disconnects before the step is abandoned."""
    found, waiting, _ = make(3)
    found.disconnect()
    found.abandon("Net", PeerFailed("text", 12, None, "does not answer"))
    found.on_exit()
    error = said(lambda: waiting.check_peers(True))
    assert isinstance(error, PeerFailed) and (error.rank, error.reason) == (12, "does not answer")
