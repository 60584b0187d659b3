"""fsdp.compat.fairscale over gloo processes: the weights of the plain model, whatever groups are given."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.compat.fairscale import FullyShardedDataParallel, get_fsdp_instances, get_process_group_cached
from tests.compat.fairscale.test_fairscale import STEPS, Net, plain, train
from tests.support.processes import results_of


def run(rank: int, size: int, folder: Path) -> Any:
    """Train a wrapped model that was pickled, and save it in every form."""
    group = dist.new_group()
    assert get_process_group_cached() is get_process_group_cached()
    alone = FullyShardedDataParallel(torch.nn.Linear(3, 3), get_process_group_cached(ranks=[rank]))
    assert alone.world_size == 1
    # the inner instances and the outer one have different groups over the same ranks
    model = FullyShardedDataParallel(Net(lambda module: FullyShardedDataParallel(module, group)))
    model = pickle.loads(pickle.dumps(model))
    for one in get_fsdp_instances(model):
        one.process_group = one.process_group_reduce_scatter = dist.new_group()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, [rank], optimizer, 1)
    result = {
        "full": dict(model.state_dict()),
        "local": dict(model.local_state_dict()),
        "metadata": model.local_metadata_dict(),
        "optimizer": model.gather_full_optim_state_dict(optimizer),
    }
    try:
        torch.nn.parallel.DistributedDataParallel(model)
    except fsdp.ShardingError as refusal:
        result["ddp"] = str(refusal)
    return result


@pytest.mark.gloo
def test_a_pickled_model_trains_in_processes_and_is_put_together_offline(tmp_path: Path) -> None:
    results = results_of(run, 2, tmp_path)
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
