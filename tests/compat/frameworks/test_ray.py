"""Ray Train: two workers, one of which is killed, end with the loss of two that are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytest.importorskip("ray")


def trained(folder: Path, *arguments: str) -> list[str]:
    """What the example printed that is its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray_train.py"), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    begins = sorted(
        {line.partition("begins after ")[2] for line in (ran.stdout + ran.stderr).splitlines() if "begins after" in line}
    )
    return [*begins, ran.stdout.splitlines()[-1]]


@pytest.mark.timeout(700)
def test_a_killed_worker_is_started_again_and_the_loss_is_the_same(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain")
    killed = trained(tmp_path / "killed", "--kill-at", "5")
    assert plain[:-1] == ["step 0"] and killed[:-1] == ["step 0", "step 4"]
    assert plain[-1] == killed[-1] and plain[-1].startswith("loss ")
