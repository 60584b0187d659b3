"""Steps that fail: what happens is what docs/reference/failures.md says."""

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp
from tests.support.processes import results_of, start_rank
from tools import failures
from tools.failures import (
    ALONE,
    APART,
    BESIDE,
    HEAD,
    NOT_REACHED,
    PAGE,
    POINTS,
    RECOVERED,
    STRATEGIES,
    TOO_LATE,
    in_processes,
    page,
    row_of,
    rows_of,
    simulated,
)
from tools.peer_engines import ENGINES
from tools.peer_failures import ALONE_TITLE, Cell, run
from tools.soak import reached

# one strategy for each point, in turn; all of them if the environment asks
ALL = [(name, strategy) for name in POINTS for strategy in STRATEGIES]
SOME = [(name, tuple(STRATEGIES)[number % len(STRATEGIES)]) for number, name in enumerate(POINTS)]


@pytest.mark.parametrize(("name", "strategy"), ALL if os.environ.get("ALL_FAILURES") else SOME)
def test_what_happens_when_a_step_fails_is_on_the_page(name: str, strategy: str) -> None:
    written = rows_of(PAGE.read_text(encoding="utf-8").partition(ALONE)[0])
    assert row_of(name, strategy, simulated) == written[name, strategy]


def test_the_page_has_every_row_twice_and_nothing_that_is_not_recovered_but_late_hooks() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(BESIDE)[0]
    assert text.startswith(HEAD)
    alike, _, alone = text.partition(ALONE)
    for table, late in ((alike, set()), (alone, {APART})):
        rows = rows_of(table)
        assert set(rows) == set(ALL)
        assert page(rows) in table
        for (name, _), row in rows.items():
            good = {NOT_REACHED, TOO_LATE if name == "a post-accumulate hook" else RECOVERED}
            assert set(row.values()) <= good | late


@pytest.mark.gloo
def test_what_happens_when_one_rank_fails_alone_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are recovered, some unheard by any hook, one where all are told, and one under NO_SHARD, in two processes."""
    text = PAGE.read_text(encoding="utf-8").partition(BESIDE)[0].partition(ALONE)[2]
    cells = [
        ("a node of the backward", "FULL_SHARD", "backward"),
        ("the loss", "FULL_SHARD", "forward"),
        ("a node of the loss", "SHARD_GRADIENTS", "backward"),
        ("between units", "SHARD_GRAD_OP", "no_sync"),
        ("a hook on a parameter", "NO_SHARD", "replay"),
    ]
    monkeypatch.setattr(failures, "start_rank", partial(start_rank, "tests.support.stalls"))
    found = in_processes(cells, limit=60)
    for name, strategy, phase in cells:
        assert found[f"{name}/{strategy}/{phase}"] == rows_of(text)[name, strategy][phase]
    assert set(found.values()) == {RECOVERED, APART}


@pytest.mark.gloo
def test_what_happens_in_another_engine_is_on_the_page() -> None:
    """One cell of ours and one of FSDP2, in two processes."""
    place, phase = "a node of the backward", "backward"
    text = PAGE.read_text(encoding="utf-8").partition(BESIDE)[2]
    (row,) = (line for line in text.partition(ALONE_TITLE)[0].splitlines() if line.startswith(f"| {place} | {phase} |"))
    written = dict(zip(ENGINES, (one.strip() for one in row.strip("|").split("|")[2:]), strict=True))
    assert written["fsdp"] == RECOVERED
    for cell, verdict in run([Cell(engine, place, phase, alone=False) for engine in ENGINES[:2]]):
        assert verdict == written[cell.engine]


def test_the_soak_of_faults_finds_the_cells_of_the_page() -> None:
    assert set(STRATEGIES) == set(reached()) and min(map(len, reached().values())) > 20


def train_after_an_error_in_the_loss(rank: int, size: int, folder: Path) -> list[str]:
    """The errors of four steps, of which one rank fails once between its forward and its backward, and drops the graph."""
    found = []
    model = fsdp.fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), auto_wrap_policy={nn.Linear})
    for step in ("first", "failing", "failing", "third", "fourth"):
        try:
            output = model(torch.ones(2, 8))
            if step == "failing" and rank == 1 and not found:
                del output
                raise ValueError(step)
            output.sum().backward()
        except (ValueError, fsdp.WorldError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.gloo
def test_the_steps_after_a_step_done_again_go_on(tmp_path: Path) -> None:
    assert results_of(train_after_an_error_in_the_loss, 2, tmp_path) == [["PeerFailed"], ["ValueError"]]


def test_the_steps_after_a_step_done_again_go_on_in_the_simulated_world(tmp_path: Path) -> None:
    for seed in range(5):
        found = fsdp.simulate(2, lambda rank: train_after_an_error_in_the_loss(rank, 2, tmp_path), seed)
        assert found == [["PeerFailed"], ["ValueError"]]


def test_a_rank_that_fails_twice_in_the_loss_gets_no_error_about_itself() -> None:
    """Also while no garbage is collected: the first failure must not keep the graph of the second attempt."""

    def fn(rank: int) -> list[str]:
        found = list[str]()
        model = fsdp.fully_shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), auto_wrap_policy={nn.Linear})

        def attempt() -> None:
            loss = model(torch.ones(2, 8)).sum()
            if rank == 1 and len(found) < 2:
                raise ValueError
            loss.backward()

        while len(found) < 3:
            try:
                attempt()
                found.append("done")
            except (ValueError, fsdp.WorldError) as error:
                found.append(type(error).__name__)
        return found

    gc.disable()
    try:
        assert fsdp.simulate(2, fn) == [["PeerFailed", "PeerFailed", "done"], ["ValueError", "ValueError", "done"]]
    finally:
        gc.enable()
