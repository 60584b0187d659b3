"""Communication hooks: what they are shown, what they must come to, and what happens when they do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.device.storage import MemoryTracker, ResizableStorage
from fsdp.reduction.comm_hook import GradBucket
from tests.support.models import Block, assert_close, gradients_of, is_at_rest, join_all, loss_of, make_net, promised
from tests.support.ranks import on_ranks

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "FULL_SHARD": (3, {}),
    "NO_SHARD": (2, {"sharding_strategy": "NO_SHARD"}),
    "HYBRID_SHARD": (4, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
}
EVERY = pytest.mark.parametrize(("size", "options"), STRATEGIES.values(), ids=STRATEGIES)


def average(shards: int, bucket: GradBucket) -> Future[Tensor]:
    """The chunk of this rank of the average over all ranks."""
    rank = current_rank()
    total = bucket.buffer().clone()
    rank.comm("hook").all_reduce(total, "sum", str(bucket.index())).wait()
    return promised((total / rank.size).view(shards, -1)[rank.rank % shards])


def data(rank: int, number: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def shards_of(size: int, options: dict[str, Any]) -> int:
    return 1 if options.get("sharding_strategy") == "NO_SHARD" else options.get("mesh", (1, size))[1]


@EVERY
def test_a_hook_that_averages_gives_what_the_engine_gives(size: int, options: dict[str, Any]) -> None:
    def one_rank(rank: int) -> list[dict[str, Tensor | None]]:
        found = []
        for hooked in (False, True):
            model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **options)
            if hooked:
                fsdp.register_comm_hook(model, shards_of(size, options), average)
            with fsdp.no_sync(model):
                loss_of(model(data(rank, 1))).backward()
            loss_of(model(data(rank))).backward()
            assert is_at_rest(model)
            found.append(gradients_of(model))
        return found

    parameters = dict(make_net().named_parameters())
    plain, hooked = (join_all(way, parameters) for way in zip(*fsdp.simulate(size, one_rank), strict=True))
    assert_close(hooked, plain)


@EVERY
@on_ranks("size")
def test_a_hook_is_shown_the_gradients_of_its_rank(rank: int, size: int, options: dict[str, Any]) -> None:
    shown: dict[int, dict[str, Tensor]] = {}
    last = []

    def hook(shards: int, bucket: GradBucket) -> Future[Tensor]:
        named = {id(p): gradient.clone() for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        assert all(torch.isfinite(p.sum()) for p in bucket.parameters()), "parameters a hook may read"
        shown[bucket.index()] = {name: named[key] for key, name in names.items() if key in named}
        last.append(bucket.is_last())
        return average(shards, bucket)

    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **options)
    names = {id(p): name for name, p in model.named_parameters()}
    fsdp.register_comm_hook(model, shards_of(size, options), hook)
    for _ in range(2):
        last.clear()
        loss_of(model(data(rank))).backward()
    assert last == [False, False, False, True]
    assert sorted(shown) == [0, 1, 2, 3]
    plain = make_net()
    loss_of(plain(data(rank))).backward()
    together = {name: gradient for bucket in shown.values() for name, gradient in bucket.items()}
    assert_close({name: together[name] for name, _ in plain.named_parameters()}, gradients_of(plain))


@EVERY
def test_padding_is_zero(size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that takes a norm or a scale of many elements looks at padding too, and new memory holds anything."""
    allocate = ResizableStorage.allocate

    def allocate_dirty(self: ResizableStorage, tracker: MemoryTracker) -> None:
        fresh = not self._held
        allocate(self, tracker)
        if fresh:
            torch.empty(0, dtype=torch.uint8).set_(self._storage).fill_(255)  # NaN in any floating-point type

    def one_rank(rank: int) -> int:
        padded = []

        def hook(shards: int, bucket: GradBucket) -> Future[Tensor]:
            padded.append(bucket.buffer().numel() - sum(gradient.numel() for gradient in bucket.gradients()))
            squares = sum(gradient.square().sum() for gradient in bucket.gradients())
            torch.testing.assert_close(bucket.buffer().square().sum(), squares)
            return average(shards, bucket)

        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **options)
        fsdp.register_comm_hook(model, shards_of(size, options), hook)
        loss_of(model(data(rank))).backward()
        return max(padded)

    monkeypatch.setattr(ResizableStorage, "allocate", allocate_dirty)
    assert min(fsdp.simulate(size, one_rank)) > 0, "no bucket has padding"


def in_place(shards: int, bucket: GradBucket) -> Future[Tensor]:
    """As torch's hooks do: what it comes to is the bucket itself."""
    rank = current_rank()
    rank.comm("hook").all_reduce(bucket.buffer(), "sum", str(bucket.index())).wait()
    return promised(bucket.buffer().div_(rank.size).view(shards, -1)[rank.rank % shards])


def is_block(name: str, module: nn.Module) -> bool:
    return name.startswith("blocks.") and name.count(".") == 1


