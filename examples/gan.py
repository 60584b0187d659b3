"""A GAN with a gradient penalty: two sharded models, two optimizers, and a backward through a backward.

    python examples/gan.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/gan.py     # CPU and gloo, or one GPU per process and NCCL

The generator learns to turn noise into points of a ring of eight Gaussians; the critic learns to distinguish the two. Each
is a root of its own. While one is trained, the other is frozen, and gradients still pass through it.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import join_world

import fsdp

NOISE, WIDTH = 4, 64
CENTRES, RADIUS, SPREAD = 8, 2.0, 0.1
STEPS, CRITIC_STEPS, BATCH = 60, 2, 256


def make_perceptron(inputs: int, outputs: int) -> nn.Module:
    # smooth activations: the penalty differentiates their slope
    layers = [nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers)


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """How far the slope of the critic is from one, at points between the real and the fake: `share` (batch, 1) of the way."""
    between = torch.lerp(real, fake, share).requires_grad_()
    # create_graph: the slope depends on the parameters, and will be differentiated again
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty: Tensor = (slope.norm(dim=1) - 1).square().mean()
    return penalty


class Result(NamedTuple):
    """How good the generator is, the same on every rank."""

    distance_before: float
    distance: float
    centres_hit: int


def train(rank: int, device: torch.device | str = "cpu") -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    torch.manual_seed(0)
    generator = fsdp.fully_shard(make_perceptron(NOISE, 2).to(device), auto_wrap_policy={nn.Linear}, sync_module_states=True)
    critic = fsdp.fully_shard(make_perceptron(2, 1).to(device), auto_wrap_policy={nn.Linear}, sync_module_states=True)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=4e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=8e-3, betas=(0.5, 0.9))
    distance_before, _ = measure(generator, device)
    chance = torch.Generator().manual_seed(1 + rank)  # each rank its own data

    for _ in range(STEPS):
        critic.requires_grad_(True)
        for _ in range(CRITIC_STEPS):
            real = draw_ring(BATCH, chance).to(device)
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, NOISE, generator=chance).to(device))
            share = torch.rand(BATCH, 1, generator=chance).to(device)
            loss = critic(fake).mean() - critic(real).mean() + gradient_penalty(critic, real, fake, share)
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()

        critic.requires_grad_(False)  # gradients go through the critic, and leave none in it
        loss = -critic(generator(torch.randn(BATCH, NOISE, generator=chance).to(device))).mean()
        generator_optimizer.zero_grad()
        loss.backward()
        generator_optimizer.step()
    return Result(distance_before, *measure(generator, device))


def draw_ring(count: int, chance: torch.Generator) -> Tensor:
    """Real points: (count, 2)."""
    return centres()[torch.randint(CENTRES, (count,), generator=chance)] + SPREAD * torch.randn(count, 2, generator=chance)


def centres() -> Tensor:
    angles = torch.arange(CENTRES) * (2 * math.pi / CENTRES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


@torch.no_grad()
def measure(generator: nn.Module, device: torch.device | str, count: int = 2048) -> tuple[float, int]:
    """How far generated points are from real ones (the sliced Wasserstein distance), and how many centres got their share.

    Its share is half of an equal one, or more: a generator that forgets a centre is what the critic is to prevent.
    """
    chance = torch.Generator().manual_seed(0)  # alike on every rank
    fake = generator(torch.randn(count, NOISE, generator=chance).to(device)).cpu()
    angles = torch.arange(16) * (math.pi / 16)
    directions = torch.stack([angles.cos(), angles.sin()])
    sorted_fake, sorted_real = ((points @ directions).sort(dim=0).values for points in (fake, draw_ring(count, chance)))
    drawn = torch.bincount(torch.cdist(fake, centres()).argmin(dim=1), minlength=CENTRES)
    return (sorted_fake - sorted_real).abs().mean().item(), int((drawn >= count / CENTRES / 2).sum())


def main() -> None:
    world = join_world()
    result = train(world.rank, world.device)
    world.say(
        f"on {world.description}: the distance between generated and real points fell from {result.distance_before:.2f} to "
        f"{result.distance:.2f}, and {result.centres_hit} of {CENTRES} centres are hit"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
