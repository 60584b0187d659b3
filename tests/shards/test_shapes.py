"""What a shard shows of its sizes is the parameter's: code that decides by them decides alike on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp
from tests.shards.optimizer_table import Row
from tests.shards.test_optimizers import assert_right, outcome
from tests.shards.test_optimizers_of_others import CONVOLUTION, row
from tests.support.models import local
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


def by_fan_in(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 1.0 / p.shape[1:].numel() if p.ndim > 1 else 0.1} for p in model.parameters()])


def with_state(make: Callable[[Tensor], Tensor], use: Callable[[Tensor, Tensor], Tensor]) -> Row:
    """Its state is made of the parameter, and `use` combines it with the gradient."""

    def update(p: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state["state"] = state["state"] if state else make(p)
        p.sub_(use(state["state"], grad), alpha=0.1)

    return row(update)


momentum = partial(with_state, use=lambda state, grad: state.mul_(0.9).add_(grad))
scaled = partial(with_state, use=lambda state, grad: grad * (state + 1))


RIGHT: Final[dict[str, Row]] = {
    "learning rates by fan-in": Row(by_fan_in, CONVOLUTION),
    "new_zeros of the shape": momentum(lambda p: p.new_zeros(p.shape)),
    "new_zeros of sizes": momentum(lambda p: p.new_zeros(*p.shape)),
    "new_zeros by name": momentum(lambda p: p.new_zeros(size=p.size(), dtype=p.dtype)),
    "new_ones of the shape": momentum(lambda p: p.new_ones(p.shape)),
    "new_full of the shape": momentum(lambda p: p.new_full(p.shape, 0.5)),
    "new_empty of the shape": momentum(lambda p: p.new_empty(p.shape).zero_()),
    "zeros_like": momentum(torch.zeros_like),
    "an ordinary tensor that is read": scaled(lambda p: torch.full(p.shape, 0.5)),
    "a range that is read": scaled(lambda p: torch.arange(p.numel()).view(p.shape) / p.numel()),
    "a row that is read": scaled(lambda p: torch.arange(p.shape[-1]) / p.shape[-1]),
    "a column that is read": scaled(lambda p: torch.arange(p.shape[0]).view(-1, *[1] * (p.ndim - 1)) / p.shape[0]),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_made_by_shape_is_right(name: str, size: int) -> None:
    assert_right(RIGHT[name], fsdp.simulate(size, lambda rank: outcome(RIGHT[name], rank)), size)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_an_ordinary_tensor_of_the_shape_that_is_changed_is_refused_on_every_rank(rank: int, size: int) -> None:
    model = fsdp.fully_shard(CONVOLUTION.model())
    before = [local(p).clone() for p in model.parameters()]
    optimizer = momentum(lambda p: torch.zeros(p.shape)).make(model)
    with pytest.raises(fsdp.ShardingError, match=r"Updating\.step: .*an ordinary tensor .*torch\.zeros_like\(parameter\)"):
        stepped(model, optimizer, [CONVOLUTION.batch(rank, 0)])
    assert all(map(torch.equal, before, map(local, model.parameters())))


def test_a_state_of_rows_is_cut_as_the_rows_are() -> None:
    def fn(rank: int) -> Tensor:
        torch.manual_seed(0)
        weight = fsdp.fully_shard(nn.Linear(8, 12, bias=False)).weight
        rows = weight.new_zeros(weight.shape[0], 1)
        assert rows.shape == (12, 1) and fsdp.to_local(rows).shape == (6, 1)
        assert type(weight.new_zeros(4, 8)) is Tensor and type(weight.new_zeros(())) is Tensor
        rows.add_(weight.detach().sum(1, keepdim=True))
        return fsdp.full_tensor(rows)

    torch.manual_seed(0)
    wanted = nn.Linear(8, 12, bias=False).weight.detach().sum(1, keepdim=True)

    for found in fsdp.simulate(2, fn):
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
