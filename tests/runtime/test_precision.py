"""Which dtype everything runs in, and how large the error of it may be."""

import dataclasses
import gc
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

import fsdp
from fsdp.comm.simulated import simulate
from tests.support.models import Block, X, join_all, local, loss_of, make_net
from tests.support.ranks import on_ranks

BF16 = torch.bfloat16


def shard_gradients(size: int, policy: Any, scale: float = 1.0) -> dict[str, Tensor]:
    """The joined gradients of one step, where rank r sees X * (r + 1)."""

    def fn(rank: int) -> dict[str, Tensor | None]:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, mp_policy=policy)
        (loss_of(model(X * (rank + 1))) * scale).backward()
        assert all(p.dtype is torch.float32 for p in model.parameters())
        assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.grad is not None)
        return {name: p.grad for name, p in model.named_parameters()}

    full = join_all(fsdp.simulate(size, fn), dict(make_net().named_parameters()))
    return {name: gradient for name, gradient in full.items() if gradient is not None}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bf16_gradients_reduced_in_fp32_lose_nothing_after_the_backward(size: int) -> None:
    """Each rank's bf16 gradient is exact in fp32; W - 1 sums and one division round by 2^-24 each."""
    model = nn.Linear(6, 3)
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fn(rank: int) -> dict[str, Tensor | None]:
        mine = nn.Linear(6, 3)
        mine.load_state_dict(state)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        sharded = fsdp.fully_shard(mine, mp_policy=policy)
        sharded(batches[rank]).float().square().sum().backward()
        return {name: p.grad for name, p in sharded.named_parameters()}

    joined = join_all(fsdp.simulate(size, fn), dict(model.named_parameters()))
    for name, found in joined.items():
        exact = []
        for batch in batches:
            plain = nn.Linear(6, 3)
            plain.load_state_dict(state)
            plain.to(BF16)(batch.to(BF16)).float().square().sum().backward()
            exact.append(dict(plain.named_parameters())[name].grad.double())  # type: ignore[union-attr]
        assert found is not None
        largest = torch.stack(exact).abs().sum(0)
        assert ((found.double() - sum(exact) / size).abs() <= size * 2**-24 * largest / size + 1e-30).all()


def test_bf16_training_stays_within_the_rounding_of_bf16() -> None:
    """A value passes some 4 roundings in each of 5 layers, there and back: 40 half-ulps of 2^-9, added up."""
    exact = {name: p.grad for name, p in _plain_gradients(2).items()}
    for reduce_dtype in (None, torch.float32):
        found = shard_gradients(2, fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype))
        for name, wanted in exact.items():
            assert wanted is not None
            error = float((found[name] - wanted).norm() / wanted.norm())
            assert 0 < error < 40 * 2**-9, name


def _plain_gradients(size: int) -> dict[str, nn.Parameter]:
    net = make_net()
    for rank in range(size):
        (loss_of(net(X * (rank + 1))) / size).backward()
    return dict(net.named_parameters())


def test_fp32_reduction_beats_bf16_reduction_over_many_ranks() -> None:
    exact = {name: p.grad for name, p in _plain_gradients(8).items()}
    errors = []
    for reduce_dtype in (torch.float32, BF16):
        found = shard_gradients(8, fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        errors.append(max(float((found[n] - g).norm() / g.norm()) for n, g in exact.items() if g is not None))
    assert errors[0] < 1e-6 < errors[1] < 2 * 2**-8


def test_torchs_policy_is_ours() -> None:
    ours = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    theirs = TorchPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    one, other = shard_gradients(2, ours), shard_gradients(2, theirs)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("wanted", "found"), [(None, BF16), (torch.float32, torch.float32), (torch.float64, torch.float64)])
@on_ranks(2)
def test_outputs_have_the_output_dtype(rank: int, wanted: torch.dtype | None, found: torch.dtype) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=wanted)
    output = fsdp.fully_shard(nn.Linear(6, 2), mp_policy=policy)(X)
    assert output.dtype is found
    output.sum().backward()


