"""One rank abandons a step or dies, over gloo: the others are told who and why, and those that live go on."""

import re
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from fsdp.debug.error_notes import MARK
from fsdp.errors import FEWER_BATCHES
from tests.equivalence.peer_programs import LIMIT, STEPS, Told
from tests.support.models import CASES, assert_trained_alike, own_batches, train, wrap
from tests.support.processes import beside_each_other, results_of

pytestmark = pytest.mark.gloo

ALIVE = [
    "fails in a forward",
    "fails in a backward",
    "fails between units",
    "fails in a forward, agreed",
    "all fail in a backward",
    "rank 0 fails in a forward",
    "fails in a forward, copies are kept",
]
HYBRID = ["hybrid, fails in a backward"]
FORWARD = {"blocks.1", "blocks.2"}
BACKWARD = {"blocks.0", "blocks.1", "Net"}
WAITED_IN = {
    "fails in a forward": FORWARD,
    "fails in a backward": BACKWARD,
    "fails between units": {"blocks.2", "Net"},
    "fails in a forward, agreed": FORWARD,
    "rank 0 fails in a forward": FORWARD,
    "fails in a forward, copies are kept": {"Net"},
    "hybrid, fails in a backward": BACKWARD,
}
"""The units in which the others may wait: for a gather that was asked for ahead of its unit, or for an earlier reduction."""


def run(size: int, folder: Path, *names: str, script: str = "peer_programs") -> list[dict[str, Any]]:
    """What every rank saved before it ended."""
    return results_of(f"tests.equivalence.{script}", size, folder, *names, seconds=LIMIT + 10, may_fail=1, stops="stops" in names)


Ended = dict[str, Future[list[dict[str, Any]]]]
ON_A_DEVICE = {"fails": ["all fail in a backward", "fails"], "killed": ["killed"]}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """What every rank saved, by start: most of them end with a rank that ends."""
    starts = {
        "stops": partial(run, 3, tmp_path_factory.mktemp("stops"), "stops"),
        "ranks": partial(run, 3, tmp_path_factory.mktemp("ranks"), *ALIVE, "apart", "killed"),
        "four ranks": partial(run, 4, tmp_path_factory.mktemp("four"), *HYBRID),
    }
    for name, names in ON_A_DEVICE.items():
        starts[f"device {name}"] = partial(run, 2, tmp_path_factory.mktemp("device"), *names, script="device_programs")
    for name in ("raises", "wraps alone"):
        starts[name] = partial(run, 2, tmp_path_factory.mktemp("two"), name)
    return beside_each_other(starts)


@pytest.fixture
def ranks(ended: Ended) -> list[dict[str, Any]]:
    return ended["ranks"].result()


def check(name: str, found: list[Any], **options: Any) -> None:
    """Everyone was told once, and trained as if nothing had happened, to the bit."""
    place = "Net" if "between" in name else "blocks.1"
    culprit = 0 if name.startswith("rank 0") else 1
    for rank, (_, heard) in enumerate(found):
        ((kind, _, *why, notes),) = heard
        if rank == culprit or name.startswith("all"):
            assert kind == "Mine"
        else:
            assert kind == "PeerFailed"
            # on a mesh too, where some hear of it only from one who heard of it
            assert why == [culprit, place, "Mine: no"]
            tells_where(notes, WAITED_IN[name], rank, len(found))
    case = CASES["net"]

    def one_rank(rank: int) -> Any:
        model = wrap(case, **options)
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # noqa: E731
        return train(model, own_batches(case, rank, STEPS), optimizer)

    for (trained, _), wanted in zip(found, fsdp.simulate(len(found), one_rank), strict=True):
        assert_trained_alike(trained, wanted, within=0)


def tells_where(notes: str, units: set[str], rank: int, size: int) -> str:
    """One note names one of these units, in a state that the story says of it too; what else was noted."""
    before, mark, note = notes.partition(MARK)
    assert mark and MARK not in note, notes
    first, root, *rows = note.splitlines()
    found = re.fullmatch(rf" '(.+)', (\w+), parameters (\w+), on rank {rank} of {size}", first)
    assert found is not None and found[1] in units, first
    assert root.startswith(f"root 'Net', rank {rank} of {size}, backward "), root
    (row,) = (cells for cells in map(str.split, rows) if cells[0] == found[1])
    assert row[1:3] == [found[2], found[3]]
    return before


@pytest.mark.parametrize("name", ALIVE)
def test_ranks_that_live_start_the_step_again(name: str, ranks: list[dict[str, Any]]) -> None:
    check(name, [one[name] for one in ranks])


