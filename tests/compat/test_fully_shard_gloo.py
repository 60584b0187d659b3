"""One script with torch's FSDP2 and with fsdp.compat.fully_shard over gloo processes: the same losses and states."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.processes import command, environment

pytestmark = pytest.mark.gloo


def test_a_script_of_fsdp2_gives_the_same_losses(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            command("tests.compat.fully_shard_program", rank, 2, tmp_path),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        printed = [one.communicate(timeout=120)[0].decode() for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(printed)
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert result["refusal"].startswith("SGD was made before the module was wrapped with DTensors")
        assert result["ours"].pop("class") == result["torch"].pop("class") == "FSDPNet"
        torch.testing.assert_close(result["ours"]["losses"], result["torch"]["losses"])
        torch.testing.assert_close(result["ours"]["state"], result["torch"]["state"])
        torch.testing.assert_close(result["ours"]["optimizer"]["state"], result["torch"]["optimizer"]["state"])
