"""Stories of the doors of other engines, and of torch's own functions, on the pretend accelerator. Each returns what it read."""

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.compat import fairscale, fully_shard, torch_fsdp
from fsdp.compat.fairscale.groups import all_reduce_max
from tests.device import test_races as races
from tests.support.accelerator.side_streams import beside
from tests.support.models import Block, Net, loss_of

Read = dict[str, Tensor]
"""What a story has read, by name."""


def _net() -> nn.Module:
    torch.manual_seed(3)
    return Net(races.BLOCKS).to(torch.empty(0).device)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def optimizer_state(**options: Any) -> Read:
    """torch's function reads the full state of an optimizer between two steps."""
    model = races.net(**options)
    optimizer = _adam(model)
    found: Read = {}
    for step in range(3):
        _step(model, optimizer, step)
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
        for name, kept in state.items():
            found |= {f"{step} {name} {key}": value for key, value in kept.items()}
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step whose gradients are those of batch `number`."""
    loss_of(model(races.batch(number))).backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp1(**options: Any) -> Read:
    """Instances are gathered ahead by hand and read, and then full gradients are read and changed, which need no other gather."""
    FSDP = torch_fsdp.FullyShardedDataParallel
    model = FSDP(_net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = races.sgd(model)
    found: Read = {}
    for step in range(2):
        loss_of(model(races.batch(step))).backward()
        for instance in FSDP.fsdp_modules(model):
            instance._unshard()
        found[f"{step} gathered"] = torch.cat([parameter.detach().reshape(-1) for parameter in model.blocks[0].parameters()])
        with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                found[f"{step} {name}"] = parameter.grad * 1.0
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found


def fsdp2(**options: Any) -> Read:
    """A unit is gathered by hand, read and freed between two steps; its gradients are changed on a stream of the program."""
    model: Any = _net()
    for block in model.blocks:
        fully_shard.fully_shard(block)
    fully_shard.fully_shard(model)
    device = torch.empty(0).device
    stream = None if device.type == "cpu" else torch.Stream(device)

    def grow(reduced: Tensor) -> None:
        for _ in range(8):
            reduced.mul_(1.25)

    model.blocks[0].set_all_reduce_hook(grow, stream=stream)
    optimizer = races.sgd(model)
    found: Read = {}
    for step in range(2):
        _step(model, optimizer, step)
        model.blocks[0].unshard()
        found[f"gathered {step}"] = torch.cat([parameter.detach().reshape(-1) for parameter in model.blocks[0].parameters()])
        model.blocks[0].reshard()
    return found | fsdp.full_state_dict(model, rank0_only=False)


def fsdp2_on_a_stream(**options: Any) -> Read:
    """Units are gathered by hand, read and freed one after the other, on a stream of the program."""
    model: Any = _net()
    for block in model.blocks:
        fully_shard.fully_shard(block)
    fully_shard.fully_shard(model)
    loss_of(model(races.batch())).backward()
    found: Read = {}

    def read(x: Tensor) -> Tensor:
        for number, block in enumerate(model.blocks):
            block.unshard()
            found[f"{number}"] = torch.cat([parameter.detach().reshape(-1) for parameter in block.parameters()])
            block.reshard()
        return x * 1.0

    beside([], 0, read, races.batch())
    return found


def of_fairscale(**options: Any) -> Read:
    """The largest gradient of all ranks is found, optimizer state is gathered, and a copy is sharded late.

    fairscale's scaler, which asks for the first, is made for CUDA alone.
    """
    rank = current_rank()
    module: Any = _net()
    module.blocks = nn.ModuleList(fairscale.FullyShardedDataParallel(one) for one in module.blocks)
    model = fairscale.FullyShardedDataParallel(module)
    optimizer = _adam(model)
    found: Read = {}
    for step in range(3):
        loss_of(model(races.batch(step))).backward()
        largest = torch.stack([parameter.grad.abs().max() for parameter in model.parameters()]).max() * (1 + rank.rank)
        all_reduce_max(largest, None)
        optimizer.step()
        optimizer.zero_grad()
        found[f"{step} largest"] = largest * 1.0
        gathered = model.gather_full_optim_state_dict(optimizer)
        for number, state in (gathered or {"state": {}})["state"].items():
            found |= {f"{step} {number} {name}": value for name, value in state.items() if isinstance(value, Tensor)}
    late = pickle.loads(pickle.dumps(model))
    for one in (late, *late.blocks):
        one.process_group = model.process_group
    return found | {name: value.clone() for name, value in late.state_dict().items()}


STORIES = {
    "optimizer state read by torch": optimizer_state,
    "the names of FSDP1": fsdp1,
    "the names of FSDP2": fsdp2,
    "the names of FSDP2 on a stream": fsdp2_on_a_stream,
    "the names of fairscale": of_fairscale,
}
"""By name."""
