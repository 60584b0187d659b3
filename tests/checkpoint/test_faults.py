"""Checkpoints that are broken, and saves that are cut short: what happens is what docs/reference/faults.md says."""

import json
import os
import warnings
from pathlib import Path

import pytest

import fsdp
from tests.support.faults import (
    AT_REST,
    MODELS,
    SAVING,
    STAGES,
    full_disk,
    load,
    make_model,
    page,
    plain,
    refusal_of_load,
    refusal_of_save,
    save,
    step_name,
)
from tests.support.kills import KILLS
from tests.support.processes import ROOT, start_rank

PAGE = ROOT / "docs" / "reference" / "faults.md"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """What every test of this file found, by fault."""
    return {}


@pytest.mark.parametrize("fault", AT_REST)
def test_a_damaged_checkpoint_is_named_and_nothing_is_loaded(fault: str, tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    broken = tmp_path / step_name(2)
    AT_REST[fault](broken)
    found = plain(refusal_of_load(broken), tmp_path)
    assert not (broken / "owned").exists(), "a pickle was executed"
    with warnings.catch_warnings(record=True) as skipped:
        warnings.simplefilter("always")
        newest = fsdp.latest(tmp_path, verify=True)
    if newest == tmp_path / step_name(1):
        found += " `latest` with `verify` passes it over."
        assert load(newest) == [1.0, 1.0]
    assert newest == broken or skipped or not (broken / "manifest.json").exists()
    rows[fault] = f"refused: {found}"


@pytest.mark.parametrize("fault", MODELS)
def test_a_model_that_does_not_fit_is_named(fault: str, tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    rows[fault] = f"refused: {plain(refusal_of_load(tmp_path / step_name(1), MODELS[fault]), tmp_path)}"


@pytest.mark.parametrize("fault", SAVING)
def test_a_save_that_fails_leaves_what_was_there(fault: str, tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    with SAVING[fault]():
        found = plain(refusal_of_save(tmp_path, 2), tmp_path)
    assert not list(tmp_path.glob(".*")), "it left something behind"
    assert fsdp.latest(tmp_path) == tmp_path / step_name(1)
    assert load(tmp_path / step_name(1)) == [1.0, 1.0]
    rows[fault] = f"refused on every rank: {found} Nothing is left behind."


@pytest.mark.filterwarnings("ignore:save. .* was not saved:UserWarning")
def test_a_save_in_the_background_that_fails_leaves_what_was_there(tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    with full_disk():
        found = plain(refusal_of_save(tmp_path, 2, in_background=True), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [step_name(1)]
    assert load(tmp_path / step_name(1)) == [1.0, 1.0]
    rows["in a save in the background, the disk is full on one rank"] = (
        f"warned of when it happens, and raised on every rank by `wait()`, or by the next save: {found} Nothing is left behind."
    )


def test_a_name_is_used_once(tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    rows["the name is taken"] = f"refused on every rank: {plain(refusal_of_save(tmp_path, 1), tmp_path)}"
    assert load(tmp_path / step_name(1)) == [1.0, 1.0]


def test_another_number_of_ranks_loads_it(tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    assert load(tmp_path / step_name(1), size=3) == [1.0] * 3
    rows["another number of ranks"] = "loaded; `extra` is what rank 0 gave"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process left that killed parts of itself."""
    folder = tmp_path_factory.mktemp("killed")
    ended = start_rank("tests.support.kills", folder, output=(printed := folder / "printed")).wait(120)
    assert ended == 0, printed.read_text()
    return folder


@pytest.mark.gloo
def test_whenever_all_ranks_are_killed_a_complete_checkpoint_is_there(killed: Path, rows: dict[str, str]) -> None:
    for number, (stage, left) in enumerate(STAGES.items()):
        rows[f"all ranks are killed {stage}"] = outcome(killed / "all" / str(number), 2 if left == "the new one" else 1)


@pytest.mark.gloo
def test_whichever_of_two_processes_is_killed_a_complete_checkpoint_is_there(killed: Path, rows: dict[str, str]) -> None:
    for number, kill in enumerate(KILLS):
        folder = killed / "one" / str(number)
        told = ""
        if kill.victim is not None:
            found = json.loads((folder / "told.json").read_text())
            assert f"rank {kill.victim} has ended" in found["told"], (kill, found)
            told = "the other rank gets an error at once; "
        for name in ("store", "told.json"):
            (folder / name).unlink(missing_ok=True)
        rows[str(kill)] = told + outcome(folder, 2 if kill.appears else 1)


def outcome(folder: Path, step: int) -> str:
    """What is there after a save was cut short, which must be the whole checkpoint of `step`; and the next save cleans up."""
    newest = fsdp.latest(folder, verify=True)
    assert newest == folder / step_name(step), folder
    assert load(newest) == [step, step], folder
    assert (folder / step_name(2)).exists() == (step == 2)
    hidden = list(folder.glob(".*"))
    fsdp.simulate(1, lambda rank: save_once_more(folder))
    assert sorted(path.name for path in folder.iterdir()) == [step_name(one) for one in sorted({1, step, 3})]
    if step == 2:
        return "the new checkpoint is complete"
    left = "; a hidden folder is left, which the next save with `keep_last` removes" if hidden else "; nothing is left behind"
    return f"the one before is the newest{left}"


def save_once_more(folder: Path) -> None:
    fsdp.save(folder / step_name(3), make_model(3.0), keep_last=5)


def test_the_page_says_what_happened(rows: dict[str, str]) -> None:
    if os.environ.get("WRITE_FAULTS"):
        PAGE.write_text(HEAD + page(rows) + "\n", encoding="utf-8")
    shown = PAGE.read_text(encoding="utf-8")
    remedy = "run this file with WRITE_FAULTS=1 and read what changed"
    missing = [line for line in page(rows).splitlines() if line not in shown.splitlines()]
    assert not missing, remedy
    # if only some of this file's tests have run, only their lines are known
    every = len(rows) == len(AT_REST) + len(MODELS) + len(SAVING) + len(STAGES) + len(KILLS) + 3
    assert not every or shown == HEAD + page(rows) + "\n", remedy


HEAD = """# What happens to checkpoints when something breaks

Written by `tests/checkpoint/test_faults.py` from what happened on two simulated ranks, or over gloo where a row says processes.
Quoted is rank 1. Every rank refuses, before anything is loaded. Sizes are written N.

"""