class Asker(nn.Module):
    """Notes the dtypes its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[torch.dtype] = []

    def forward(self, a: Tensor, pair: tuple[Tensor, list[Tensor]], *, more: dict[str, Tensor], count: int) -> Tensor:
        self.seen = [a.dtype, pair[0].dtype, pair[1][0].dtype, more["x"].dtype, more["mask"].dtype, self.weight.dtype]
        assert count == 3
        return self.weight.sum()


@pytest.mark.parametrize("cast", [True, False])
@on_ranks(2)
def test_floating_inputs_are_cast_wherever_they_are_and_nothing_else(rank: int, cast: bool) -> None:
    caller = Asker()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=cast)
    model = fsdp.fully_shard(caller, mp_policy=policy)
    x, i, b = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    model(x, (i, [x.double()]), more={"x": x, "mask": b}, count=3)
    floats = [BF16, torch.int64, BF16, BF16, torch.bool, BF16]
    assert caller.seen == (floats if cast else [torch.float32, torch.int64, torch.float64, torch.float32, torch.bool, BF16])


@dataclasses.dataclass
class Losses:
    total: Tensor | None = None
    count: int = 0


class Writer(nn.Module):
    """Computes with its weight, and writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, into: Any, cache: Tensor) -> Tensor:
        y = self.linear(x)
        loss = y.float().sum()
        cache[0] = 2
        if isinstance(into, dict):
            into.pop("old", None)
            into[str(len(into))] = loss
        elif isinstance(into, Losses):
            into.total, into.count = loss if into.total is None else into.total + loss, into.count + 1
        else:
            into.append(loss)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Writer(), Writer()])

    def forward(self, x: Tensor, into: Any, cache: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, into, cache)
        return x


CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": list,
    "deque": deque,
    "dict": lambda: {"old": torch.ones(1)},
    "dataclass": Losses,
}


def values_in(into: Any) -> list[Tensor]:
    return [into.total] if isinstance(into, Losses) else [*(into.values() if isinstance(into, dict) else into)]


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize("kind", CONTAINERS)
@on_ranks(2)
def test_what_a_unit_writes_into_its_inputs_is_the_callers(rank: int, kind: str, dtype: torch.dtype) -> None:
    plain = Model()
    model = fsdp.fully_shard(Model(), auto_wrap_policy={Writer}, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype))
    found: list[list[Tensor]] = []
    for one in (plain, model):
        into, cache, kept = CONTAINERS[kind](), torch.tensor([1.0, 1 / 3]), torch.ones(2) / 3
        with torch.no_grad():
            one(torch.ones(1, 2), [], kept)
        one(torch.ones(1, 2), into, cache)
        sum(values_in(into)).backward()
        found.append([*values_in(into), cache])
        assert kept[1] == torch.ones(2)[1] / 3 and cache.tolist() == [2.0, kept[1].item()]
    for wanted, value in zip(*found, strict=True):
        torch.testing.assert_close(value.float(), wanted, rtol=2**-6, atol=2**-6)  # a few roundings to bf16
    assert all(p.grad is not None for p in model.parameters())


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    done: list[int] = dataclasses.field(init=False, default_factory=list)
    later: int = dataclasses.field(init=False)

    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x.float())
        object.__setattr__(self, "twice", self.x * 2)
        object.__setattr__(self, "no_field", self.x * 3)


class Filler(nn.Linear):
    def forward(self, x: Tensor, one: list[Any], other: list[Any], frozen: Frozen, mask: Tensor, cache: Tensor) -> Tensor:
        assert one is other and {value.dtype for value in (x, one[0], frozen.x, frozen.twice, mask, cache)} == {BF16}
        assert frozen.no_field.dtype is BF16  # type: ignore[attr-defined]
        one.append(1)
        frozen.done.append(2)
        mask.mul_(2)
        cache[0] = self.weight.sum()
        return super().forward(x)


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_what_is_given_twice_is_one_copy_and_what_was_not_written_stays(rank: int, context: Callable[[], Any]) -> None:
    model = fsdp.fully_shard(Filler(2, 2), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16))
    with context():
        third = torch.ones(2) / 3
        given, frozen = [third], Frozen(third)
        frozen.done.append(1)
        model(third, given, given, frozen, torch.ones(1).expand(2), cache := torch.zeros(2))
    assert given[0] is third and given[1:] == [1] and frozen.done == [1, 2] and frozen.x is third
    assert third.tolist() == (torch.ones(2) / 3).tolist() and (cache[0] != 0) == (context is torch.no_grad)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@on_ranks(2)
