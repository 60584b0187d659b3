"""All ranks of a job answer into one table, and a rank that does not is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp
from fsdp.comm.failure.pending_call import PendingCall, Wait
from fsdp.comm.simulated import SimulatedCommunicator
from fsdp.commands.main import main
from fsdp.commands.reporting.who import answers_in, table_of
from fsdp.debug.answer_who import QUESTION, RUN_DIR, RankAnswers
from fsdp.runtime.registry import engines_in

HANGS = """
import threading, torch, fsdp
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
model = fsdp.fully_shard(torch.nn.Linear(2, 2))
model.register_forward_pre_hook(lambda *_: (print("ready", flush=True), threading.Event().wait(60)))
model(torch.ones(1, 2))
"""


def write_answers(folder: Path, asked: str) -> None:
    """Two ranks of four answer: rank 0 waits for rank 3 in its forward, and rank 1 is between two passes."""

    def one_rank(rank: int) -> None:
        model = fsdp.fully_shard(torch.nn.Linear(2, 2))
        (engine,) = engines_in(model, "test")
        answers = RankAnswers(folder, rank, 4, lambda: [engine.snapshot()])
        if rank == 0:
            model.register_forward_pre_hook(lambda *_: answers.write(asked))
            model(torch.ones(1, 2))
        else:
            model(torch.ones(1, 2))
            answers.write(asked)

    fsdp.simulate(2, one_rank)


def test_a_table_says_where_each_rank_is_and_who_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = PendingCall("shard", 1, "all_gather('blocks.3')", "", {}, where="all_gather of blocks.3")
    monkeypatch.setattr(Wait, "seconds", 12.0)
    monkeypatch.setattr(
        SimulatedCommunicator, "waits", lambda comm: Wait(0.0, call, 0, (3,)) if (comm.name, comm.rank) == ("shard", 0) else None
    )
    write_answers(tmp_path, "7")
    answers = answers_in(tmp_path)
    known = {**answers, 2: {**answers[1], "rank": 2, "pid": 2**30}}
    lines = [line.split("  ") for line in table_of(known, answers, stacks=False)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == ["rank", "unit", "state", "waits for", "since", "who is not there"]
    assert cells[1] == ["0", "Linear", "FORWARD", "all_gather of blocks.3", "12 s", "rank 3"]
    assert cells[2] == ["1", "between two passes", "backward RESTING", "after all_gather Linear"]
    assert cells[3][0] == "2" and cells[3][1].startswith("ended: process ")
    assert cells[4] == ["3", "never began"]
    assert cells[5:] == [
        ["No answer from ranks 2, 3 of 4."],
        ["Others wait for rank 3: look at the unit and the stack there (--stacks)."],
    ]


def test_a_question_is_answered_once(tmp_path: Path) -> None:
    answers = RankAnswers(tmp_path, 0, 1, lambda: [])
    answers.look()
    assert not list(tmp_path.iterdir()), "nobody has asked"
    (tmp_path / QUESTION).write_text("1")
    answers.look()
    written = (tmp_path / "rank-0.json").stat().st_mtime_ns
    answers.look()
    assert (tmp_path / "rank-0.json").stat().st_mtime_ns == written and answers_in(tmp_path)[0]["asked"] == "1"


def test_a_folder_that_cannot_be_written_to_is_reported_and_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    RankAnswers(tmp_path / "file", 0, 1, lambda: []).write("1")
    assert "rank 0 could not answer" in capsys.readouterr().err


def test_a_process_that_hangs_answers_and_one_that_is_stopped_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", RUN_DIR: str(tmp_path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert main(["who", "--pid", str(os.getpid()), "--stacks", "--timeout", "3"]) == 1
        told = capsys.readouterr().out
        assert "Linear" in told and "FORWARD" in told and "never began" in told and 'File "<string>"' in told
        process.send_signal(signal.SIGSTOP)
        assert main(["who", "--run-dir", str(tmp_path), "--timeout", "1"]) == 1
        assert f"no answer: process {process.pid} on" in capsys.readouterr().out
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_asked_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, text in (
        (["--run-dir", str(tmp_path / "none")], "is no folder; give the one that FSDP_RUN_DIR named"),
        (["--run-dir", str(tmp_path)], "no rank has written into"),
        (["--pid", str(2**30)], "there is no process 1073741824 on this host"),
    ):
        assert main(["who", *given]) == 1
        assert text in capsys.readouterr().err
