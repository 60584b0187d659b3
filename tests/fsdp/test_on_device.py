"""Collectives on a device: who looks after them, and what is over when a peer does not join. Threads for ranks, no device."""

import time
from collections.abc import Callable
from threading import Event

import pytest
import torch
from test_lines import Scope, said, together
from test_trail import MemoryStore

import fsdp
from fsdp import lines as lines_module
from fsdp import on_device, trail
from fsdp.collectives import ProcessGroupCollectives
from fsdp.errors import PeerFailed
from fsdp.lines import Lines
from fsdp.on_device import Device
from fsdp.works import DONE

STEADY = "ababababa"
"""So often that all predict the next call, which is "b"."""


class Rank:
    """One rank of a group whose collectives are on a device; these count, and carry nothing."""

    def __init__(self, store: MemoryStore, rank: int, size: int) -> None:
        self.aborted = Event()
        self.device = Device()
        self.device.carried_by(self.aborted.set)
        ranks = [10 + r for r in range(size)]
        self.lines = Lines(store, lambda name: Scope(store, name), ranks, rank, None, self.device)
        self.lines.open("gathers")

    def launch(self, *labels: str) -> None:
        """As `ProcessGroupCollectives` does."""
        for label in labels:
            if self.lines.down:
                self.lines.connect_anew()
            self.device.count("gathers", self.lines.trails["gathers"].before("all_gather", label, 8))

    def refused(self) -> fsdp.WorldError:
        """What the next call raises, at last."""
        until = time.monotonic() + 10
        while not self.lines.down and time.monotonic() < until:
            time.sleep(0.01)
        return said(lambda: self.launch("next"))


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "POLL", 0.01)
    monkeypatch.setattr(on_device, "PATIENCE", 0.1)
    monkeypatch.setattr(trail, "PATIENCE", 0.1)
    monkeypatch.setenv(lines_module.RETURN_SECONDS, "5")


def ranks_that_launched(*labels: str, size: int = 2) -> list[Rank]:
    store = MemoryStore()
    ranks = [Rank(store, rank, size) for rank in range(size)]
    assert not any(together(*(lambda one=one: one.launch(*labels) for one in ranks)))
    return ranks


def has_time(ranks: list[Rank]) -> None:
    """For every thread to look several times, and to see that nobody waits in vain."""
    time.sleep(0.4)
    assert not any(one.aborted.is_set() or one.lines.down for one in ranks)


def test_who_waits_for_one_that_abandoned_the_step_is_freed_and_told() -> None:
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


def test_who_waits_for_nobody_is_told_at_its_next_call_and_all_go_on() -> None:
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


@pytest.mark.parametrize("killed", [False, True])
def test_who_waits_for_one_that_ended_is_freed_and_told(killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, ending = ranks_that_launched(*STEADY)
    if killed:
        monkeypatch.setattr(waiting.lines, "_is_dead", lambda rank: True)
    else:
        ending.lines.say_goodbye()
    waiting.launch("b")
    error = waiting.refused()
    assert isinstance(error, PeerFailed) and waiting.aborted.wait(5)
    assert "rank 11 has ended, while this rank waited for it." in str(error)


def test_who_is_done_may_end() -> None:
    one, other = ranks_that_launched("a", "b")
    other.lines.say_goodbye()
    has_time([one])


def test_ranks_that_disagree_are_freed() -> None:
    """One asks for another call than the predicted one, which its peer has launched."""
    one, other = ranks_that_launched(*STEADY)
    one.launch("b")
    error = said(lambda: other.launch("c"))
    assert "rank 1 called all_gather('c', 8 bytes) where the agreed schedule has all_gather('b', 8 bytes)" in str(error)
    assert "which rank 0 followed" in str(error)
    assert "rank 1 called all_gather('c', 8 bytes)" in str(one.refused())
    assert one.aborted.wait(5) and other.aborted.wait(5)


def test_a_slow_rank_is_waited_for() -> None:
    """Nobody knows whether a host waits for what it launched, so this is no deadlock."""
    one, other = ranks_that_launched(*STEADY)
    one.launch("b")
    time.sleep(0.4)
    assert not one.aborted.is_set() and not one.lines.down
    other.launch("b")
    has_time([one, other])


def test_while_calls_are_launched_nobody_is_asked() -> None:
    ranks = ranks_that_launched(*STEADY)
    store: MemoryStore = ranks[0].lines._store  # type: ignore[assignment]
    before = store.asked
    for _ in range(40):
        time.sleep(0.01)
        for one in ranks:
            one.launch("b", "a")
    assert store.asked == before


def test_nobody_looks_after_a_group_that_was_closed() -> None:
    (one, _) = ranks_that_launched("a")
    thread = one.device._thread
    assert thread is not None and thread.is_alive()
    one.lines.close()
    assert not thread.is_alive()


def test_what_is_on_a_device_is_counted_and_what_is_on_the_host_is_not() -> None:
    (one,) = ranks_that_launched(size=1)
    channel = ProcessGroupCollectives.__new__(ProcessGroupCollectives)
    channel._recent, channel._lines, channel._channel = [], one.lines, "gathers"  # type: ignore[assignment]
    channel._reference = lambda: one  # type: ignore[assignment, return-value]
    launch: Callable[[object], object] = lambda group: DONE  # noqa: E731
    channel._launch("all_gather", "a", torch.empty(2), launch)
    assert not one.device.launched and one.device.last is None
    assert channel._launch("all_gather", "a", torch.empty(2, device="meta"), launch) is DONE
    assert one.device.launched == {"gathers": 1}
    assert one.device.last is not None and one.device.last().call == "all_gather('a', 8 bytes)"
