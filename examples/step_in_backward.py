"""An optimizer step inside the backward: each parameter is stepped by a hook, as soon as its gradient is there.

    python examples/step_in_backward.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/step_in_backward.py     # CPU and gloo, or one GPU per process and NCCL

`register_post_accumulate_grad_hook` runs on the parameters of `model.parameters()`, this rank's shards, with the reduced gradient
in `.grad`. Hooks run after the last gradient of a backward has been committed: a backward that fails has stepped nothing. A
hook may set its gradient to None, so `.grad` is None when `backward` returns, but all gradients are in memory at one time.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from model import GPT, Block, byte_loss
from torch import Tensor
from world import join_world

import fsdp

CONTEXT, BATCH, STEPS = 32, 4, 5


class Result(NamedTuple):
    """The results of one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    """This rank's shards."""
    gradients_left: int
    """The number of parameters with a gradient after the backward."""


def step_in_backward(model: torch.nn.Module) -> None:
    """Make every backward step an AdamW for each parameter, in a hook on it."""
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-3)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def train(rank: int, device: torch.device | str = "cpu", *, in_backward: bool) -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    torch.manual_seed(0)
    module = GPT(layers=2, width=32, heads=2, context=CONTEXT).to(device)
    model = fsdp.FullyShardedDataParallel(module, auto_wrap_policy={Block})
    optimizer = None
    if in_backward:
        step_in_backward(model)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, left = [], 0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        loss = byte_loss(model, torch.randint(256, (BATCH, CONTEXT + 1), generator=generator).to(device))
        loss.backward()
        losses.append(loss.item())
        left += sum(parameter.grad is not None for parameter in model.parameters())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, {name: fsdp.to_local(p).detach().clone() for name, p in model.named_parameters()}, left)


def same(one: Result, other: Result) -> bool:
    return one.losses == other.losses and all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def main() -> None:
    world = join_world()
    after, inside = (train(world.rank, world.device, in_backward=where) for where in (False, True))
    agreed = torch.tensor(float(same(after, inside)), device=world.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    world.say(
        f"on {world.description}: losses and weights are {'' if agreed else 'NOT '}the same as with a step after the backward, "
        f"bit for bit; {inside.gradients_left} gradients were left for it"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
