"""The models, data and training loops the tests share, and the plain module they are compared with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp.comm.simulated import Call, current_rank
from fsdp.params.unit import Unit
from fsdp.runtime.registry import unit_ref_of
from fsdp.shards.dtensors import local_of
from fsdp.shards.shard_tensor import ShardTensor, plain
from state_machine import ReshardPolicy

ALONE: Final = fsdp.ReductionPolicy(coalesce_cap_mb=0)
"""Small units share no collective, so that each unit of a small model can be counted and watched alone."""


OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "SHARD_OPTIMIZER": {"sharding_strategy": "SHARD_OPTIMIZER"},
    "plain shards": {"plain_shards": True},
}
"""Ways to wrap: how shards are kept differs."""


class Block(nn.Module):
    """Residual, with a norm: parameters of one and of two dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers of the root's own, and buffers of both kinds."""

    def __init__(self, blocks: int = 3, width: int = 8, features: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Tied(nn.Module):
    """A tiny language model whose head is its embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = Block(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.block = Block(8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens))


class Recurrent(nn.Module):
    """An LSTM keeps a second book of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
        self.leave = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.lstm(x)[0])


class Odd(nn.Module):
    """A scalar, an empty, a frozen and a never used parameter beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.inner = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.tanh(self.inner(x))) * self.gain * self.wide.float()


class Counting(nn.Linear):
    """It has a count beside its parameters."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, count: int) -> None:
        self.count = count


class Large(nn.Module):
    """A layer large enough to be gathered, divided and summed otherwise on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.square, self.leave = nn.Linear(6, 600), nn.Linear(600, 600), nn.Linear(600, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.square(torch.tanh(self.enter(x)))))


X = torch.linspace(-1, 1, 12).view(2, 6)
"""A batch for `Net`."""


def make_net() -> Net:
    """Every rank's weights are the same."""
    torch.manual_seed(3)
    return Net()


@dataclass(frozen=True)
class Case:
    """A model, its data, and how its units are chosen."""

    make: Callable[[], nn.Module]
    policy: Any
    integers: bool = False
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make().to(self.dtype)

    def batch(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        if self.integers:
            return torch.randint(0, 11, (4, 3), generator=generator)
        return torch.randn(4, 3, 6, generator=generator).to(self.dtype)


CASES = {
    "net": Case(Net, {Block}),
    "net in float64": Case(Net, {Block}, dtype=torch.float64),
    "net in layers": Case(Net, {nn.Linear, nn.LayerNorm}),
    "net as one unit": Case(Net, None),
    "tied": Case(Tied, {Block, nn.Embedding, nn.Linear}, integers=True),
    "recurrent": Case(Recurrent, {nn.LSTM}),
    "odd": Case(Odd, {nn.Linear}),
    "large": Case(Large, {nn.Linear}),
    "sparse": Case(Sparse, {Block}, integers=True),
}


def wrap(case: Case, in_place: bool = False, **options: Any) -> nn.Module:
    """The model of a case, sharded through one of the two doors."""
    door = fsdp.fully_shard if in_place else fsdp.FullyShardedDataParallel
    return door(case.model(), auto_wrap_policy=case.policy, **options)


def loss_of(output: Tensor) -> Tensor:
    return (output * output).mean() + output.sum() * 0.01


Gradients = dict[str, Tensor | None]


class Trained(NamedTuple):
    """What a training left: the gradients of every step, and the weights at its end."""

    gradients: list[Gradients]
    weights: dict[str, Tensor]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(batch)).backward()
    optimizer.step()


