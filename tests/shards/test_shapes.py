"""What a shard shows of its sizes is the parameter's: code that decides by them decides alike on every rank."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp
from tests.support.models import assert_close, local
from tests.support.ranks import on_ranks

SIZES: Final[dict[str, Callable[[Tensor], Any]]] = {
    "shape": lambda t: t.shape,
    "size()": lambda t: t.size(),
    "size(0)": lambda t: t.size(0),
    "size(-1)": lambda t: t.size(-1),
    "stride()": lambda t: t.stride(),
    "stride(0)": lambda t: t.stride(0),
    "ndim": lambda t: t.ndim,
    "dim()": lambda t: t.dim(),
    "ndimension()": lambda t: t.ndimension(),
    "numel()": lambda t: t.numel(),
    "torch.numel": torch.numel,
    "nelement()": lambda t: t.nelement(),
    "len": len,
    "nbytes": lambda t: t.nbytes,
    "fan": lambda t: nn.init._calculate_fan_in_and_fan_out(t) if t.dim() > 1 else None,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 1, bias=False))


def data(rank: int) -> Tensor:
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(rank))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS", "NO_SHARD"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_gradients_and_state_show_the_sizes_of_plain_torch(strategy: str, size: int) -> None:
    plain = net()
    of_plain = torch.optim.AdamW(plain.parameters())
    stepped(plain, of_plain, [data(0)])

    def shown(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        found: list[Any] = []
        for p in model.parameters():
            assert p.grad is not None
            for tensor in (p, p.data, p.detach(), p.grad, p.grad.data, optimizer.state[p].get("exp_avg")):
                # a rank that holds no element of a parameter keeps no state of it
                found.append(None if tensor is None else {name: ask(tensor) for name, ask in SIZES.items()})
        return found

    def fn(rank: int) -> list[Any]:
        model = fsdp.fully_shard(net(), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        stepped(model, optimizer, [data(rank)])
        return shown(model, optimizer)

    wanted = shown(plain, of_plain)
    for found in fsdp.simulate(size, fn):
        assert [one if one is not None else want for one, want in zip(found, wanted, strict=True)] == wanted


def test_the_part_of_this_rank_is_to_local() -> None:
    def fn(rank: int) -> int:
        weight = fsdp.fully_shard(nn.Linear(24, 12)).weight
        assert weight.shape == (12, 24) and fsdp.to_local(weight).shape != (12, 24)
        return fsdp.to_local(weight).numel()

    assert sum(fsdp.simulate(2, fn)) == 12 * 24


@pytest.mark.parametrize("size", [2, 3])
def test_learning_rates_by_fan_in_are_those_of_one_process(size: int) -> None:
    def by_fan_in(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 1.0 / p.shape[1:].numel() if p.ndim > 1 else 0.1} for p in model.parameters()]
        return torch.optim.SGD(groups)

    plain = net()
    stepped(plain, by_fan_in(plain), [data(rank) for rank in range(size)])

    def fn(rank: int) -> dict[str, Tensor]:
        model = fsdp.fully_shard(net())
        stepped(model, by_fan_in(model), [data(rank)])
        return fsdp.full_state_dict(model, rank0_only=False)

    for found in fsdp.simulate(size, fn):
        assert_close(found, dict(plain.state_dict()))


class Stateful(torch.optim.Optimizer):
    """Momentum whose state `make` makes of a parameter, and `use` combines with its gradient."""

    def __init__(self, params: Any, make: Callable[[Tensor], Tensor], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(params, {})
        self.make, self.use = make, use

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if "state" not in self.state[p]:
                self.state[p]["state"] = self.make(p)
            p.sub_(self.use(self.state[p]["state"], p.grad), alpha=0.1)


def momentum(state: Tensor, gradient: Tensor) -> Tensor:
    return state.mul_(0.9).add_(gradient)


def scaled(state: Tensor, gradient: Tensor) -> Tensor:
    return gradient * (state + 1)


RIGHT: Final[dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]]] = {
    "new_zeros of the shape": (lambda p: p.new_zeros(p.shape), momentum),
    "new_zeros of sizes": (lambda p: p.new_zeros(*p.shape), momentum),
    "new_zeros by name": (lambda p: p.new_zeros(size=p.size(), dtype=p.dtype), momentum),
    "new_ones of the shape": (lambda p: p.new_ones(p.shape), momentum),
    "new_full of the shape": (lambda p: p.new_full(p.shape, 0.5), momentum),
    "new_empty of the shape": (lambda p: p.new_empty(p.shape).zero_(), momentum),
    "zeros_like": (torch.zeros_like, momentum),
    "an ordinary tensor that is read": (lambda p: torch.full(p.shape, 0.5), scaled),
    "a range that is read": (lambda p: torch.arange(p.numel()).view(p.shape) / p.numel(), scaled),
    "a row that is read": (lambda p: torch.arange(p.shape[-1]) / p.shape[-1], scaled),
    "a column that is read": (lambda p: torch.arange(p.shape[0]).view(-1, *[1] * (p.ndim - 1)) / p.shape[0], scaled),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_state_made_by_shape_is_right(name: str, size: int) -> None:
    make, use = RIGHT[name]
    plain = net()
    optimizer = Stateful(plain.parameters(), make, use)
    for _ in range(3):
        plain.zero_grad()
        stepped(plain, optimizer, [data(rank) for rank in range(size)])

    def fn(rank: int) -> dict[str, Tensor]:
        model = fsdp.fully_shard(net())
        optimizer = Stateful(model.parameters(), make, use)
        for _ in range(3):
            model.zero_grad()
            stepped(model, optimizer, [data(rank)])
        return fsdp.full_state_dict(model, rank0_only=False)

    for found in fsdp.simulate(size, fn):
        assert_close(found, dict(plain.state_dict()), within=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_an_ordinary_tensor_of_the_shape_that_is_changed_is_refused_on_every_rank(rank: int, size: int) -> None:
    model = fsdp.fully_shard(net())
    before = [local(p).clone() for p in model.parameters()]
    optimizer = Stateful(model.parameters(), lambda p: torch.zeros(p.shape), momentum)
    with pytest.raises(fsdp.ShardingError, match=r"Stateful\.step: .*an ordinary tensor .*torch\.zeros_like\(parameter\)"):
        stepped(model, optimizer, [data(rank)])
    assert all(map(torch.equal, before, map(local, model.parameters())))


def test_a_state_of_rows_is_cut_as_the_rows_are() -> None:
    def fn(rank: int) -> Tensor:
        weight = fsdp.fully_shard(nn.Linear(8, 12, bias=False)).weight
        rows = weight.new_zeros(weight.shape[0], 1)
        assert rows.shape == (12, 1) and fsdp.to_local(rows).shape == (6, 1)
        assert type(weight.new_zeros(4, 8)) is Tensor and type(weight.new_zeros(())) is Tensor
        rows.add_(weight.detach().sum(1, keepdim=True))
        return fsdp.full_tensor(rows)

    torch.manual_seed(0)
    wanted = nn.Linear(8, 12, bias=False).weight.detach().sum(1, keepdim=True)

    def seeded(rank: int) -> Tensor:
        torch.manual_seed(0)
        return fn(rank)

    for found in fsdp.simulate(2, seeded):
        assert torch.allclose(found, wanted, atol=1e-6)


@on_ranks(2)
def test_sizes_that_are_not_there_are_refused_as_by_torch(rank: int) -> None:
    weight = fsdp.fully_shard(nn.Linear(8, 12, bias=False)).weight
    for ask in (weight.size, weight.stride):
        for dim in (2, -3):
            with pytest.raises(IndexError, match="Dimension out of range"):
                ask(dim)


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (4, 3, 3), (6, 2, 2, 2), (4, 5)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "dropout",
    [F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout],
    ids=lambda f: f.__name__,
)
@on_ranks("size")
def test_random_features_of_a_shard_are_refused_on_every_rank(
    rank: int, dropout: Callable[..., Any], size: int, shape: tuple[int, ...]
) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

    weight = fsdp.fully_shard(Holder()).weight
    with (
        torch.no_grad(),
        pytest.raises((fsdp.ShardingError, RuntimeError), match=r"on 'weight', of which|Expected .*D input"),
    ):
        dropout(weight, 0.5, training=True)
