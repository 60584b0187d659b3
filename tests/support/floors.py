"""How many bytes a rank must hold, derived from the layout.

With K equal blocks, prefetch d, and a backward that goes through them from the last to the first:
while block i computes, it and d ahead of it are whole, the bucket of the one before is in flight,
and one reduced shard is there for each that is done.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdp.params.layout import make_layout
from tests.support.models import Net, units_of

BLOCKS = 5


class Sizes(NamedTuple):
    """Bytes, in fp32."""

    shard: int
    unsharded: int


def sizes(parameters: list[Tensor], world_size: int) -> Sizes:
    layout = make_layout(tuple(tuple(p.shape) for p in parameters), 4, world_size)
    return Sizes(4 * layout.shard_numel, 4 * layout.numel)


def make(width: int) -> Net:
    torch.manual_seed(0)
    return Net(BLOCKS, width)


def root_and_block(world_size: int, width: int) -> tuple[Sizes, Sizes]:
    net = make(width)
    return sizes([*net.enter.parameters(), *net.leave.parameters()], world_size), sizes([*net.blocks[0].parameters()], world_size)


def expected_peak(world_size: int, width: int, prefetch: int, buffers: int = 1) -> int:
    """The most that is held at once; `buffers` a reduction: 1, or 2 where what peers send needs a place."""
    root, block = root_and_block(world_size, width)
    if world_size == 1:
        buffers = 0  # what is reduced is the shard itself
    moments = []
    for i in range(BLOCKS):
        done = BLOCKS - 1 - i
        computing = block.unsharded * min(prefetch + 1, i + 1) + block.unsharded * buffers * bool(done) + block.shard * done
        reducing = block.unsharded * min(prefetch, i) + block.unsharded * buffers + block.shard * (done + 1)
        moments += [computing, reducing]
    return root.shard + BLOCKS * block.shard + root.unsharded + max(moments)


def floor(world_size: int, width: int, prefetch: int) -> int:
    """Shards, gradient shards, prefetch + 1 whole units, the root's own, and two units of gradients."""
    root, block = root_and_block(world_size, width)
    return 2 * (root.shard + BLOCKS * block.shard) + (prefetch + 1) * block.unsharded + root.unsharded + 2 * block.unsharded


def all_sizes(world_size: int, width: int) -> list[Sizes]:
    """Of every unit, the root's own first."""
    root, block = root_and_block(world_size, width)
    return [root, *[block] * BLOCKS]


def shards_of(model: nn.Module) -> int:
    return sum(flat.shard.nbytes for unit in units_of(model) for flat in unit.flats)