def gradients_of(model: nn.Module) -> Gradients:
    """Sparse ones as dense ones."""
    return {name: None if p.grad is None else local(p.grad).clone().to_dense() for name, p in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local(p).clone() for name, p in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor as an ordinary tensor, without autograd; the tensor itself if it is an ordinary one."""
    part = local_of(tensor)
    if part is not None:
        return part.detach()
    return plain(tensor) if isinstance(tensor, ShardTensor) else tensor.detach()


Context = Callable[[], AbstractContextManager[Any]]


def train(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    accumulate: Context = nullcontext,
) -> Trained:
    """Train on `batches[step]`, one backward a batch, all but the last one under `accumulate`; losses are averaged."""
    steps = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gradients = []
    for of_step in batches:
        steps.zero_grad()
        for number, batch in enumerate(of_step):
            with accumulate() if number < len(of_step) - 1 else nullcontext():
                (loss_of(model(batch)) / len(of_step)).backward()
        gradients.append(gradients_of(model))
        steps.step()
    return Trained(gradients, weights_of(model))


def reference(case: Case, world_size: int, steps: int = 3, micro: int = 1, **options: Any) -> Trained:
    """Single-process training on the averaged gradients of `world_size` ranks."""
    batches = [[case.batch(rank, step * micro + m) for rank in range(world_size) for m in range(micro)] for step in range(steps)]
    return train(case.model(), batches, **options)


def own_batches(case: Case, rank: int, steps: int = 3, micro: int = 1) -> list[list[Tensor]]:
    """The same data, as one rank sees it."""
    return [[case.batch(rank, step * micro + m) for m in range(micro)] for step in range(steps)]


def join(parts: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
    """One parameter's shards of every rank, by rank, put together: they tile it in rank order. Nobody's is None.

    Where several ranks hold the same shards, they tile it several times, and each time to the same bits.
    """
    held = [local(part).reshape(-1) for part in parts if part is not None]
    if not held:
        return None
    first, *others = torch.cat(held).view(-1, *shape) if shape.numel() else [torch.cat(held).view(shape)]
    assert all(torch.equal(first, other) for other in others), "the replicas differ"
    return first


def join_all(by_rank: Sequence[Mapping[str, Tensor | None]], like: Mapping[str, Tensor]) -> Gradients:
    """The same for each name of `like`, which has the shapes."""
    return {name: join([one[name] for one in by_rank], wanted.shape) for name, wanted in like.items()}


def joined(by_rank: Sequence[Trained], like: nn.Module) -> Trained:
    """The shards of every rank put together to what the plain module has."""
    parameters = dict(like.named_parameters())
    gradients = [join_all(of_step, parameters) for of_step in zip(*(one.gradients for one in by_rank), strict=True)]
    weights = join_all([one.weights for one in by_rank], parameters)
    return Trained(gradients, {name: weight for name, weight in weights.items() if weight is not None})


def assert_grads_as_plain(
    make: Callable[[], nn.Module], train: Callable[[Any], object], size: int = 2, seed: int = 0, **options: Any
) -> None:
    """What a training on the same data leaves in `.grad` of a plain module, and of one that `size` ranks have sharded."""

    def one_rank(rank: int) -> Gradients:
        model = fsdp.fully_shard(make(), **options)
        train(model)
        assert is_at_rest(model)
        return gradients_of(model)

    plain = make()
    train(plain)
    assert_close(join_all(fsdp.simulate(size, one_rank, seed), dict(plain.named_parameters())), gradients_of(plain))


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, in units of the largest value of `other`."""
    if not other.numel():
        return 0.0
    largest = float(other.abs().max())
    return float((one.to(other.dtype) - other).abs().max()) / (largest or 1.0)


def assert_close(one: Gradients, other: Gradients, within: float = 1e-6) -> None:
    """The same names, the same of them without a gradient, and values within a relative distance."""
    assert list(one) == list(other)
    for name, wanted in other.items():
        found = one[name]
        if wanted is None or not wanted.numel():
            assert found is None or not found.numel(), f"{name} has a gradient, where plain torch leaves None"
        else:
            assert found is not None, f"{name} has no gradient"
            assert found.shape == wanted.shape, name
            assert distance(found, wanted) <= within, f"{name} is off by {distance(found, wanted):.3g}"


def assert_trained_alike(found: Trained, wanted: Trained, within: float = 1e-6) -> None:
    assert len(found.gradients) == len(wanted.gradients)
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        assert_close(one, other, within)
    assert_close({**found.weights}, {**wanted.weights}, within)


def promised(value: Any) -> Future[Any]:
    """What a communication hook returns that is done."""
    promise: Future[Any] = Future()
    promise.set_result(value)
    return promise


class Operations(TorchDispatchMode):
    """The names of the operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def world_log(kind: str | None = None) -> list[Call]:
    """What this simulated rank has called so far."""
    rank = current_rank()
    assert rank is not None, "outside fsdp.simulate"
    return [call for call in rank.log if kind in (None, call.kind)]


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """The units of a root, outermost first."""
    return next(iter(_engines(model))).units


def is_at_rest(model: nn.Module) -> bool:
    """No pass runs, every unit shows its shards, holds nothing of a reduction, and no guard is left.

    Units whose strategy says so keep their whole parameters, or the memory of their buckets; no others.
    """
    engines = list(_engines(model))
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False  # a guard was left behind
    if any(engine.tracker.held.get(kind) for engine in engines for kind in ("scratch", "reduced", "lent")):
        return False
    units = [unit for engine in engines for unit in engine.units]
    if any(engine.tracker.held.get("bucket") for engine in engines) and not any(unit.config.keeps_buckets for unit in units):
        return False
    return all(e.root.at_rest and not any(e.is_unsharded(i) for i in range(len(e.units))) for e in engines) and all(
        flat.is_shared or unit.config.reshard_policy is ReshardPolicy.NEVER or flat.unsharded.untyped_storage().size() == 0
        for unit in units
        for flat in unit.flats
    )


def kept_always(model: nn.Module) -> int:
    """Bytes of whole parameters that a strategy keeps between steps."""
    units = [unit for engine in _engines(model) for unit in engine.units if unit.config.reshard_policy is ReshardPolicy.NEVER]
    return sum(flat.unsharded.untyped_storage().size() for unit in units for flat in unit.flats if not flat.is_shared)


def _engines(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        sharded = unit_ref_of(module)
        if sharded is not None and sharded.index == 0:
            yield sharded.engine


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def two_units() -> fsdp.FullyShardedDataParallel:
    return fsdp.FullyShardedDataParallel(two_layers(), auto_wrap_policy={nn.Linear})
