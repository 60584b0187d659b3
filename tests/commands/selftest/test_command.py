"""`python -m fsdp selftest` on the CPU over gloo: all checks pass, and one that fails is named."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from fsdp.commands.main import main
from fsdp.commands.selftest import command
from fsdp.commands.selftest.checks import CHECKS
from fsdp.commands.selftest.training import Place, require_close, require_equal
from fsdp.debug.delays import DELAYS
from tests.support.processes import Rank, start_rank

OF_A_DEVICE = ("host waits in a step", "a step that runs out of memory")


@pytest.mark.gloo
def test_every_check_passes_over_gloo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(given: list[str], stdout: Any, stderr: int) -> Rank:
        assert given[:2] == [sys.executable, "-m"]
        return start_rank(*given[2:], output=Path(stdout.name))

    monkeypatch.setattr(subprocess, "Popen", fork)
    status, printed = main(["selftest", "--cpu"]), capsys.readouterr().out
    assert status == 0, printed
    lines = printed.splitlines()
    for name in CHECKS:
        line = next(one for one in lines if f" {name} " in one)
        assert line.startswith("skipped" if name in OF_A_DEVICE else "passed"), line
    assert "2 ranks over gloo" in lines and "NOT checked" in printed and "Every check passed" in lines[-1]


def test_a_rank_that_dies_is_in_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"check": next(iter(CHECKS)), "outcome": "passed", "said": "fine", "seconds": 1.0}
    bad = {**line, "outcome": "FAILED", "said": "AssertionError: a weight is off"}

    def ranks(size: int, folder: Path, kind: str) -> list[str]:
        (folder / "0.jsonl").write_text(json.dumps(line) + "\n")
        (folder / "1.jsonl").write_text(json.dumps(bad) + "\n" + json.dumps(line)[:20])
        return ["", "the traceback of rank 1"]

    monkeypatch.setattr(command, "_run_ranks", ranks)
    assert command.run_selftest(argparse.Namespace(cpu=True, ranks=None)) == 1
    printed = capsys.readouterr().out
    assert "FAILED   trains as without shards: FULL_SHARD" in printed and "rank 1: AssertionError: a weight is off" in printed
    assert printed.count("NOT RUN") == len(CHECKS) - 1
    assert "the traceback of rank 1" in printed and "NOT every check passed" in printed


def test_an_impossible_number_of_ranks_is_refused() -> None:
    with pytest.raises(fsdp.ShardingError, match="--ranks is 0"):
        command.run_selftest(argparse.Namespace(cpu=True, ranks=0))


def test_a_wrong_weight_is_no_equal_one() -> None:
    one = {"a": torch.ones(3), "b": torch.zeros(2)}
    with pytest.raises(AssertionError, match=r"off by 0\.5"):
        require_close({"a": torch.tensor([1.0, 1.5, 1.0])}, {"a": torch.ones(3)}, 0.1)
    with pytest.raises(AssertionError, match="off by nan"):
        require_close({"a": torch.full((3,), torch.nan)}, {"a": torch.ones(3)}, 0.1)
    with pytest.raises(AssertionError, match="other names"):
        require_close({"a": torch.ones(3)}, one, 0.1)
    with pytest.raises(AssertionError, match="bits of 'b' differ"):
        require_equal({**one, "b": torch.ones(2)}, one)


@pytest.mark.parametrize(
    "name",
    [
        "trains as without shards: FULL_SHARD",
        "the same bits under random delays",
        "activation checkpointing, both kinds",
        "a step that fails on all ranks",
        "memory between steps",
    ],
)
def test_a_check_sees_a_broken_engine(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clip that does another thing on each call, or a model that holds more bytes after training."""
    calls = iter(range(1000))

    def clip(model: object, max_norm: float) -> None:
        for parameter in model.parameters():  # type: ignore[attr-defined]
            fsdp.to_local(parameter.grad).mul_(1 + 0.1 * next(calls))

    monkeypatch.setattr(fsdp, "clip_grad_norm_", clip)
    monkeypatch.setattr(fsdp, "memory_bytes", lambda model: next(calls))
    check = CHECKS[name]
    with pytest.raises(AssertionError):
        fsdp.simulate(2, lambda rank: check(Place(rank, 2, torch.device("cpu"), tmp_path)))
    assert DELAYS not in os.environ
