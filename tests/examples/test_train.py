"""The training example runs, learns, and refuses what it cannot run: as a job of its own, and once as torchrun starts it."""

import errno
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.everything import EVERYTHING
from tests.support.jobs import run_alone, run_job
from tests.support.processes import command, environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train.py"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--batch", "4"]
TINY = [*SMALL, "--eval-every", "20", "--sample-bytes", "12"]
SECONDS = 120
OPTIONS = [[], ["--checkpoint-activations", "--strategy", "SHARD_GRAD_OP"], ["--checkpoint-activations", "--precision", "bf16"]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text that even a tiny model learns in a few steps: what comes next follows from what came before."""
    folder = tmp_path / "text"
    (folder / "deeper").mkdir(parents=True)
    (folder / "one.txt").write_text("the quick brown fox\n" * 300)
    (folder / "deeper" / "two.md").write_text("the quick brown fox\n" * 300)
    (folder / "picture.bin").write_bytes(bytes(range(256)) * 100)
    return folder


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, for what needs no processes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delenv("RANK", raising=False)
    return importlib.import_module("train")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "options",
    OPTIONS if EVERYTHING else OPTIONS[::2],
    ids=" ".join,
)
def test_two_processes_learn_and_leave_their_results(text: Path, tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "runs" / "deep"
    status, output = launch(2, [text, *TINY, "--steps", "60", "--lr", "0.01", "--out", out, *options])
    assert status == 0, output
    assert "0.01 MB of text in 2 files" in output
    assert "2 processes (cpu, gloo)" in output
    assert "is clearly below the byte-unigram entropy" in output
    assert "/rank" in output, "the progress bar shows the bytes held"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert 64 < len((out / "sample.txt").read_text()) <= 64 + 12, "the prompt, and at most a character for each byte"
    numbers = json.loads((out / "losses.json").read_text())
    assert [step for step, _ in numbers["train"]] == list(range(1, 61))
    assert [step for step, _ in numbers["held_out"]] == [0, 20, 40, 60]
    assert numbers["held_out"][-1][1] < 0.9 * numbers["unigram_entropy"] < numbers["held_out"][0][1]


@pytest.mark.gloo
def test_two_processes_and_one_train_on_the_same_global_batches(text: Path, tmp_path: Path) -> None:
    options = [text, *TINY, "--steps", "5", "--optimizer", "sgd"]
    losses = []
    for processes, batch in ((2, 4), (1, 8)):
        out = tmp_path / str(processes)
        launch(processes, [*options, "--batch", str(batch), "--out", out])
        numbers = json.loads((out / "losses.json").read_text())
        losses.append([loss for _, loss in numbers["train"] + numbers["held_out"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.gloo
def test_compare_finds_the_sharded_and_the_unsharded_model_the_same(text: Path, tmp_path: Path) -> None:
    status, output = launch(2, [text, *TINY, "--compare", "--steps", "8", "--out", tmp_path / "out"])
    assert status == 0, output
    assert "comparing over 8 steps of sgd; SGD is the default here because" in output
    assert "sharded on 2 ranks against unsharded, 8 steps: largest relative difference" in output
    assert "the same within 1e-05" in output


def test_the_largest_difference_is_relative_to_each_tensor_and_a_nan_is_the_largest(train: ModuleType) -> None:
    theirs = {"small": torch.tensor([0.1, 0.0]), "large": torch.tensor([10.0, 1.0]), "zero": torch.zeros(2)}
    ours = {name: value.clone() for name, value in theirs.items()}
    assert train.largest_difference(ours, theirs)[0] == 0
    ours["large"][1] += 0.1  # a hundredth of that tensor's largest value
    ours["small"][1] += 0.002  # a fiftieth
    assert train.largest_difference(ours, theirs) == (pytest.approx(0.02), "small")
    ours["large"][0] = torch.nan
    difference, where = train.largest_difference(ours, theirs)
    assert math.isnan(difference)
    assert where == "large"


def test_one_process_needs_no_torchrun_and_says_when_it_did_not_learn(text: Path, tmp_path: Path) -> None:
    status, output = launch(1, [text, *TINY, "--steps", "1", "--out", tmp_path / "out"])
    assert status == 1, output
    assert "1 process (cpu, gloo)" in output
    assert "is NOT clearly below the byte-unigram entropy" in output
    assert (tmp_path / "out" / "loss.png").exists()


@pytest.mark.gloo
def test_a_refusal_is_said_once(tmp_path: Path) -> None:
    status, output = launch(2, [tmp_path])
    assert status != 0
    assert output.count("holds no text") == 1


def test_what_cannot_be_trained_on_is_refused_in_a_sentence(
    train: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    (empty / "site-packages").mkdir(parents=True)
    (empty / "site-packages" / "library.py").write_text("not looked into")
    short.mkdir()
    (short / "note.txt").write_text("hello")
    refusals: list[tuple[list[Any], str]] = [
        ([empty], "holds no text"),
        ([tmp_path / "nowhere"], "is not a folder; name one that holds text files"),
        ([short], "holds 5 bytes of text; --context 128 needs at least 2,600"),
        ([text, "--width", "33", "--heads", "2"], "--width 33 is not a multiple of --heads 2"),
        ([text, "--out", text / "one.txt"], "cannot be a folder"),
        ([text, "--steps", "0"], "argument --steps: 0 is not above zero"),
        ([text, "--lr", "nan"], "argument --lr: nan is not above zero"),
    ]
    for arguments, sentence in refusals:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            train.main()
        assert ending.value.code == 2
        assert sentence in capsys.readouterr().err


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.filterwarnings("ignore:save. .* was not saved:UserWarning")
@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        ("fsdp.checkpoint.dcp.FileSystemWriter.write_data", "step-2 could not be written: No space left on device; make room"),
        ("pathlib.Path.write_text", "{out}: No space left on device"),
        ("pathlib.Path.open", "{out}: No space left on device"),
    ],
)
def test_what_the_file_system_refuses_is_a_sentence(
    refused: str,
    sentence: str,
    train: ModuleType,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, [text, *TINY, "--steps", 2, "--checkpoint-every", 2, "--out", out])])
    with mock.patch(refused, side_effect=NO_ROOM), pytest.raises(SystemExit) as ending:
        train.main()
    assert ending.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("train.py: ")
    assert sentence.format(out=out) in last
    assert not torch.distributed.is_initialized()


def test_a_picture_and_a_bar_need_packages_that_training_does_not(
    train: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", *map(str, [text, *TINY, "--steps", 20, "--lr", 0.01, "--out", tmp_path / "out"])]
    )
    monkeypatch.setattr(train, "tqdm", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    train.main()
    shown = capsys.readouterr()
    assert "step 20 of 20: loss " in shown.out and "/rank\n" in shown.out
    assert "wrote losses.json and sample.txt to " in shown.out
    assert "a picture of the losses needs the package matplotlib" in shown.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["losses.json", "sample.txt"]


def test_a_global_batch_is_a_function_of_seed_and_step(train: ModuleType, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", str(text), *TINY])
    args = train.parse_arguments()
    corpus = train.read_corpus(args)
    first = corpus.batch(args, 0, 2)
    assert first.shape == (8, 17)
    assert torch.equal(first, train.read_corpus(args).batch(args, 0, 2))
    assert not torch.equal(first, corpus.batch(args, 1, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 200])
def test_every_rank_gets_as_many_held_out_windows(
    train: ModuleType, text: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", str(text), *TINY])
    args = train.parse_arguments()
    windows = train.read_corpus(args).held_out_windows(args.context, ranks)
    assert len(windows) % ranks == 0
    assert windows.shape[1] == 17


@pytest.mark.gloo
def test_a_run_survives_a_killed_rank_and_goes_on_with_another_number_of_ranks(
    train: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [text, *TINY, "--steps", "40", "--lr", "0.01"]
    out, folder = tmp_path / "killed", tmp_path / "killed" / "checkpoints"

    def kill_a_rank(process: subprocess.Popen[str]) -> None:
        until = time.monotonic() + SECONDS
        while not (folder / "step-10").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(workers_of(process.pid)[1], signal.SIGKILL)

    checkpoints = ["--checkpoint-every", "10", "--resume", "--out", out]
    status, output = torchrun([*options, "--batch", "4", *checkpoints], kill_a_rank)
    assert status == 0, output
    assert "resumed from" in output
    assert sorted(path.name for path in folder.iterdir()) == ["step-30", "step-40"]
    shutil.rmtree(folder / "step-40")
    killed = json.loads((out / "losses.json").read_text())
    # one process needs none of its own
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, [*options, "--batch", "8", *checkpoints])])
    assert train.main() == 0
    assert f"resumed from {folder / 'step-30'}" in capsys.readouterr().out
    alone = json.loads((out / "losses.json").read_text())
    assert [step for step, _ in killed["train"]] == [step for step, _ in alone["train"]] == list(range(1, 41))
    for part in ("train", "held_out"):
        assert [loss for _, loss in alone[part]] == pytest.approx([loss for _, loss in killed[part]], rel=1e-3)


def test_checkpoints_of_another_run_are_not_written_over(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step-10").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["train.py", "--checkpoint-every", "10", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        train.parse_arguments()
    assert end.value.code == 2


def workers_of(starter: int) -> list[int]:
    """The processes that torchrun started."""
    return [int(pid) for pid in Path(f"/proc/{starter}/task/{starter}/children").read_text().split()]


def launch(processes: int, arguments: list[Any]) -> tuple[int, str]:
    """Run the example: the exit status, and everything it printed. With one process no launcher takes part."""
    folder = Path(arguments[0])
    ended = (
        run_job(SCRIPT, *arguments, size=processes, cwd=folder, seconds=SECONDS)
        if processes > 1
        else run_alone(SCRIPT, *arguments, cwd=folder, seconds=SECONDS)
    )
    return ended.status, ended.output + ended.errors


def torchrun(arguments: list[Any], meanwhile: Callable[["subprocess.Popen[str]"], None]) -> tuple[int, str]:
    """Run the example with torchrun, which starts its two processes again once. It is ended after SECONDS, workers included."""
    process = subprocess.Popen(
        command("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", SCRIPT, *arguments),
        env=environment(CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        meanwhile(process)
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its workers, which a SIGKILL would leave behind
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        pytest.fail(f"not done after {SECONDS} s:\n{output}")
    return process.returncode, output
