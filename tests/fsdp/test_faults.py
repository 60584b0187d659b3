"""Checkpoints that are broken, and saves that are cut short: what happens is what docs/faults.md says."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from faults import (
    AT_REST,
    MODELS,
    SAVING,
    STAGES,
    load,
    make_model,
    page,
    plain,
    refusal_of_load,
    refusal_of_save,
    save,
    step_name,
)

import fsdp

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "faults.md"


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


def test_a_name_is_used_once(tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    rows["the name is taken"] = f"refused on every rank: {plain(refusal_of_save(tmp_path, 1), tmp_path)}"
    assert load(tmp_path / step_name(1)) == [1.0, 1.0]


def test_another_number_of_ranks_loads_it(tmp_path: Path, rows: dict[str, str]) -> None:
    save(tmp_path, 1)
    assert load(tmp_path / step_name(1), size=3) == [1.0] * 3
    rows["another number of ranks"] = "loaded; `extra` is what rank 0 gave"


def test_whenever_all_ranks_are_killed_a_complete_checkpoint_is_there(tmp_path: Path, rows: dict[str, str]) -> None:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    subprocess.run(
        [sys.executable, str(HERE / "faults.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=100,
    )
    for number, (stage, left) in enumerate(STAGES.items()):
        folder = tmp_path / str(number)
        newest = fsdp.latest(folder)
        step = 2 if left == "the new one" else 1
        assert newest == folder / step_name(step), stage
        assert load(newest) == [step, step], stage
        rows[f"all ranks are killed {stage}"] = (
            "the new checkpoint is complete"
            if step == 2
            else "the one before is the newest; a hidden folder is left, which the next save with `keep_last` removes"
        )
        fsdp.simulate(1, lambda rank, folder=folder: save_once_more(folder))
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            path.name for path in folder.iterdir() if path.name[0] != "."
        )


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
    every = len(rows) == len(AT_REST) + len(MODELS) + len(SAVING) + len(STAGES) + 2
    assert not every or shown == HEAD + page(rows) + "\n", remedy


HEAD = """# What happens to checkpoints when something breaks

Written by `tests/fsdp/test_faults.py` from what happened on two simulated ranks; rank 1 is quoted. A refusal comes on every rank,
before anything is loaded. Sizes are written N.

"""
