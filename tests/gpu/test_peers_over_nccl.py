"""One rank abandons a step or dies, over NCCL: the one that waits for it on its device is freed and told."""

from pathlib import Path

import pytest
import torch

from tests.equivalence.test_peers import run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes one for each rank"),
]


@pytest.mark.parametrize("name", ["fails", "killed"])
def test_a_rank_that_waits_on_a_device_is_freed_and_notified(name: str, tmp_path: Path) -> None:
    ((first, again), _) = run(2, tmp_path, "--nccl", name, script="device_programs")[0][name]
    assert first[0] == "PeerFailed" and first[2] == 1
    assert "What was in flight on the device of rank 0 has been aborted" in first[1]
    assert again[0] == "WorldError" and "Start the job again from a checkpoint" in again[1]
