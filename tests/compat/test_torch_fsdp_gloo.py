"""fsdp.compat.torch_fsdp over gloo processes: an old script gives the losses of torch's FSDP1, and sharded states load."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.processes import command, environment

pytestmark = pytest.mark.gloo


def test_an_old_script_gives_the_losses_of_torch_and_sharded_states_load(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            command("tests.compat.torch_fsdp_program", rank, 2, tmp_path),
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
        losses, weights = result["ours"]
        torch.testing.assert_close(losses, result["torch"][0])
        assert list(weights) == list(result["torch"][1])
        for name, value in result["torch"][1].items():
            torch.testing.assert_close(weights[name], value, msg=name)
        assert result["SHARDED_STATE_DICT"] == ({"ShardedTensor"}, True)
        assert result["LOCAL_STATE_DICT"] == ({"ShardedTensor"}, True)
        assert result["optimizer"]