class FailsLate(nn.Module):
    """Blocks, of which the first fails in the backward when the buckets of the others are reduced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.fails:
            x.register_hook(self._fail)
        return self.blocks[1:](x)

    def _fail(self, gradient: Tensor) -> None:
        raise Broken("late")


@EVERY
@pytest.mark.parametrize("hook", [None, average, in_place], ids=["no hook", "average", "in place"])
@pytest.mark.parametrize("alone", [False, True], ids=["on every rank", "on one rank"])
@on_ranks("size")
def test_a_backward_that_fails_late_leaves_no_trace(
    rank: int, hook: Any, alone: bool, size: int, options: dict[str, Any]
) -> None:
    model = fsdp.fully_shard(FailsLate(), auto_wrap_policy=is_block, **options)
    floor = fsdp.memory_bytes(model)
    if hook is not None:
        fsdp.register_comm_hook(model, shards_of(size, options), hook)
    model.fails = rank == 0 or not alone
    with pytest.raises((Broken, fsdp.WorldError)):
        model(torch.ones(2, 4)).sum().backward()
    assert is_at_rest(model)
    assert fsdp.memory_bytes(model) == floor
    assert all(p.grad is None for p in model.parameters())


@EVERY
@pytest.mark.parametrize("root", ["no parameters", "frozen", "trained"])
@on_ranks("size")
def test_one_bucket_of_a_backward_is_the_last(rank: int, root: str, size: int, options: dict[str, Any]) -> None:
    """PowerSGD counts its iterations by it."""
    net = FailsLate()
    net.fails = False
    if root != "no parameters":
        net.own = nn.Parameter(torch.ones(4), requires_grad=root == "trained")
    seen = []

    def hook(shards: int, bucket: GradBucket) -> Future[Tensor]:
        seen.append(bucket.is_last())
        return average(shards, bucket)

    model = fsdp.fully_shard(net, auto_wrap_policy=is_block, **options)
    fsdp.register_comm_hook(model, shards_of(size, options), hook)
    for _ in range(2):
        seen.clear()
        output = model(torch.ones(2, 4))
        output.sum().backward()
        # the root's own parameter is not used, and so is not reduced
        assert seen == [False] * (len(seen) - 1) + [root != "trained"]


@on_ranks(2)
def test_a_hook_inside_is_not_lost(rank: int) -> None:
    inner = fsdp.fully_shard(nn.Linear(4, 4))
    fsdp.register_comm_hook(inner, 2, average)
    with pytest.raises(fsdp.ShardingError, match="unit '0' has a communication hook, which would be lost"):
        fsdp.fully_shard(nn.Sequential(inner, nn.Linear(4, 4)))


class Broken(Exception):
    """What a hook raises."""


def raises(state: object, bucket: GradBucket) -> Any:
    raise Broken("at once")


def fails_later(state: object, bucket: GradBucket) -> Any:
    promise: Future[Any] = Future()
    promise.set_exception(Broken("later"))
    return promise


BAD: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "raises": (raises, Broken, "at once"),
    "fails later": (fails_later, Broken, "later"),
    "no future": (
        lambda state, bucket: bucket.buffer(),
        fsdp.ShardingError,
        r"must return a torch.futures.Future; for the bucket of unit '.*' it returned Tensor",
    ),
    "no tensor": (lambda state, bucket: promised("sum"), fsdp.ShardingError, "it came to str"),
    "another size": (
        lambda state, bucket: promised(bucket.buffer()[:3]),
        fsdp.ShardingError,
        r"must come to \d+ x torch.float32 for the bucket of unit '.*'; it came to 3 x torch.float32",
    ),
    "another kind": (
        lambda state, bucket: promised(bucket.buffer().to(torch.complex64)),
        fsdp.ShardingError,
        r"it came to \d+ x torch.complex64",
    ),
}


@EVERY
@pytest.mark.parametrize("name", BAD)
@on_ranks("size")
def test_a_bad_hook_leaves_no_trace(rank: int, name: str, size: int, options: dict[str, Any]) -> None:
    hook, kind, text = BAD[name]
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **options)
    floor = fsdp.memory_bytes(model)
    good = [False]

    def sometimes(shards: int, bucket: GradBucket) -> Any:
        return average(shards, bucket) if good[0] else hook(shards, bucket)

    fsdp.register_comm_hook(model, shards_of(size, options), sometimes)
    with pytest.raises(kind, match=text):
        loss_of(model(data(rank))).backward()
    assert is_at_rest(model)
    assert fsdp.memory_bytes(model) == floor
    assert all(p.grad is None for p in model.parameters())
    good[0] = True
    loss_of(model(data(rank))).backward()
    assert all(p.grad is not None or not p.numel() for p in model.parameters())


@on_ranks(2)
def test_what_cannot_be_registered_is_refused(rank: int) -> None:
    model = fsdp.fully_shard(make_net())
    with pytest.raises(fsdp.ShardingError, match="takes a function of \\(state, bucket\\), not None"):
        fsdp.register_comm_hook(model, None, None)  # type: ignore[arg-type]
    fsdp.register_comm_hook(model, 2, average)
    with pytest.raises(fsdp.ShardingError, match="has a communication hook already"):
        fsdp.register_comm_hook(model, 2, average)
