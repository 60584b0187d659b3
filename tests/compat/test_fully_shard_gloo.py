"""One script with torch's FSDP2 and with fsdp.compat.fully_shard over gloo processes: the same losses and states."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_a_script_of_fsdp2_gives_the_same_losses(tmp_path: Path) -> None:
    results = results_of("tests.compat.fully_shard_program", 2, tmp_path)
    for result in results:
        assert result["refusal"].startswith("SGD was made before the module was wrapped with DTensors")
        assert result["ours"].pop("class") == result["torch"].pop("class") == "FSDPNet"
        torch.testing.assert_close(result["ours"]["losses"], result["torch"]["losses"])
        torch.testing.assert_close(result["ours"]["state"], result["torch"]["state"])
        torch.testing.assert_close(result["ours"]["optimizer"]["state"], result["torch"]["optimizer"]["state"])
