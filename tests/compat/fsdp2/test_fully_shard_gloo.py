"""One script with torch's FSDP2 and with fsdp.compat.fully_shard over gloo processes: the same losses and states."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.everything import EVERYTHING
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_a_script_of_fsdp2_gives_the_same_losses(tmp_path: Path) -> None:
    results = results_of("tests.compat.fsdp2.fully_shard_program", 2, tmp_path)
    for result in results:
        launched = result["launched"]
        assert launched["torch"] == {"all_gather": 2 * 8 + 1, "reduce_scatter": 8 + 1}
        # the ranks ask each other once a step which parameters have gradients
        assert launched["ours"] == launched["native"] == launched["torch"] + Counter(all_reduce=1)
        assert result["refusal"].startswith("SGD was made before the module was wrapped with DTensors")
        assert result["ours"].pop("class") == result["torch"].pop("class") == "FSDPNet"
        torch.testing.assert_close(result["ours"]["losses"], result["torch"]["losses"])
        torch.testing.assert_close(result["ours"]["state"], result["torch"]["state"])
        torch.testing.assert_close(result["ours"]["optimizer"]["state"], result["torch"]["optimizer"]["state"])
        torch.testing.assert_close(result["replicated outside"]["ours"], result["replicated outside"]["torch"])
        for mine, theirs in zip(result["precise"]["ours"], result["precise"]["torch"], strict=True):
            assert torch.equal(mine, theirs), "mixed precision"
        for late in ("late=False", "late=True"):
            for mine, theirs in zip(result[late]["ours"], result[late]["torch"], strict=True):
                assert mine == theirs if isinstance(mine, torch.dtype) else torch.equal(mine, theirs), late


@pytest.mark.parametrize("size", [2, 4] if EVERYTHING else [2])
def test_the_schedules_of_pipelining_train_as_with_fsdp2(tmp_path: Path, size: int) -> None:
    results = results_of("tests.compat.fsdp2.pipeline_program", size, tmp_path)
    for result in results:
        assert result["states"]
        for kind in ("gpipe", "1f1b", "interleaved", "zero bubble", "zbv"):
            torch.testing.assert_close(result[kind]["ours"], result[kind]["torch"])
            native = result[kind]["native"]
            torch.testing.assert_close({key: native[key] for key in ("losses", "params")}, result[kind]["torch"])
            # as FSDP2: two units, each gathered and reduced once a step; over one rank nothing is sent
            assert (native["gathers"], native["reductions"]) == (2, 2)
    assert len(results[-1]["gpipe"]["ours"]["losses"]) == 12


def test_a_pipeline_that_is_imported_after_install_trains_as_one_process(tmp_path: Path) -> None:
    for result in results_of("tests.compat.installed_pipeline_program", 2, tmp_path):
        torch.testing.assert_close(result["found"], result["expected"])
