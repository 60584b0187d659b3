"""Ranks of a real group agree on what is new, ask nobody about what is not, and name who disagrees."""

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import fsdp
from fsdp.comm.failure import desync, pending_call
from fsdp.comm.failure.desync import CallSequence, DesyncDetector, WatchedWork
from fsdp.comm.failure.pending_call import OBJECTS, PendingCall
from fsdp.compat import ddp
from fsdp.errors import FEWER_BATCHES, NO_SYNC, UNEVEN_PATHS
from tests.support.stores import MemoryStore


class NoPeers:
    """Peers that never fail, or that start another forward, which is then named."""

    def __init__(self) -> None:
        self.waits: list[NeverDone] = []

    def disconnect(self) -> None:
        for one in self.waits:
            one.looks_until_over = 2

    def report_restart(self, rank: int) -> NoReturn:
        raise Restarted(rank)

    def nothing(self, *_: Any, **__: Any) -> None:
        return

    check_peers = publish_joint_wait = find_joint_deadlock = end_joint_wait = end_wait_in_vain = nothing


class Restarted(fsdp.PeerFailed):
    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has begun again", rank, None, "")


class Ranks:
    """Threads with one store."""

    def __init__(self, size: int, time_out: float = desync.TIME_OUT) -> None:
        self.store = MemoryStore()
        self.watches = [DesyncDetector(self.store, rank, range(size), NoPeers(), time_out) for rank in range(size)]
        self.said: dict[int, str] = {}

    def run(self, *programs: Callable[[DesyncDetector], None]) -> None:
        def live(rank: int, program: Callable[[DesyncDetector], None]) -> None:
            try:
                program(self.watches[rank])
            except fsdp.WorldError as error:
                self.said[rank] = str(error)

        threads = [threading.Thread(target=live, args=one, daemon=True) for one in enumerate(programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"


class NeverDone:
    """A collective that some rank never joins. It is over a moment after its rank has disconnected."""

    looks_until_over: float = float("inf")

    def __init__(self, peers: Any) -> None:
        peers.waits.append(self)

    def is_completed(self) -> bool:
        self.looks_until_over -= 1
        return self.looks_until_over <= 0

    def wait(self, timeout: timedelta) -> None:
        threading.Event().wait(0.01)
        raise RuntimeError("Operation timed out!")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desync, "STALL_SECONDS", 0.1)


def step(gathers: CallSequence, reductions: CallSequence, units: list[str]) -> None:
    for kind, channel in (("all_gather", gathers), ("reduce_scatter", reductions)):
        for unit in units:
            channel.check_call(kind, unit, 64)


@pytest.mark.parametrize("size", [2, 3])
def test_a_steady_loop_asks_nobody(size: int) -> None:
    ranks = Ranks(size)
    sequences: dict[int, tuple[CallSequence, CallSequence]] = {}

    def train(detector: DesyncDetector) -> None:
        comms = sequences.setdefault(detector.rank, (detector.open("shard"), detector.open("reduce")))
        for _ in range(3):
            step(*comms, ["a", "b", "c"])

    ranks.run(*[train] * size)
    assert not ranks.said
    asked = ranks.store.asked
    ranks.run(*[train] * size)
    assert ranks.store.asked == asked


def test_a_new_order_that_all_take_is_agreed_on_and_forgotten_later() -> None:
    ranks = Ranks(2)

    def wander(detector: DesyncDetector) -> None:
        gathers = detector.open("shard")
        for number in range(3 * desync.LAG):
            gathers.check_call("all_gather", f"unit {number}", 64)

    ranks.run(wander, wander)
    assert not ranks.said
    assert len(ranks.store.held) <= desync.LAG


def test_two_new_calls_in_one_place() -> None:
    ranks = Ranks(2)

    def call(unit: str) -> Callable[[DesyncDetector], None]:
        return lambda detector: detector.open("shard").check_call("all_gather", unit, 64) and None

    ranks.run(call("a"), call("b"))
    for said in (ranks.said[0], ranks.said[1]):
        assert "The ranks disagree on operation 1 of communicator 'shard'" in said
        assert "all_gather('a', 64 bytes)" in said and "all_gather('b', 64 bytes)" in said


def test_ranks_that_wait_on_different_communicators_for_ever() -> None:
    ranks = Ranks(3)

    def train(last: str) -> Callable[[DesyncDetector], None]:
        def program(detector: DesyncDetector) -> None:
            comms = {name: detector.open(name) for name in ("shard", "reduce")}
            for _ in range(4):
                for channel in comms.values():
                    channel.check_call("call", "a", 64)
            note = comms[last].check_call("call", "a", 64)
            WatchedWork(NeverDone(detector.peers), detector, note).wait()

        return program

    ranks.run(train("shard"), train("reduce"), train("shard"))
    for rank in range(3):
        assert ranks.said[rank].startswith("Deadlock: nobody can go on. Rank 0 waits for call('a', 64 bytes)")
        assert "which rank 1 did not call" in ranks.said[rank]


def test_all_waiting_for_one_slow_call_is_no_deadlock() -> None:
    notes = {rank: PendingCall("shard", 5, "all_gather('a', 64 bytes)", "", {"shard": 5, "reduce": 3}) for rank in range(2)}
    assert not pending_call.is_deadlock(notes, 2)
    behind = {**notes, 1: PendingCall("shard", 4, "all_gather('b', 64 bytes)", "", {"shard": 4, "reduce": 3})}
    assert not pending_call.is_deadlock(behind, 2), "the one behind will come"


def test_after_a_disagreement_every_call_says_so() -> None:
    detector = DesyncDetector(MemoryStore(), 0, range(2), NoPeers())
    gathers = detector.open("shard")
    detector.declare_fatal("The ranks disagree.")
    with pytest.raises(fsdp.WorldError, match="The ranks disagree"):
        gathers.check_call("all_gather", "a", 64)
    with pytest.raises(fsdp.WorldError, match="The ranks disagree"):
        WatchedWork(NeverDone(detector.peers), detector, lambda: PendingCall("shard", 1, "a", "", {})).wait()


def test_a_collective_that_ends_just_after_a_time_out_has_not_failed() -> None:
    work = Mock(wait=Mock(side_effect=[RuntimeError("Operation timed out!"), True]))
    WatchedWork(work, DesyncDetector(MemoryStore(), 0, range(2), NoPeers()), lambda: PendingCall("", 1, "a", "", {})).wait()
    assert work.wait.call_count == 2


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_leaves_the_agreed_schedule_gets_an_error_with_it_and_with_those_who_follow_it(size: int) -> None:
    """The others have launched what was predicted, and wait; rank 1 asks."""
    ranks = Ranks(size)

    def train(then: str) -> Callable[[DesyncDetector], None]:
        def program(detector: DesyncDetector) -> None:
            gathers = detector.open("shard")
            for _ in range(4):
                for unit in ("a", "b"):
                    gathers.check_call("all_gather", unit, 64)
            WatchedWork(NeverDone(detector.peers), detector, gathers.check_call("all_gather", then, 64)).wait()

        return program

    ranks.run(*(train("b" if rank == 1 else "a") for rank in range(size)))
    place = "The ranks disagree on operation 9 of communicator 'shard'"
    assert all(place in ranks.said[rank] for rank in range(size)), ranks.said
    text = "rank 1 called all_gather('b', 64 bytes) where the agreed schedule has all_gather('a', 64 bytes), which rank"
    # those that have not looked yet when somebody says it are not named
    assert all(re.search(re.escape(text) + "s? [0-9, ]+ followed", ranks.said[rank]) for rank in range(size)), ranks.said


def test_who_waits_for_a_call_between_steps_says_so_once_and_is_notified_at_the_time_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is known of the absent rank: it may compute, or wait where none of our code runs."""
    ranks = Ranks(3, time_out=1.0)
    save = lambda detector: detector.open("shard").check_call(OBJECTS, "save", 0) and None  # noqa: E731
    ranks.run(save, lambda detector: None, save)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and re.fullmatch(r"fsdp: rank 0 has waited \d+ s in save for rank 1\.", said[0]), said
    # the second one that is told may find that the first one has gone already
    assert any(
        text.startswith("rank 1 has not called save within 1 s, the time-out of its group.") for text in ranks.said.values()
    )
    assert all(f"Every rank must call it. {FEWER_BATCHES}" in text for text in ranks.said.values())


def test_who_waits_for_a_call_of_a_step_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(2)

    def gather(detector: DesyncDetector) -> None:
        if detector.rank:
            threading.Event().wait(0.5)
        detector.open("shard").check_call("all_gather", "a", 64)

    ranks.run(gather, gather)
    assert not ranks.said and not capfd.readouterr().err


def test_a_long_wait_is_described_until_it_is_over() -> None:
    ranks, found = Ranks(3), []
    comes = threading.Event()

    def gather(detector: DesyncDetector) -> None:
        sequence = detector.open("shard")
        if detector.rank == 1:
            while not (wait := ranks.watches[0].wait) or wait.absent != (1,):
                threading.Event().wait(0.01)
            found.append(wait.describe())
            comes.set()
        sequence.check_call("all_gather", "blocks.3", 64)

    ranks.run(*[gather] * 3)
    assert comes.is_set() and re.fullmatch(r"rank 0 has waited \d+ s in all_gather of blocks.3 for rank 1", found[0])
    assert all(detector.wait is None for detector in ranks.watches)


@pytest.mark.parametrize(("kind", "named"), [("gather_objects", True), ("all_gather", False)])
def test_who_left_the_loop_is_pointed_to_join(kind: str, named: bool) -> None:
    ranks = Ranks(2)

    def call(kind: str, label: str) -> Callable[[DesyncDetector], None]:
        return lambda detector: detector.open("shard").check_call(kind, label, 64) and None

    ranks.run(call("all_gather", "a"), call(kind, "b"))
    assert [FEWER_BATCHES in text for text in ranks.said.values()] == [named, named]


def test_a_function_that_one_rank_alone_calls_is_what_every_rank_must_call() -> None:
    ranks = Ranks(2)

    def call(kind: str, label: str) -> Callable[[DesyncDetector], None]:
        return lambda detector: detector.open("shard").check_call(kind, label, 0) and None

    ranks.run(call("gather_objects", "save"), call("all_gather", "a"))
    assert len(ranks.said) == 2
    assert all(f"Every rank must call fsdp.save. {FEWER_BATCHES}" in text for text in ranks.said.values())
    assert not any(UNEVEN_PATHS in text for text in ranks.said.values())


@pytest.mark.parametrize("counts", [(3, 0), (3, 3)])
def test_a_rank_that_has_evaluated_alone_is_the_cause(counts: tuple[int, int]) -> None:
    ranks = Ranks(2)

    def gather(detector: DesyncDetector) -> None:
        sequence = detector.open("shard")
        sequence.evaluated = counts[detector.rank]
        sequence.check_call("all_gather", "ab"[detector.rank], 64)

    ranks.run(gather, gather)
    cause = (
        "Only rank 0 made a forward without gradients (an evaluation) before: make it on every rank, or pass uneven_paths=True."
    )
    assert [cause in text for text in ranks.said.values()] == [counts == (3, 0)] * 2
    assert [UNEVEN_PATHS in text for text in ranks.said.values()] == [counts == (3, 3)] * 2


def test_an_evaluation_alone_before_a_call_between_steps_is_met_first() -> None:
    def program(rank: int) -> None:
        model = fsdp.fully_shard(nn.Linear(4, 4), uneven_paths=True)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            if rank == 0:
                with torch.no_grad():
                    model(torch.ones(2, 4))
            fsdp.clip_grad_norm_(model, 1.0)

    with pytest.raises(fsdp.WorldError, match=r"With it, call fsdp.meet\(model\) on every rank before calls between steps\."):
        fsdp.simulate(2, program)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("evaluates", [(0,), (0, 1), ()])
def test_simulated_ranks_say_who_has_evaluated_alone(steps: int, evaluates: tuple[int, ...]) -> None:
    def program(rank: int) -> None:
        model = fsdp.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), auto_wrap_policy={nn.Linear})
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            if rank in evaluates:
                with torch.no_grad():
                    model(torch.ones(2, 4))
        if not evaluates and rank == 0:
            model(torch.ones(2, 4)).sum().backward()

    if len(evaluates) == 2:
        fsdp.simulate(2, program)
        return
    with pytest.raises(fsdp.WorldError) as caught:
        fsdp.simulate(2, program)
    cause = (
        "Only rank 0 made a forward without gradients (an evaluation) before: make it on every rank, or pass uneven_paths=True."
    )
    assert (cause in str(caught.value)) == bool(evaluates)
    assert (FEWER_BATCHES in str(caught.value)) == (not evaluates)


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model(torch.ones(2, 4))


ALONE: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "reads full parameters": (lambda model: [*fsdp.iter_full_params(model)], "Every rank must read or load the full state."),
    "makes a full state": (lambda model: fsdp.full_state_dict(model), "Every rank must call fsdp.full_state_dict."),
    "reads a value": (lambda model: model[0].weight.sum(), "Every rank must ask for the sum of 0.weight."),  # type: ignore[index]
    "takes the norm": (lambda model: fsdp.clip_grad_norm_(model, 1.0), "Every rank must ask for the norm of gradients."),
    "evaluates": (evaluate, "Every rank must begin an evaluation, or call model.module there."),
    "summons": (
        lambda model: fsdp.summon_full_params(model).__enter__(),
        "Every rank must ask for the full parameters of Sequential.",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_rank_0_alone_reads_is_the_cause_and_no_evaluation(name: str) -> None:
    read, cause = ALONE[name]

    def program(rank: int) -> None:
        model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4))
        if read is evaluate:
            model = ddp.DistributedDataParallel(model)
        else:
            fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
        model(torch.ones(2, 4)).sum().backward()
        if rank == 0:
            read(model)
        model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(fsdp.WorldError) as caught:
        fsdp.simulate(2, program)
    assert f"{cause} {FEWER_BATCHES}" in str(caught.value)
    assert UNEVEN_PATHS not in str(caught.value) and "(an evaluation)" not in str(caught.value)


def test_no_sync_on_one_rank_alone_is_named_first() -> None:
    def program(rank: int) -> None:
        model = fsdp.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), auto_wrap_policy={nn.Linear})
        with fsdp.no_sync(model) if rank == 1 else nullcontext():
            model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(fsdp.WorldError) as caught:
        fsdp.simulate(2, program)
    assert f"did not call. {NO_SYNC} {UNEVEN_PATHS}" in str(caught.value)


def test_rank_0_does_not_end_before_the_others_have_read_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desync, "STALL_SECONDS", 15.0)  # it waits no longer than it must
    ranks, read = Ranks(2), []

    def gather(detector: DesyncDetector) -> None:
        while detector.rank and detector.fatal is None:
            threading.Event().wait(0.05)
            detector.read_fatal()
        if detector.rank:
            return
        detector.declare_fatal("they disagree")
        detector.store.set("fatal", "they disagree")
        try:
            detector.raise_fatal()
        finally:
            read.append(ranks.watches[1].fatal)

    ranks.run(gather, gather)
    assert read == ["they disagree"] and ranks.said == {0: "they disagree"}


@pytest.mark.parametrize("others", ["wait in that backward", "are about to call something new"])
def test_a_rank_that_begins_again_is_named_and_nobody_is_in_trouble(others: str) -> None:
    ranks = Ranks(3)

    def train(channel: str, kind: str, unit: str) -> Callable[[DesyncDetector], None]:
        def program(detector: DesyncDetector) -> None:
            comms = {name: detector.open(name) for name in ("shard", "reduce")}
            for _ in range(4):
                for one in comms.values():
                    one.check_call("call", "a", 64)
            WatchedWork(NeverDone(detector.peers), detector, comms[channel].check_call(kind, unit, 64)).wait()

        return program

    waits = {"wait in that backward": ("shard", "call", "a"), "are about to call something new": ("reduce", "call", "b")}
    ranks.run(train(*waits[others]), train("shard", pending_call.RESTART_CALL, "root"), train(*waits[others]))
    assert ranks.said == dict.fromkeys(range(3), "rank 1 has begun again")
    assert all(detector.fatal is None for detector in ranks.watches)


def test_backwards_that_all_ranks_leave_out_are_agreed_on_once() -> None:
    ranks = Ranks(2)
    sequences: dict[int, CallSequence] = {}

    def evaluate(detector: DesyncDetector) -> None:
        gathers = sequences.setdefault(detector.rank, detector.open("shard"))
        for _ in range(6):
            gathers.check_call(pending_call.RESTART_CALL, "root", 0)
            for unit in ("a", "b"):
                gathers.check_call("all_gather", unit, 64)

    ranks.run(evaluate, evaluate)
    asked = ranks.store.asked
    ranks.run(evaluate, evaluate)
    assert not ranks.said and ranks.store.asked == asked
