"""What is seen of a process from outside: how much memory it takes, and what it leaves when it ends."""

import json
from pathlib import Path

import pytest
from torch import nn

import fsdp
from tests.support.own_process import TENSOR, TENSORS
from tests.support.processes import run_module
from tests.support.ranks import on_ranks


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script printed, and its folder."""
    pytest.importorskip("safetensors")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the peak")
    folder = tmp_path_factory.mktemp("alone")
    # what is given back goes back to the system, so that the peaks are those of what is held
    done = run_module("tests.support.own_process", folder, MALLOC_MMAP_THRESHOLD_="100000")
    assert done.returncode == 0, done.stderr
    assert "was not saved" not in done.stderr, done.stderr
    return done.stdout, folder


def test_a_conversion_holds_one_file_or_one_tensor(ended: tuple[str, Path]) -> None:
    peaks = json.loads(ended[0].splitlines()[-1])
    for what in ("dcp to torch", "dcp to safetensors", "safetensors to dcp"):
        peak = peaks[what]
        assert peak < 6 * TENSOR < TENSORS * TENSOR / 3, f"{what} held {peak / 1e6:.0f} MB"


def test_a_full_export_holds_a_parameter_and_a_range_besides(ended: tuple[str, Path]) -> None:
    peak = json.loads(ended[0].splitlines()[-1])["export"]
    assert peak < TENSOR + (64 << 20), f"it held {peak / 1e6:.0f} MB"


@on_ranks(1)
def test_a_process_that_ends_finishes_its_save(rank: int, ended: tuple[str, Path]) -> None:
    found = ended[1] / "a"
    assert fsdp.latest(ended[1], verify=True) == found
    assert fsdp.load(found, fsdp.fully_shard(nn.Linear(4, 4))) == {"step": 1}
