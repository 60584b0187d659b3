"""What is seen of a process from outside: how much memory it takes, and what it leaves when it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from alone import TENSOR, TENSORS
from torch import nn

import fsdp

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script printed, and its folder."""
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, str(HERE / "alone.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "was not saved" not in done.stderr, done.stderr
    return done.stdout, folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")
def test_a_conversion_holds_one_file_or_one_tensor(ended: tuple[str, Path]) -> None:
    peaks = json.loads(ended[0].splitlines()[-1])
    assert set(peaks) == {"dcp to torch", "dcp to safetensors", "safetensors to dcp"}
    for what, peak in peaks.items():
        assert peak < 6 * TENSOR < TENSORS * TENSOR / 3, f"{what} held {peak / 1e6:.0f} MB"


def test_a_process_that_ends_finishes_its_save(ended: tuple[str, Path]) -> None:
    found = ended[1] / "a"
    assert fsdp.latest(ended[1], verify=True) == found

    def fn(rank: int) -> None:
        assert fsdp.load(found, fsdp.fully_shard(nn.Linear(4, 4))) == {"step": 1}

    fsdp.simulate(1, fn)
