"""fsdp.compat.fairscale over gloo processes: the weights of the plain model, whatever groups are given."""

from pathlib import Path

import pytest
import torch

from fsdp.compat.fairscale import FullyShardedDataParallel
from tests.compat.fairscale.test_fairscale import STEPS, plain
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_a_pickled_model_trains_in_processes_and_is_put_together_offline(tmp_path: Path) -> None:
    results = results_of("tests.compat.gloo_program", 2, tmp_path)
    for one in results:
        assert one["ddp"].startswith("Net is sharded by fsdp, which averages its gradients over the ranks already")
    together = FullyShardedDataParallel.consolidate_shard_weights(
        [one["local"] for one in results], [one["metadata"] for one in results]
    )
    for name, value in plain(2)[0].state_dict().items():
        torch.testing.assert_close(results[0]["full"][name], value)
        assert torch.equal(results[0]["full"][name], results[1]["full"][name])
        assert torch.equal(results[0]["full"][name], together[name])
    assert results[1]["optimizer"] is None
    assert {state["step"] for state in results[0]["optimizer"]["state"].values()} == {STEPS}
