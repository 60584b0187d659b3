"""How far something long has come: what a function of the user hears, what a bar shows."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import fsdp
from tests.support.models import CASES, wrap

LONG: Final[dict[str, Callable[..., Any]]] = {
    "save": lambda model, path, progress: fsdp.save(path / "new", model, progress=progress),
    "async save": lambda model, path, progress: fsdp.save(path / "new", model, async_=True, progress=progress).wait(),
    "load": lambda model, path, progress: fsdp.load(path / "a", model, progress=progress),
    "export": lambda model, path, progress: fsdp.export_safetensors(model, path / "new", 300, progress=progress),
    "import": lambda model, path, progress: fsdp.load_safetensors(model, path / "b", progress=progress),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fsdp.simulate(2, lambda rank: fsdp.save(tmp_path / "a", wrap(CASES["net"])))
    fsdp.simulate(2, lambda rank: fsdp.export_safetensors(wrap(CASES["net"]), tmp_path / "b"))
    return tmp_path


@pytest.mark.parametrize("what", LONG)
def test_a_function_gets_the_progress_from_nothing_to_everything(what: str, path: Path) -> None:
    def fn(rank: int) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        LONG[what](wrap(CASES["net"]), path, lambda done, total: told.append((done, total)))
        return told

    for told in fsdp.simulate(2, fn):
        done, totals = zip(*told, strict=True)
        assert len(done) > 4 and list(done) == sorted(done) and done[0] == 0
        assert sum(one > done[-1] / 2 for one in done) > 2, "it jumps to the end"
        assert set(totals) == {done[-1]} and done[-1] > 200


@pytest.mark.parametrize("what", LONG)
def test_a_bar_is_shown_on_rank_0(what: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    fsdp.simulate(2, partial(run, what=what, path=path, progress=True))
    shown = capsys.readouterr().err
    assert "100%" in shown and shown.count("\n") == 1, shown


def run(rank: int, what: str, path: Path, progress: Any) -> None:
    LONG[what](wrap(CASES["net"]), path, progress)


@pytest.mark.parametrize("what", LONG)
def test_without_the_package_the_error_says_how_to_get_it(what: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(fsdp.ShardingError, match=r"progress=True needs the package tqdm: pip install tqdm\."):
        fsdp.simulate(2, partial(run, what=what, path=path, progress=True))
    with pytest.raises(fsdp.ShardingError, match=r"progress is 7; give True, or a function"):
        fsdp.simulate(2, partial(run, what=what, path=path, progress=7))
    assert not list(path.glob("*new*"))


@pytest.mark.parametrize("what", LONG)
def test_a_function_that_raises_stops_nothing(what: str, path: Path) -> None:
    def broken(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.warns(UserWarning, match=r"progress raised ZeroDivisionError\(\), and is not called again"):
        fsdp.simulate(2, lambda rank: run(rank, what, path, broken if rank else lambda done, total: None))
    assert what in ("load", "import") or (path / "new").exists()


def test_tqdm_is_imported_only_when_asked_for(path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tqdm"]:
        del sys.modules[name]
    fsdp.simulate(2, lambda rank: fsdp.save(path / "new", wrap(CASES["net"])))
    assert "tqdm" not in sys.modules
