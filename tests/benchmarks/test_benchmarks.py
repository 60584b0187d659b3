"""The benchmarks run, and write down what they promise. Times are never asserted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ("--blocks", "2", "--width", "32", "--repeats", "1", "--steps", "2", "--date", "2000-01-01")


def run(script: str, out: Path, *options: str) -> dict[str, Any]:
    """The JSON of one run. The script ends its own processes first, so that none is left behind by the outer time-out."""
    command = [sys.executable, str(BENCHMARKS / script), *TINY, *options, "--timeout", "120", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["machine"]["date"] == "2000-01-01"
    assert str(Path.home()) not in out.read_text()
    return report


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_a_step_is_measured_for_every_contender_and_all_compute_the_same(tmp_path: Path) -> None:
    report = run("step.py", tmp_path / "step.json", "--sequence", "8", "--heads", "2")

    assert set(report["contenders"]) == {"bare", "ddp", "fsdp1", "fsdp1_orig", "fsdp2", "ours", "ours_no_shard"}
    assert report["options"].keys() == report["contenders"].keys()
    for one in report["contenders"].values():
        assert len(one["seconds_per_step"]) == len(one["processor_seconds_per_step"]) == 1
        assert len(one["losses"]) == 2 + 2, "two to warm up, two measured"
    assert report["largest_loss_difference"] <= 1e-4
    assert [bar["limit"] for bar in report["bars"]] == [0.80, 0.70, 1.00]


@pytest.mark.timeout(180)
def test_host_time_and_operations_are_measured_for_every_contender(tmp_path: Path) -> None:
    report = run("host.py", tmp_path / "host.json", "--tensors", "3")

    (case,) = report["cases"]
    assert set(case["contenders"]) == {"bare", "fsdp1", "fsdp1_orig", "fsdp2", "ours"}
    for one in case["contenders"].values():
        assert {len(times) for times in one["seconds_of_all_units"].values()} == {2}
        assert {"forward", "backward", "step"} <= one["seconds_of_all_units"].keys()
    bare = case["contenders"]["bare"]["operations"]["dispatched"]["forward"]
    assert bare["per_unit"] == 2 * 2, "two F.linear, each a transpose and a product"
    assert [bar["limit"] for bar in report["bars"]] == [0.30, 0.45, 0.35]


def test_a_contender_asked_for_by_name_that_does_not_exist_is_refused_in_words(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "host.py"), "--contenders", "apex", "--out", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode != 0
    assert "unknown contender 'apex': choose from bare, fsdp1, fsdp1_orig, fsdp2, ours" in done.stderr
    assert not (tmp_path / "none.json").exists()
