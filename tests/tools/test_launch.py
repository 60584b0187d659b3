"""`make train`: what it installs, that it takes folders with spaces, and that it ends in a sentence."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.support.processes import ROOT, run_module
from tools import launch

SCRIPT = "import os, sys, time; time.sleep(int(os.environ['RANK']) * 60); print('I say why', flush=True); sys.exit(3)"


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run make as a user does, also inside `make test`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "DATA", "ARGS"))}
    asked = ["make", "--always-make", "--no-print-directory", *arguments]
    return subprocess.run(asked, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=False)


def recipe(*arguments: str) -> list[str]:
    """What make would run, were nothing made yet."""
    return make("--dry-run", *arguments).stdout.splitlines()


def test_a_rank_that_fails_is_named_in_the_last_line(tmp_path: Path) -> None:
    (script := tmp_path / "a folder with spaces" / "script.py").parent.mkdir()
    script.write_text(SCRIPT)
    ran = run_module("tools.launch", "--standalone", "--nproc-per-node=2", script)
    assert ran.returncode == 3
    assert ran.stdout == "I say why\n"
    assert ran.stderr == "rank 0 ended with exit status 3, and the others were stopped; what went wrong is said above\n"


@pytest.mark.parametrize(
    ("raised", "status", "text"),
    [
        (None, 0, ""),
        (KeyboardInterrupt(), 130, "all ranks were stopped, because this program was\n"),
        (-9, 137, "rank 1 was killed by SIGKILL (as by the system, when memory is short), and the others were stopped"),
        (-6, 134, "rank 1 was killed by SIGABRT, and the others were stopped"),
    ],
)
def test_every_ending_is_a_sentence(
    raised: Any, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def torchrun(arguments: list[str]) -> None:
        assert arguments == ["script.py"]
        if isinstance(raised, int):
            raise ChildFailedError("script.py", {1: ProcessFailure(1, 1234, raised, "<N/A>")})
        if raised is not None:
            raise raised

    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    assert launch.main(["script.py"]) == status
    told = capsys.readouterr().err
    assert told.startswith(text) and bool(told) == bool(text)


def test_train_says_what_it_installs_before_it_does_and_leaves_out_what_only_tests_need() -> None:
    lines = recipe("train")
    said, installed = (next(i for i, line in enumerate(lines) if word in line) for word in ('echo "Installing', "pip install"))
    assert said < installed
    assert not [line for line in lines if "fairscale" in line or "pytest" in line or "test]" in line]
    assert [line for line in recipe("test") if "fairscale]" in line], "the tests need it"


def test_train_takes_a_folder_with_spaces() -> None:
    assert recipe("train", "DATA=my texts")[-1].split("examples/train.py", 1)[1].strip() == '"my texts"'
    assert recipe("train")[-1].split("examples/train.py", 1)[1].strip() == ""


def test_an_interpreter_that_is_too_old_is_notified_before_anything_is_installed(tmp_path: Path) -> None:
    (old := tmp_path / "python3.8").write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    ran = make("train", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert ran.returncode != 0
    assert ran.stderr.startswith(
        f"fsdp needs Python 3.11 or later, and {old} is older; name another, as in: make PYTHON=python3.12"
    )
    assert ran.stdout == ""
