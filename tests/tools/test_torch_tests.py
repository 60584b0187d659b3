"""tools/torch_tests.py: what stands in for a device, and how outcomes are counted. Its runs take a quarter of an hour."""

import json
from pathlib import Path

import pytest

from tests.support.jobs import run_alone
from tests.support.processes import ROOT
from tools import torch_tests

PROGRAM = """
import torch
import tools.torch_tests as program
program._give_names_of_cuda_the_host()
assert torch.device("cuda") == torch.device("cuda:1") == torch.device(0) == torch.device("cpu")
assert isinstance(torch.device("meta"), torch.device) and torch.device("meta").type == "meta"
assert torch.ones(2, device="cuda").to("cuda").cuda().device.type == "cpu"
assert torch.nn.Linear(1, 1).cuda().to(0).weight.device.type == "cpu"
assert torch.ones(1).to(torch.float64).dtype is torch.float64
with torch.amp.autocast("cuda", torch.bfloat16):
    assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype is torch.bfloat16
"""


def test_names_of_cuda_mean_the_host(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(PROGRAM)
    ended = run_alone(script, cwd=ROOT)
    assert ended.status == 0, ended.errors


def test_a_test_that_fails_anywhere_has_failed() -> None:
    lines = [json.dumps(one) for one in (("a", "passed"), ("b", "failed"), ("b", "passed"), ("c", "skipped"), ("c", "failed"))]
    assert torch_tests.outcomes_of(lines) == {"a": "passed", "b": "failed", "c": "failed"}


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch_tests, "NEEDED", ("pytest", "no_such_package"))
    with pytest.raises(SystemExit):
        torch_tests.main([str(tmp_path), "torch"])
    assert "install no_such_package, which torch's tests import." in capsys.readouterr().err


def test_ours_are_counted_among_those_that_pass_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    torch_tests._compare(
        {"a": "passed", "b": "failed", "c": "passed"}, {"a": "passed", "b": "passed", "c": "failed", "not run": "passed"}
    )
    assert capsys.readouterr().out == "1 of the 2 that pass with torch\n    b\n"
