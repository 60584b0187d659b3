"""What the file system refuses is a sentence on every rank: the path, the reason, the remedy."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fsdp
from fsdp.commands.main import main as command
from fsdp.file_errors import reason_of
from tests.support import ranks
from tests.support.faults import make_model, save, step_name

ROOM = "No space left on device; make room, or give a path on another disk"
FOLDER = "a file stands where a folder is needed, so give another path"
PERMISSION = "Permission denied; give a path for which this process has the permission"

WRITES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "save": lambda model, path: fsdp.save(path, model),
    "export_safetensors": lambda model, path: fsdp.export_safetensors(model, path),
}
READS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "load": lambda model, path: fsdp.load(path, model),
    "load_safetensors": lambda model, path: fsdp.load_safetensors(model, path),
}


def refusals(use: Callable[[nn.Module, Path], Any], path: Path) -> list[str]:
    """The texts on two ranks. Each must be told."""
    return [text.removeprefix("rank 0: ") for text in ranks.refusals(2, lambda rank: use(make_model(), path))]


def refused(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("what", WRITES)
def test_a_file_in_place_of_the_folder_around_it(what: str, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    for path in (file / "a", file / "deeper" / "a"):
        for text in refusals(WRITES[what], path):
            assert text.startswith(f"{what}: cannot write in {path.parent}: ")
            assert FOLDER in text
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("what", WRITES)
def test_a_folder_without_the_permission_to_write(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", refused)
    for text in refusals(WRITES[what], tmp_path / "a"):
        assert text == f"{what}: cannot write in {tmp_path}: {PERMISSION}."


@pytest.mark.parametrize("what", WRITES)
def test_a_name_that_is_too_long(what: str, tmp_path: Path) -> None:
    for text in refusals(WRITES[what], tmp_path / ("n" * 300)):
        assert "File name too long" in text and text.endswith("; give a shorter name.")


@pytest.mark.parametrize("limit", ["1KB", "1GB"])
def test_a_full_disk_ends_an_export_on_every_rank(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    folder = tmp_path / "a"
    for text in refusals(lambda model, path: fsdp.export_safetensors(model, path, limit), folder):
        assert text.endswith(f"export_safetensors: {folder} could not be written: {ROOM}. Nothing appeared there.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", READS)
def test_a_folder_that_is_not_there(what: str, tmp_path: Path) -> None:
    sentence = {
        "load": f"{tmp_path}/a has no manifest.json: it is not there. fsdp.latest(folder) finds the newest finished one.",
        "load_safetensors": f"load_safetensors {tmp_path}/a: there is no such file or folder.",
    }
    assert refusals(READS[what], tmp_path / "a") == [sentence[what]] * 2


@pytest.mark.parametrize("what", READS)
def test_a_folder_without_the_permission_to_read(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    path = tmp_path / step_name(1)
    fsdp.simulate(2, lambda rank: fsdp.export_safetensors(make_model(), tmp_path / "exported"))
    monkeypatch.setattr(Path, "is_file", refused)
    for text in refusals(READS[what], path if what == "load" else tmp_path / "exported"):
        assert text.startswith(f"{what}: {tmp_path}") and text.endswith(f" cannot be read: {PERMISSION}.")


def test_latest_of_a_folder_that_is_not_there_yet_is_none(tmp_path: Path) -> None:
    assert fsdp.latest(tmp_path / "a") is None
    assert fsdp.latest(tmp_path) is None


def test_latest_never_takes_a_folder_that_it_cannot_read_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    (file := tmp_path / "file").write_text("")
    with pytest.raises(fsdp.ShardingError, match=FOLDER) as refusal:
        fsdp.latest(file)
    assert str(refusal.value).startswith(f"latest: {file} cannot be read: Not a directory; ")
    one = tmp_path / step_name(1)
    with pytest.raises(fsdp.ShardingError) as refusal:
        fsdp.latest(one)
    assert str(refusal.value) == f"latest: {one} is a checkpoint itself; load it, or give the folder around it."
    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(fsdp.ShardingError) as refusal:
        fsdp.latest(tmp_path)
    assert str(refusal.value) == f"latest: {tmp_path} cannot be read: {PERMISSION}."


def test_latest_passes_over_a_checkpoint_that_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    real = Path.read_text

    def read_text(self: Path, **options: Any) -> str:
        return refused() if self.parent.name == step_name(2) else real(self, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert fsdp.latest(tmp_path) == tmp_path / step_name(1)
    assert [str(one.message) for one in warned] == [f"skipped: {tmp_path / step_name(2)}: {PERMISSION}."]


def test_an_old_checkpoint_that_cannot_be_removed_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr("fsdp.checkpoint.save.hide", refused)
    with pytest.warns(UserWarning) as warned:
        fsdp.simulate(2, lambda rank: fsdp.save(tmp_path / step_name(2), make_model(), keep_last=1))
    (text,) = [str(one.message) for one in warned]
    assert text == f"save: the old checkpoint {tmp_path / step_name(1)} could not be removed: {PERMISSION}"
    assert fsdp.latest(tmp_path) == tmp_path / step_name(2)


def test_the_commands_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert command(["convert", str(tmp_path / step_name(1)), str(tmp_path / "a"), "--to", "torch"]) == 1
    assert capsys.readouterr().err == f"fsdp: convert: {ROOM}.\n"


def test_what_the_file_system_did_not_refuse_stays_what_it_is() -> None:
    assert reason_of(RuntimeError("a bug"), Path()) is None
    assert reason_of(OSError("broken"), Path()) == "broken"
    assert reason_of(OSError(errno.EIO, "Input/output error", "/a/b"), Path("/a")) == "Input/output error (/a/b)"
