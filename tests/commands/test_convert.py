"""`python -m fsdp inspect` and `convert`: checkpoints without a model and without other ranks."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdp
from fsdp.commands.main import main
from tests.checkpoint.test_load import loaded, save_trained
from tests.support.faults import Evil
from tests.support.models import CASES, make_net, wrap
from tests.support.optimizers import assert_same
from tests.support.processes import run_module

CASE = CASES["net"]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A checkpoint of three ranks, and what is in it."""
    path = tmp_path / "saved"
    weights, state = fsdp.simulate(3, lambda rank: save_trained(rank, CASE, path))[0]
    return path, weights, state


Saved = tuple[Path, dict[str, Any], dict[str, Any]]


def test_inspect_says_what_is_inside(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved[0])]) == 0
    printed = capsys.readouterr().out
    elements = sum(tensor.numel() for tensor in saved[1].values())
    assert "format 1, saved by 3 ranks on " in printed
    assert f"model: {len(saved[1])} tensors, {elements:,} elements" in printed
    assert "extra: of 3 ranks\nrandom: of 3 ranks\n" in printed
    assert printed.endswith("healthy\n")
    assert "enter.weight" not in printed
    assert main(["inspect", "--tensors", str(saved[0])]) == 0
    assert "  model.enter.weight (8, 6) torch.float32 in " in capsys.readouterr().out


def test_inspect_names_what_is_damaged(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved[0] / "__2_0.distcp"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    assert main(["inspect", str(saved[0])]) == 1
    assert "damaged:\n  __2_0.distcp is damaged between bytes" in capsys.readouterr().out
    assert main(["convert", str(saved[0]), str(saved[0].parent / "out"), "--to", "dcp"]) == 1
    assert "saved is damaged: __2_0.distcp" in capsys.readouterr().err


def test_it_becomes_a_file_of_torch_save_and_a_checkpoint_again(saved: Saved, tmp_path: Path) -> None:
    path, weights, state = saved
    assert main(["convert", str(path), str(tmp_path / "one.pt"), "--to", "torch"]) == 0
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_same(found["model"], weights)
    assert_same(found["optimizer"]["state"], state["state"])
    assert found["extra"] == {str(rank): {"rank": rank} for rank in range(3)}
    make_net().load_state_dict(found["model"])
    assert main(["convert", str(tmp_path / "one.pt"), str(tmp_path / "again"), "--to", "dcp"]) == 0
    again = fsdp.simulate(2, lambda rank: loaded(rank, CASE, tmp_path / "again"))[0]
    assert_same(again[:2], (weights, state))
    assert again[2] == {"rank": 0}


def test_it_becomes_safetensors_and_a_checkpoint_again(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    path, weights, _ = saved
    assert main(["convert", str(path), str(tmp_path / "a"), "--to", "safetensors", "--max-shard-size", "1000"]) == 0
    assert main(["convert", str(path), str(tmp_path / "b"), "--to", "dcp", "--max-shard-size", "much"]) == 1
    assert "convert: --max-shard-size is 'much'; give bytes" in capsys.readouterr().err
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "dcp"]) == 0

    def fn(rank: int) -> tuple[Any, Any]:
        models = [wrap(CASE), wrap(CASE)]
        fsdp.load_safetensors(models[0], tmp_path / "a")
        fsdp.load(tmp_path / "b", models[1])
        return fsdp.full_state_dict(models[0]), fsdp.full_state_dict(models[1])

    for found in fsdp.simulate(2, fn)[0]:
        assert_same(found, weights)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no archive", "no file of torch.save with plain data"),
        (Evil(Path("owned")), "no file of torch.save with plain data"),
        ({"model": {}, "optimizer": {"state": {0: {"step": 1}}, "param_groups": []}}, "by number, and only its optimizer knows"),
    ],
    ids=["foreign", "malicious", "by number"],
)
def test_what_cannot_be_converted_is_named(
    content: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "dcp"]) == 1
    assert text in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]
    assert main(["convert", str(path), str(path), "--to", "dcp"]) == 1
    assert "a.pt exists already" in capsys.readouterr().err


NESTED: dict[str, tuple[Any, str]] = {
    "of Lightning": ({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, "a.pt, tensors lie under 'state_dict'; save the dict"),
    "under model": ({"model": {"net": {"a": torch.ones(2)}}}, "tensors lie under 'net'; save the dict of weights by itself"),
    "beside others": ({"a": torch.ones(2), "b": [{"c": torch.ones(2)}], "d": {"e": torch.ones(2)}}, "lie under 'd'"),
    "nothing": ({"epoch": 3}, "there are no weights"),
    "a list": ([torch.ones(2)], "a.pt holds a list; give a file or folder with a dict of weights"),
    "a tensor": (torch.ones(2), "a.pt holds a Tensor; give a file or folder with a dict of weights"),
}


@pytest.mark.parametrize(("content", "text"), NESTED.values(), ids=NESTED)
def test_weights_that_are_not_where_they_are_looked_for_are_no_empty_file(
    content: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    torch.save(content, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to", "safetensors"]) == 1
    assert text in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_weights_at_the_top_and_in_the_old_format_are_found(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    weights = make_net().state_dict()
    torch.save(weights, tmp_path / "old", _use_new_zipfile_serialization=False)
    dcp.save(weights, checkpoint_id=tmp_path / "folder")
    for name in ("old", "folder"):
        assert main(["convert", str(tmp_path / name), str(tmp_path / f"{name} out"), "--to", "safetensors"]) == 0
        assert_same(load_file(tmp_path / f"{name} out" / "model.safetensors"), dict(weights))


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_what_is_no_checkpoint_is_said_to_be_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [str(tmp_path / "out"), "--to", "torch"] if command == "convert" else []
    assert main([command, str(tmp_path / "a"), *more]) == 1
    assert f"{command}: there is no file or folder {tmp_path / 'a'}." in capsys.readouterr().err
    (tmp_path / "a").write_text("text")
    assert main([command, str(tmp_path / "a"), *more]) == 1
    said = {"convert": "is no checkpoint, and no file of torch.save", "inspect": "no finished checkpoint"}
    assert said[command] in capsys.readouterr().err


def test_a_file_of_torch_needs_numpy(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["convert", str(saved[0]), str(tmp_path / "one.pt"), "--to", "torch"]) == 1
    assert "convert to torch needs the package numpy: pip install numpy." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [saved[0]]


def test_it_is_a_command(tmp_path: Path) -> None:
    done = run_module("fsdp", "inspect", tmp_path)
    assert done.returncode == 1
    assert "has no .metadata: no finished checkpoint" in done.stderr


def test_nothing_is_read_after_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save({f"w{number}": torch.ones(1000) for number in range(5)}, tmp_path / "a.pt")
    refused = mock.Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(safetensors, "save_file", refused)
    arguments = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to", "safetensors", "--max-shard-size", "4000"]
    assert main(arguments) == 1
    assert refused.call_count == 1