@pytest.mark.parametrize("name", HYBRID)
def test_on_a_mesh_too(name: str, ended: Ended) -> None:
    check(name, [one[name] for one in ended["four ranks"].result()], sharding_strategy="HYBRID_SHARD", mesh=(2, 2))


def test_ranks_that_may_be_a_step_apart_do_not_go_on(ranks: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(ranks):
        first, last = one["apart"]
        assert first[0] == ("Mine" if rank == 1 else "PeerFailed")
        if rank != 1:
            tells_where(first[-1], {"Net", "blocks.0"}, rank, len(ranks))
        assert last[0] == "WorldError" and "rank 0 has completed a backward that rank 1 has abandoned" in last[1]


def is_told_of_the_end(found: tuple[Told, list[Told]], rank: int, me: int) -> None:
    """What rank `me` was told of the last one, in the step and when it wants to go on."""
    first, (again,) = found
    assert first[0] == "PeerFailed" and first[2] == rank
    tells_where(first[-1], FORWARD, me, rank + 1)
    tells_where(again[-1], {"Net"}, me, rank + 1)
    assert again[0] == "PeerFailed" and f"rank {rank} has ended, while this rank waited for it to go on" in again[1]


def test_who_is_killed_is_named_by_all_others(ranks: list[dict[str, Any]]) -> None:
    assert "killed" not in ranks[2]
    for rank, one in enumerate(ranks[:2]):
        is_told_of_the_end(one["killed"], 2, rank)
        assert "rank 2 has ended" in one["killed"][0][1]


def test_who_ends_by_an_error_is_named_with_it(ended: Ended) -> None:
    found = ended["raises"].result()[0]["raises"]
    is_told_of_the_end(found, 1, 0)
    assert "rank 1 has abandoned the step, in unit 'blocks.1', with Mine: no" in found[0][1]


def test_who_wraps_alone_is_notified_that_the_other_has_ended(ended: Ended) -> None:
    kind, text, rank, *_ = ended["wraps alone"].result()[0]["wraps alone"]
    assert (kind, rank) == ("PeerFailed", 1)
    assert text.startswith("rank 1 has ended, while this rank waited for it in fully_shard. Every rank must call it.")


def test_who_has_stopped_is_the_one_that_is_not_named(ended: Ended) -> None:
    """It lives, and its connections as well: the others wait for the time-out of the group, which says who waits for what."""
    found = [one["stops"] for one in ended["stops"].result()[:2]]
    for rank, (kind, text, *why, notes) in enumerate(found):
        said = tells_where(notes, FORWARD, rank, 3)
        if kind == "PeerFailed":
            # the other one had lost patience first
            assert why[0] == 1 - rank and "imed out" in why[2]
            continue
        assert kind == "RuntimeError" and "imed out" in text
        (line,) = said.splitlines()
        rest = f". Ranks that are not named compute, hang, or wait in another library. {FEWER_BATCHES}"
        assert line.startswith("fsdp: ") and line.endswith(rest)
        assert {int(name) for name in re.findall(r"rank (\d) waits for all_gather\('blocks.[12]', \d+ bytes\)", line)} == {0, 1}
        assert "rank 2" not in line
    assert any(kind == "RuntimeError" for kind, *_ in found)


@pytest.mark.parametrize("ends", [False, True], ids=["fails", "killed"])
def test_a_rank_that_waits_on_a_device_is_freed_and_notified(ends: bool, ended: Ended) -> None:
    """By a thread: the host waits where nobody looks for a reason. Ranks that failed alike had gone on before."""
    alike, name = "all fail in a backward", "killed" if ends else "fails"
    reason = "has ended, while this rank waited for it" if ends else "Mine: no"
    waiting, failing = ended[f"device {name}"].result()
    (first, again), aborted = waiting[name]
    assert aborted
    assert (first[0], first[2:5]) == ("PeerFailed", (1, None if ends else "blocks.1", reason))
    assert "What was in flight on the device of rank 0 has been aborted" in first[1]
    tells_where(first[-1], FORWARD | BACKWARD, 0, 2)
    assert again[0] == "WorldError" and "Start the job again from a checkpoint" in again[1]
    if ends:
        assert name not in failing
        return
    (first, again), _ = failing[name]
    assert first[0] == "Mine"
    assert again[0] == "WorldError" and "rank 1 has abandoned the step, in unit 'blocks.1'" in again[1]
    assert not any(one[alike][1] for one in (waiting, failing)), "aborted, where nobody waited in vain"
    check(alike, [one[alike][0] for one in (waiting, failing)])
