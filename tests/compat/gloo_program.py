"""One rank of two over gloo: trains a wrapped model, saves it in every form, and trains what pickle brings back."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp
from fsdp.compat.fairscale import FullyShardedDataParallel, get_fsdp_instances, get_process_group_cached
from tests.compat.fairscale.test_fairscale import Net, train
from tests.support.processes import be_a_rank


def run(rank: int, size: int, folder: Path) -> Any:
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


if __name__ == "__main__":
    be_a_rank(run)
