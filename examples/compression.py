"""Gradients in fewer bytes: communication hooks that reduce in bf16, or in int8 and send the rounding error in the next step.

    python examples/compression.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/compression.py     # CPU and gloo, or one GPU per process and NCCL

Take the hooks as they are, for a model whose shards are spread over all ranks (`FULL_SHARD`, `SHARD_GRAD_OP`):

    fsdp.register_comm_hook(model, Compression(), bf16_reduce_scatter)
    fsdp.register_comm_hook(model, Compression(), int8_reduce_scatter)

Under `NO_SHARD` with several ranks, and under `HYBRID_SHARD`, the bucket has another size, and the hooks raise an error. torch's
own hooks (bf16_compress_hook, PowerSGD) are for `NO_SHARD`. Parameters must be real.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPT, Block, byte_loss
from torch import Tensor
from torch.futures import Future
from world import join_world

import fsdp

LEVELS = 127
"""The largest int8 value that is used, on either side of zero."""


def new_group() -> Any:
    """A group of all ranks besides the engine's own, so that reductions and gathers do not wait for each other."""
    return dist.new_group()


@dataclass
class Compression:
    """The state of a hook between steps. Make one for each model, on every rank at the same time."""

    group: Any = field(default_factory=new_group)
    """The ranks that share the shards. Under HYBRID_SHARD a row would not include its replicas."""
    block: int = 256
    """int8: the number of neighbouring elements that share one scale."""
    error_feedback: bool = True
    """int8: add the rounding error of one step to the gradients of the next. Costs four bytes for each element."""
    errors: dict[int, Tensor] = field(default_factory=dict)
    """The rounding error so far, by bucket: (W * C,)."""
    received_bytes: int = 0
    uncompressed_bytes: int = 0
    """The bytes that would have been received in the gradients' own precision."""

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def chunks(self, gradients: Tensor) -> Tensor:
        """One row for each rank: (W * C,) -> (W, C)."""
        if gradients.numel() % self.size:
            raise ValueError(
                f"a bucket of {gradients.numel()} elements has no chunk for each of {self.size} ranks: these hooks are for "
                "models whose shards are spread over all ranks of the group"
            )
        return gradients.view(self.size, -1)

    def exchange(self, messages: Tensor, instead_of: Tensor, average: Callable[[Tensor], Tensor]) -> Future[Tensor]:
        """Send row `r` of `messages` (W, M) to rank `r`; `average` (W, M) -> (C,) of what came, by rank.

        Traffic: this rank receives (W - 1) * M elements.
        """
        received = torch.empty_like(messages)
        self.received_bytes += messages.nbytes // self.size * (self.size - 1)
        self.uncompressed_bytes += instead_of.nbytes // self.size * (self.size - 1)
        work = dist.all_to_all_single(received, messages, group=self.group, async_op=True)

        # runs, and ends, in a thread of the group: one that held the last reference to the group would have to wait for itself
        def finish(done: Future[Any]) -> Tensor:
            done.wait()  # raises what the exchange raised
            return average(received)

        promise: Future[Tensor] = work.get_future().then(finish)
        return promise


def bf16_reduce_scatter(state: Compression, bucket: Any) -> Future[Tensor]:
    """Send bf16, sum in fp32: half the bytes, and one rounding (2^-8) of each rank's gradient.

    Error: at most 2^-8 times the mean of the ranks' absolute values, element by element.
    """
    gradients = bucket.buffer()
    messages = state.chunks(gradients).to(torch.bfloat16)
    return state.exchange(messages, gradients, lambda received: received.float().mean(0))


def int8_reduce_scatter(state: Compression, bucket: Any) -> Future[Tensor]:
    """Send int8 and one fp32 scale a block, sum in fp32: a quarter of the bytes and 1/64 more.

    Error of one reduction: at most the mean over the ranks of their block's largest value, divided by 254. With error feedback
    the sum over any number of steps is off by no more than that, because what one step loses is sent with the next. What a
    step that failed had lost stays, and is as small.
    """
    gradients = bucket.buffer()
    wanted = gradients.float()
    if bucket.index() in state.errors:
        wanted = wanted + state.errors[bucket.index()]
    chunks = state.chunks(wanted)
    messages = quantise(chunks, state.block)
    if state.error_feedback:
        # an overflow is this step's alone: what a GradScaler skips must not come back with every later step
        lost = torch.nan_to_num(chunks - dequantise(messages, state.block, chunks.shape[1]), nan=0, posinf=0, neginf=0)
        state.errors[bucket.index()] = lost.view(-1)
    block, chunk = state.block, chunks.shape[1]
    return state.exchange(messages, gradients, lambda received: dequantise(received, block, chunk).mean(0))


