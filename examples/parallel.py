"""Train a Llama over bytes on the ranks of a mesh: data, tensor, pipeline, expert and context parallelism in any product.

    torchrun --standalone --nproc-per-node=4 examples/parallel.py --dp 2 --tp 2 --compare
    torchrun --standalone --nproc-per-node=4 examples/parallel.py --dp 2 --pp 2 --compare
    torchrun --standalone --nproc-per-node=8 examples/parallel.py --dp 2 --tp 2 --pp 2

The text is the source of the examples. `--compare` trains the same model in one process as well, on rank 0. The exit status is 1
if the losses differ by more than 1e-4, or did not fall.

`--dp` ranks have batches of their own, and `--cp` ranks share each sequence: together they are the ranks over which parameters
are sharded and gradients averaged. `--ep` ranks of these share the experts, which are then on every layer.

Rule: a global batch is a function of the step alone, so that every product of the same options trains on the same bytes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from world import World, join_world

import fsdp

BYTES, WIDTH, HEADS, HIDDEN, LAYERS, EXPERTS = 256, 32, 4, 64, 4, 4
CONTEXT, BATCH, MICRO_BATCHES = 32, 8, 4
LEARNING_RATE, MAX_NORM, SAME = 3e-3, 1.0, 1e-4


class Attention(nn.Module):
    """Causal attention with rotated queries and keys. With a group, each rank has a part of the sequence, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        first = length * (0 if self.group is None else dist.get_rank(self.group))
        positions = torch.arange(first, first + length, device=x.device)
        # (batch, length, heads * size) -> (batch, heads, length, size); tensor parallelism leaves some heads here
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query, positions), rotated(key, positions)
        if self.group is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = RingAttention.apply(query, key, value, self.group)
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return attended


class RingAttention(torch.autograd.Function):
    """Causal attention over a sequence that is cut over the ranks of a group: (batch, heads, length, size) each.

    Keys and values travel around the ring, so a rank holds those of two ranks at most. In the backward they travel once more, and
    their gradients with them, which are home after a whole round.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
        mixed, log_sum = torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -torch.inf)
        given = query, key, value
        rank = dist.get_rank(group)
        for source in sources(group):
            if source != rank:
                key, value = passed_on((key, value), group)
            if source <= rank:  # the others have later positions
                scores = scores_of(query, key, source == rank)
                total = torch.logaddexp(log_sum, scores.logsumexp(-1, keepdim=True))
                mixed = mixed * (log_sum - total).exp() + (scores - total).exp() @ value
                log_sum = total
        ctx.save_for_backward(*given, mixed, log_sum)
        ctx.group = group
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        query, key, value, mixed, log_sum = ctx.saved_tensors
        group, rank, scale = ctx.group, dist.get_rank(ctx.group), query.shape[-1] ** -0.5
        of_sums = (grad * mixed).sum(-1, keepdim=True)
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))
        for source in sources(group):
            if source <= rank:
                weights = (scores_of(query, key, source == rank) - log_sum).exp()
                grad_scores = weights * (grad @ value.mT - of_sums) * scale
                grad_query = grad_query + grad_scores @ key
                grad_key = grad_key + grad_scores.mT @ query
                grad_value = grad_value + weights.mT @ grad
            key, value, grad_key, grad_value = passed_on((key, value, grad_key, grad_value), group)
        return grad_query, grad_key, grad_value, None


def sources(group: Any) -> list[int]:
    """Whose keys and values a rank has in each turn, if all pass theirs on to the next rank after it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return [(rank - turn) % ranks for turn in range(ranks)]


