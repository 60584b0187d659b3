"""One rank of two over gloo: a script with torch's FSDP2 and with the drop-in module; losses and states of both."""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp.compat import fully_shard as ours

FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """An embedding tied to the head, and blocks with odd numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def script(api: Any, rank: int) -> dict[str, Any]:
    """What a user's script does with FSDP2."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard([model.embed, model.norm, model.head], reshard_after_forward=False)
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(), offload_policy=api.OffloadPolicy())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(4):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + 2 * micro + rank)
            tokens = torch.randint(0, 7, (3, 5), generator=generator)
            model.set_requires_gradient_sync(micro == 1)
            model.set_is_last_backward(micro == 1)
            model.set_reshard_after_backward(micro == 1)
            if micro:
                model.blocks[0].unshard(async_op=True).wait()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert isinstance(norm, DTensor)
        losses.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        again = distribute_tensor(parameter.full_tensor().detach(), parameter.device_mesh, parameter.placements)
        assert torch.equal(again.to_local(), parameter.to_local())
    state = get_model_state_dict(model, options=FULL)
    set_model_state_dict(model, copy.deepcopy(state), options=FULL)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=FULL)
    return {"losses": losses, "state": state, "optimizer": of_optimizer, "class": type(model).__name__}


def refusal_of_an_early_optimizer() -> str:
    """What the step of an optimizer that was made before wrapping says."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    ours.fully_shard(model)
    try:
        optimizer.step()
    except ValueError as refusal:
        return str(refusal)
    return ""


def run(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {"torch": script(torch_fsdp, rank), "ours": script(ours, rank), "refusal": refusal_of_an_early_optimizer()}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
