"""Retry with smaller parts: if one rank runs out of memory, all ranks repeat the step with the batch cut into parts.

    python examples/retry.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/retry.py     # CPU and gloo

The ranks have batches of different length, so one of them may run out of memory alone. It catches its own error, the others
`fsdp.PeerFailed`; each doubles the number of parts and repeats the step. No cleanup is needed: gradients are as they were before
the part that failed, and `zero_grad` drops those of the parts before it. A limit on the elements of an activation stands for
memory, so that it runs out on a laptop too.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import join_world

import fsdp

WIDTH, STEPS, BATCH = 16, 6, 8
LIMIT = 8 * 24 * WIDTH
"""The most elements that an activation may have if memory is short."""


class Mixer(nn.Module):
    """(batch, length, width) -> the same, if there is memory for it."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > self.limit:
            raise torch.OutOfMemoryError(f"{x.numel()} elements are more than {self.limit:.0f}")
        mixed: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return mixed


class Result(NamedTuple):
    """The results of one rank."""

    parts: list[int]
    """The number of parts of each step that succeeded."""
    weights: list[Tensor]
    """This rank's part of each."""


def train(rank: int, device: torch.device | str = "cpu", limit: float = LIMIT, alike: bool = True) -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too, where ranks that fail must fail alike."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Mixer(limit) for _ in range(3))).to(device)
    model = fsdp.fully_shard(layers, auto_wrap_policy={Mixer})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chance = torch.Generator().manual_seed(1 + rank)
    parts = []
    for step in range(STEPS):
        # long batches come now and then, and on other ranks in other steps
        length = 48 if step % 3 == (0 if alike else rank % 3) else 16
        batch = torch.randn(BATCH, length, WIDTH, generator=chance).to(device)
        parts.append(take_step(model, optimizer, batch))
    return Result(parts, [fsdp.to_local(p).detach().cpu().clone() for p in model.parameters()])


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    """Take one step in as few parts as fit the memory of every rank. Return the number of parts."""
    parts = 1
    while True:
        try:
            optimizer.zero_grad()
            for part in batch.chunk(parts):
                # every part is reduced: what is kept under no_sync is no step that all ranks have come to
                (model(part).square().mean() / parts).backward()
            break
        except (torch.OutOfMemoryError, fsdp.PeerFailed) as failure:
            out_of_memory = isinstance(failure, torch.OutOfMemoryError) or failure.reason.startswith("OutOfMemoryError")
            if parts == len(batch) or not out_of_memory:
                raise  # a part cannot be smaller, or the other rank is gone
        parts *= 2
    optimizer.step()
    return parts


def main() -> None:
    world = join_world()
    short = train(world.rank, world.device, alike=False)
    ample = train(world.rank, world.device, limit=float("inf"), alike=False)
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(short.weights, ample.weights, strict=True))
    world.say(
        f"on {world.description}: the steps were taken in {', '.join(map(str, short.parts))} parts, and the weights are "
        f"{'those of a run with enough memory' if same and max(short.parts) > 1 else 'NOT those of a run with enough memory'}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