def quantise(chunks: Tensor, block: int) -> Tensor:
    """Blocks of int8, each followed by its fp32 scale: (W, C) -> (W, ceil(C / block) * (block + 4)) bytes.

    The largest value of a block becomes 127, so every element is off by half a level at most: its block's largest / 254.
    """
    blocks = F.pad(chunks, (0, -chunks.shape[1] % block)).view(len(chunks), -1, block)
    scales = blocks.abs().amax(-1, keepdim=True) / LEVELS
    # a block of zeros has the scale 0, and one that overflowed has one that is not finite, which comes out as it went in
    levels = torch.nan_to_num(blocks / scales, nan=0, posinf=0, neginf=0).round().to(torch.int8)
    return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], -1).view(len(chunks), -1)


def dequantise(messages: Tensor, block: int, chunk: int) -> Tensor:
    """Undo `quantise`: (W, `chunk`) in fp32."""
    parts = messages.view(len(messages), -1, block + 4)
    scales = parts[..., block:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    values = parts[..., :block].view(torch.int8) * scales
    return values.view(len(messages), -1)[:, :chunk]


# what it costs and what it gives, on a small model --------------------------------------------------------------

CONTEXT, BATCH, STEPS = 64, 4, 8
WAYS: dict[str, tuple[Any, bool]] = {
    "the engine's own, fp32": (None, False),
    "bf16": (bf16_reduce_scatter, False),
    "int8": (int8_reduce_scatter, False),
    "int8, error feedback": (int8_reduce_scatter, True),
}


class Result(NamedTuple):
    """The results of one kind of reduction, the same on every rank."""

    loss: float
    error: float
    """The error of the first reduction against the engine's own: root mean square, relative to that of the gradients."""
    received: float
    """Bytes a step and rank, relative to fp32. It has no meaning with one process."""


def train(rank: int, device: torch.device, way: str) -> tuple[float, list[Tensor], Compression]:
    """Train. Return the last loss, this rank's part of the first gradients, and the state of the hook."""
    torch.manual_seed(0)
    module = GPT(layers=2, width=64, heads=4, context=CONTEXT).to(device)
    model = fsdp.FullyShardedDataParallel(module, auto_wrap_policy={Block})
    hook, feedback = WAYS[way]
    state = Compression(error_feedback=feedback)
    if hook is not None:
        fsdp.register_comm_hook(model, state, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first: list[Tensor] = []
    for step in range(STEPS):
        loss = byte_loss(model, draw_batch(step * dist.get_world_size() + rank).to(device))  # each rank its own data
        optimizer.zero_grad()
        loss.backward()
        first = first or [fsdp.to_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item(), first, state


def run(rank: int, device: torch.device) -> dict[str, Result]:
    """Run every kind of reduction in turn, from the same weights on the same data."""
    found = {}
    exact: list[Tensor] = []
    for way in WAYS:
        loss, gradients, state = train(rank, device, way)
        exact = exact or gradients
        squares = torch.stack(
            [
                torch.stack([(one - other).square().sum() for one, other in zip(gradients, exact, strict=True)]).sum(),
                torch.stack([one.square().sum() for one in exact]).sum(),
            ]
        )
        dist.all_reduce(squares)
        received = state.received_bytes / state.uncompressed_bytes if state.uncompressed_bytes else 1.0
        found[way] = Result(loss, (squares[0] / squares[1]).sqrt().item(), received)
    return found


def draw_batch(seed: int) -> Tensor:
    """Random excerpts of this file: (batch, context + 1)."""
    with open(__file__, "rb") as source:
        text = torch.tensor(list(source.read()))
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(1 + seed))
    return text[starts + torch.arange(CONTEXT + 1)]


def main() -> None:
    world = join_world()
    found = run(world.rank, world.device)
    world.say(f"on {world.description}, {STEPS} steps:")
    world.say("| reduction | error of the first | bytes received | loss |\n| --- | --- | --- | --- |")
    for way, result in found.items():
        world.say(f"| {way} | {result.error:.1e} | {result.received:.3f} | {result.loss:.3f} |")
    near = max(abs(result.loss - found["the engine's own, fp32"].loss) for result in found.values())
    world.say(f"the losses are {'within' if near < 0.01 else 'NOT within'} 0.01 of each other")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
