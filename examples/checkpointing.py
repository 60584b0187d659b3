"""Activation checkpointing: the same gradients from fewer kept activations.

    python examples/checkpointing.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/checkpointing.py     # CPU and gloo, or one GPU per process and NCCL

Units are nested: each block is a unit, and so are the attention and the perceptron inside it. Each block is checkpointed: its
forward runs again in the backward, so every unit inside is gathered and released once more.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import join_world

import fsdp

WIDTH, HEADS, LAYERS = 64, 4, 6
BATCH, LENGTH = 8, 64


class Attention(nn.Module):
    """(batch, length, width) -> the same shape: every position attends to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # three of (batch, heads, length, width / heads)
        query, key, value = self.project_in(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return attended


class Perceptron(nn.Module):
    """(batch, length, width) -> the same: each position on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(x)
        return hidden


class Block(nn.Module):
    """Two inner units, and a scale that is the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.perceptron = Perceptron()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        hidden: Tensor = x + self.scale * self.perceptron(x)
        return hidden


class Network(nn.Module):
    """A stack of blocks, with checkpointing around each of them or without."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        output: Tensor = self.head(x)
        return output


class Step(NamedTuple):
    """The results of one forward and backward on this rank."""

    gradients: list[Tensor]
    """This rank's part of each."""
    activation_bytes: int
    engine_peak_bytes: int


def take_step(rank: int, device: torch.device | str, *, checkpointed: bool) -> Step:
    """One forward and backward of the same model on the same data."""
    torch.manual_seed(0)
    model = fsdp.FullyShardedDataParallel(
        Network(checkpointed).to(device), auto_wrap_policy={Block, Attention, Perceptron}, sync_module_states=True
    )
    torch.manual_seed(1 + rank)  # each rank its own data, and its own dropout
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, device=device)

    kept: list[torch.UntypedStorage] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.mse_loss(model(x), target)
    # autograd kept weights too, but the engine has given back their memory: only activations (and the head) count
    activation_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
    kept.clear()
    loss.backward()
    gradients = [fsdp.to_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return Step(gradients, activation_bytes, fsdp.memory_bytes(model, peak=True))


class Result(NamedTuple):
    """The two steps, and whether every gradient of this rank is the same in both, bit for bit."""

    plain: Step
    checkpointed: Step
    same_gradients: bool


def run(rank: int, device: torch.device | str = "cpu") -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    plain = take_step(rank, device, checkpointed=False)
    checkpointed = take_step(rank, device, checkpointed=True)
    same = all(torch.equal(a, b) for a, b in zip(plain.gradients, checkpointed.gradients, strict=True))
    return Result(plain, checkpointed, same)


def main() -> None:
    world = join_world()
    result = run(world.rank, world.device)
    for name, step in (("without", result.plain), ("with", result.checkpointed)):
        world.say(
            f"{name} checkpointing: {step.activation_bytes / 1e6:.2f} MB kept from forward to backward, "
            f"{step.engine_peak_bytes / 1e6:.2f} MB held by the engine at most"
        )
    world.say(f"on {world.description}, the gradients are {'the same, bit for bit' if result.same_gradients else 'NOT the same'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
