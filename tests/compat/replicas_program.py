"""One rank of four over gloo: with FSDP1's HYBRID_SHARD, rank 0 alone gives the full states of the model and of the optimizer."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fsdp.compat
from tests.support.processes import be_a_rank

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def made(**ranks: Any) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy

    torch.manual_seed(0)
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True, **ranks}
    model = FSDP(nn.Sequential(FSDP(nn.Linear(8, 12), **options), nn.Linear(12, 4)), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed(**ranks: Any) -> bool:
    """Whether a model that gets its states from rank 0 goes on as the one that was saved."""
    saved, loaded = made(**ranks), made(**ranks)
    step(*saved)
    weights = copy.deepcopy(get_model_state_dict(saved[0], options=FULL))
    state = copy.deepcopy(get_optimizer_state_dict(*saved, options=FULL))
    set_model_state_dict(loaded[0], weights if dist.get_rank() == 0 else {}, options=BROADCAST)
    set_optimizer_state_dict(*loaded, state if dist.get_rank() == 0 else {}, options=BROADCAST)
    step(*saved)
    step(*loaded)
    one, two = (get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) for model, _ in (saved, loaded))
    return len(one) == 4 and all(torch.equal(one[name], two[name]) for name in one)


def run(rank: int, size: int, folder: Path) -> Any:
    fsdp.compat.install("torch_fsdp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    pair = mesh["shards"].get_group(), mesh["replicas"].get_group()
    return {"mesh": resumed(device_mesh=mesh), "groups": resumed(process_group=pair)}


if __name__ == "__main__":
    be_a_rank(run)