def test_inputs_live_no_longer_than_their_forward(rank: int, dtype: torch.dtype) -> None:
    model = fsdp.fully_shard(nn.Linear(2, 2), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype, output_dtype=BF16))
    gc.disable()  # a cycle of references would be collected sometime
    try:
        x = torch.ones(1, 2)
        watched = weakref.ref(x)
        with torch.no_grad():
            model(x)
        del x
        assert watched() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_an_input_in_which_nothing_is_cast_is_the_callers_object(rank: int) -> None:
    class Keeper(nn.Linear):
        def forward(self, x: Tensor, *things: Any) -> Tensor:
            self.things = things
            return super().forward(x)

    given = ({"ids": torch.ones(2, dtype=torch.int64)}, [torch.ones(2, dtype=BF16)], Losses(), (1, None))
    model = fsdp.fully_shard(Keeper(2, 2), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16))
    model(torch.ones(1, 2), *given)
    assert all(map(is_, model.things, given))


@pytest.mark.parametrize("size", [2, 3])
def test_fp16_gradients_do_not_overflow_in_the_sum(size: int) -> None:
    def fn(rank: int) -> list[float]:
        model = fsdp.fully_shard(nn.Linear(4, 2, bias=False), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.float16))
        (model(torch.ones(1, 4)) * 40_000.0).float().sum().backward()
        return [] if model.weight.grad is None else local(model.weight.grad).reshape(-1).tolist()

    gradients = [value for own in fsdp.simulate(size, fn) for value in own]
    # one rounding of the pre-division on each rank, one of the sum
    assert len(gradients) == 8
    assert all(abs(value - 40_000) <= 40_000 * 2 * 2**-11 for value in gradients)


@on_ranks(3)
def test_an_overflow_on_one_rank_stops_every_rank_and_halves_every_scale(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fsdp.ShardedGradScaler(model, init_scale=1024.0, growth_interval=100)
    stepped, scales = [], []
    for overflow in (False, True, False):
        before = [local(p).clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(loss_of(model(X))).backward()
        if overflow and rank == 1:
            local(next(p.grad for p in model.parameters() if p.grad is not None and local(p).numel()))[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        stepped.append(any(not torch.equal(local(p), old) for p, old in zip(model.parameters(), before, strict=True)))
        scales.append(scaler.get_scale())
    assert (stepped, scales) == ([True, False, True], [1024.0, 512.0, 512.0])


@dataclasses.dataclass
class Result:
    value: Tensor
    name: str


class ReturnsADataclass(nn.Linear):
    def forward(self, x: Result) -> Result:
        return Result(super().forward(x.value), x.name)


def test_precision_reaches_into_dataclasses() -> None:
    def one_rank(rank: int) -> Result:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        return fsdp.fully_shard(ReturnsADataclass(2, 2), mp_policy=policy)(Result(torch.ones(1, 2), "x"))

    assert [(one.value.dtype, one.name) for one in simulate(2, one_rank)] == [(torch.float32, "x")] * 2


@on_ranks(2)
def test_a_gradient_that_is_added_to_those_kept_under_no_sync_is_rounded_once(rank: int) -> None:
    """As FSDP2 does: the sum of what is kept in the reduce dtype and of a gradient in that of the parameters."""
    model = fsdp.fully_shard(nn.Linear(64, 1, bias=False), mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=BF16))
    batches = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    for number, x in enumerate(batches):
        with fsdp.no_sync(model) if number < 2 else nullcontext():
            model(x).sum().backward()
    kept = batches[0].to(BF16)
    for x in batches[1:]:
        kept = (kept.float() + x).to(BF16)
    assert torch.equal(fsdp.full_tensor(model.weight.grad), kept.float())