def scores_of(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores + torch.full_like(scores, -torch.inf).triu(1) if is_causal else scores


def passed_on(tensors: Sequence[Tensor], group: Any) -> Sequence[Tensor]:
    """Give the tensors to the next rank of the ring; return those of the rank before. Communicates."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.cat([one.reshape(-1) for one in tensors])
    received = torch.empty_like(sent)
    from_before, to_next = ([sent.numel() if one == (rank + step) % ranks else 0 for one in range(ranks)] for step in (-1, 1))
    dist.all_to_all_single(received, sent, from_before, to_next, group=group)
    parts = received.split_with_sizes([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        computed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return computed


class Experts(nn.Module):
    """Each expert has two matrices. With a group, each rank has some experts, and tokens travel to the rank of their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.group: Any = None

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """`tokens` (N, D); `chosen` (N,), the expert of each."""
        if self.group is None:
            return self._compute(tokens, chosen, self.up, self.down)
        ranks = dist.get_world_size(self.group)
        per = EXPERTS // ranks
        order = torch.argsort(chosen // per, stable=True)
        sent = torch.bincount(chosen // per, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = received.tolist(), sent.tolist()
        experts = chosen.new_empty(sum(sizes[0]))
        dist.all_to_all_single(experts, chosen[order], *sizes, group=self.group)
        here = all_to_all_single_autograd(tokens[order], *sizes, self.group)
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        computed = self._compute(here, experts % per, up, down)
        return all_to_all_single_autograd(computed, *reversed(sizes), self.group)[torch.argsort(order)]

    def _compute(self, tokens: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out = tokens * 0
        for expert in range(up.shape[0]):
            here = (chosen == expert).nonzero().flatten()
            out = out.index_add(0, here, F.silu(tokens[here] @ up[expert]) @ down[expert])
        return out


class Mixture(nn.Module):
    """A router sends each token to its two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = sum(weights[:, k : k + 1] * self.experts(tokens, chosen[:, k]) for k in range(2))
        assert isinstance(out, Tensor)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm, self.feed_forward = nn.RMSNorm(WIDTH), Mixture() if mixture else FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden: Tensor = x + self.feed_forward(self.norm(x))
        return hidden


def make_layers(mixture: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(BYTES, WIDTH), nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False))
    return [embedding, *(Block(mixture) for _ in range(LAYERS)), head]


def parallelise(stage: nn.Sequential, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Spread the layers of a stage over the dimensions of `mesh`, then shard them over the data ranks."""
    data, of_experts = mesh["edp", "cp", "ep"]._flatten("data"), mesh["edp", "cp"]._flatten("of_experts")
    for block in (layer for layer in stage if isinstance(layer, Block)):
        if args.tp > 1:
            names = [f"attention.{name}" for name in ("query", "key", "value")]
            styles: dict[str, Any] = {name: ColwiseParallel() for name in names} | {"attention.output": RowwiseParallel()}
            if isinstance(block.feed_forward, FeedForward):
                styles |= {"feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel()}
                styles |= {"feed_forward.down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], styles)
        if args.ep > 1:
            experts: Any = block.feed_forward.experts
            experts.group = mesh.get_group("ep")
            for name in ("up", "down"):
                spread = distribute_tensor(getattr(experts, name).data, mesh["ep"], [Shard(0)])
                setattr(experts, name, nn.Parameter(spread))
            fsdp.fully_shard(experts, mesh=of_experts, sharding_strategy=strategy(args))
    fsdp.fully_shard(stage, mesh=data, auto_wrap_policy={Block}, sharding_strategy=strategy(args))
    for block in (layer for layer in stage if isinstance(layer, Block) and args.cp > 1):
        block.attention.group = mesh.get_group("cp")  # after wrapping: ranks that wait here are told of one that fails


def strategy(args: argparse.Namespace) -> str:
    # a pipeline gathers the parameters of a stage once a step, not for each micro-batch
    return "SHARD_GRADIENTS" if args.pp > 1 else "FULL_SHARD"


def corpus() -> Tensor:
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: Tensor, step: int) -> Tensor:
    """The global batch of a step: (BATCH, CONTEXT + 1)."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_alone(args: argparse.Namespace) -> list[float]:
    model, text = nn.Sequential(*make_layers(args.ep > 1)), corpus()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), []
    for step in range(args.steps):
        rows = batch(text, step)
        loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Train on all ranks; return the loss of each step, over all of them."""
    shape = (args.pp, args.dp // args.ep, args.cp, args.ep, args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "edp", "cp", "ep", "tp"))
    embedding, *blocks, head = make_layers(args.ep > 1)
    place, per, text = mesh["pp"].get_local_rank(), LAYERS // args.pp, corpus()
    is_first, is_last = place == 0, place == args.pp - 1
    stage = nn.Sequential(*([embedding] * is_first), *blocks[place * per : (place + 1) * per], *([head] * is_last)).to(device)
    parallelise(stage, mesh, args)
    optimizer, losses = torch.optim.AdamW(stage.parameters(), lr=LEARNING_RATE), []
    schedule = None
    if args.pp > 1:
        pipeline = fsdp.PipelineStage(stage, place, args.pp, device, group=mesh.get_group("pp"))
        schedule = Schedule1F1B(pipeline, min(MICRO_BATCHES, BATCH // args.dp), loss_fn=loss_of)
    row = mesh["edp"].get_local_rank() * args.ep + mesh["ep"].get_local_rank()
    column = mesh["cp"].get_local_rank()
    for step in range(args.steps):
        rows = batch(text, step).to(device).chunk(args.dp)[row]
        inputs, targets = (one.chunk(args.cp, dim=1)[column].contiguous() for one in (rows[:, :-1], rows[:, 1:]))
        if schedule is None:
            loss = loss_of(stage(inputs), targets)
            loss.backward()
        else:
            of_parts: list[Tensor] = []
            given = {"target": targets, "losses": of_parts} if is_last else {}
            schedule.step(*((inputs,) if is_first else ()), **given)
            loss = torch.stack(of_parts).mean() if is_last else torch.zeros((), device=device)
        fsdp.clip_grad_norm_(stage, MAX_NORM, pp_mesh=mesh["pp"] if args.pp > 1 else None)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() * args.pp / dist.get_world_size())  # one stage of `pp` has the loss
    return losses


def parse_arguments(world: World) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("cp", "context")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"ranks of {what} parallelism")
    parser.add_argument("--dp", type=int, help="ranks with batches of their own (default: all that are left)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compare", action="store_true", help="train in one process as well, and compare the losses")
    args = parser.parse_args()
    args.dp = args.dp or world.size // (args.tp * args.pp * args.cp)
    if not fits(args, world.size):
        parser.error(
            f"dp * tp * pp * cp must be {world.size}, the number of processes; dp a multiple of ep and a divisor of {BATCH}; "
            f"ep a divisor of {EXPERTS}, tp of {HEADS}, pp of {LAYERS}"
        )
    return args


def fits(args: argparse.Namespace, processes: int) -> bool:
    """Whether so many processes can train in this product of dimensions."""
    divides = (args.dp, BATCH), (args.ep, args.dp), (args.ep, EXPERTS), (args.tp, HEADS), (args.pp, LAYERS)
    return args.dp * args.tp * args.pp * args.cp == processes and not any(total % part for part, total in divides)


def main() -> int:
    world = join_world()
    args = parse_arguments(world)
    losses = train(args, world.device)
    product = " x ".join(f"{name} {getattr(args, name)}" for name in ("dp", "tp", "pp", "ep", "cp"))
    world.say(f"on {world.description}, {product}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps")
    good = losses[-1] < losses[0]
    if args.compare and world.rank == 0:
        differences = [abs(one - other) / other for one, other in zip(losses, train_alone(args), strict=True)]
        good = good and max(differences) <= SAME
        found = "the same" if max(differences) <= SAME else "OTHER"
        world.say(f"one process has {found} losses: the largest relative difference is {max(differences):.1e}")
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
