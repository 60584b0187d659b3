"""The forward of the outermost instance, after parameters and optimizers were put into the model."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fsdp
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from tests.support.ranks import on_ranks


def wrapped() -> Any:
    torch.manual_seed(0)
    inner = FSDP(nn.Linear(4, 4), use_orig_params=True)
    return FSDP(nn.Sequential(nn.Linear(4, 4), inner), use_orig_params=True)


def forward(model: Any) -> object:
    return model(torch.ones(2, 4))


def summon(model: Any) -> None:
    with FSDP.summon_full_params(model):
        assert bool((model.module[0].weight == 2).all()) and bool((model.module[1].weight == 3).all())


def save(model: Any) -> None:
    state = model.state_dict()
    assert bool((state["0.weight"] == 2).all()) and bool((state["1.weight"] == 3).all())


@pytest.mark.parametrize("use", [forward, summon, save])
@on_ranks(2)
def test_a_parameter_that_replaces_one_gives_it_its_values(rank: int, use: Callable[[Any], object]) -> None:
    model = wrapped()
    before = [*model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for weight in (model.module[0].weight, model.module[1].module.weight):
        weight.grad = torch.full_like(weight, 1000.0)
    model.module[0].weight = nn.Parameter(torch.full_like(model.module[0].weight, 2.0))
    model.module[1].module.weight = nn.Parameter(torch.full_like(model.module[1].module.weight, 3.0))
    use(model)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    loss: Tensor = model(torch.ones(2, 4)).sum()
    loss.backward()
    # a gradient from before was that of the parameter which was replaced
    assert all(bool((p.grad < 100).all()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    full = model.state_dict()
    assert not bool((full["0.weight"] == 2).any()) and not bool((full["1.weight"] == 3).any())
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    alone = nn.Sequential(nn.Linear(4, 4), inner)
    with torch.no_grad():
        alone[0].weight.fill_(2.0)
        alone[1].weight.fill_(3.0)
    torch.testing.assert_close(loss.detach(), alone(torch.ones(2, 4)).sum().detach())


@on_ranks(2)
def test_a_full_parameter_that_is_put_in_inside_summon_full_params_gives_its_values(rank: int) -> None:
    """FSDP1 drops them in silence. A rank that holds no element of the bias was told of another shape, alone."""
    model = wrapped()
    before = model.module[0].bias
    with FSDP.summon_full_params(model):
        model.module[0].bias = nn.Parameter(torch.full((4,), 2.0))
    assert model.module[0].bias is before and bool((model.state_dict()["0.bias"] == 2).all())
    with FSDP.summon_full_params(model, writeback=False):
        model.module[0].bias = nn.Parameter(torch.full((4,), 3.0))
    assert model.module[0].bias is before and bool((model.state_dict()["0.bias"] == 2).all())
    with (
        pytest.raises(RuntimeError, match=r"'0.bias' of unit .* is \(4,\), .* replaced by \(5,\)"),
        FSDP.summon_full_params(model),
    ):
        model.module[0].bias = nn.Parameter(torch.ones(5))


@on_ranks(2)
def test_an_optimizer_that_has_a_parameter_whose_values_were_taken_over_is_refused(rank: int) -> None:
    """It would train the parameter that is not the model's any more."""
    model = wrapped()
    model.module[0].weight = nn.Parameter(torch.full_like(model.module[0].weight, 2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward(model)
    with pytest.raises(fsdp.ShardingError, match=r"SGD has a parameter that replaced '0.weight' of unit 'Sequential'"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("use", [forward, summon, save])
@on_ranks(2)
def test_one_that_does_not_fit_is_refused(rank: int, use: Callable[[Any], object]) -> None:
    model = wrapped()
    model.module[0].weight = nn.Parameter(torch.zeros(5, 5))
    text = r"Cannot writeback when the parameter shape changes: '0.weight' of unit 'Sequential' is \(\d, 4\)"
    with pytest.raises(RuntimeError, match=text):
        use(model)


@on_ranks(2)
def test_a_module_that_is_added_stays_unsharded_with_a_warning(rank: int) -> None:
    model = wrapped()
    model.module.append(nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="parameter '2.weight' was added after wrapping: it is not sharded, and its gradients"):
        out = model(torch.ones(2, 4) + rank)
    out.sum().backward()
    added = model.module[2]
    assert out.shape == (2, 2) and added.weight.shape == (2, 4) and added.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4)).sum().backward()
        state = model.state_dict()
    assert torch.equal(state["2.weight"], added.weight) and state["0.weight"].shape == (4, 4)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not bool(added.weight.any()) and not bool(model.state_dict()["0.weight"].any())


@pytest.mark.parametrize("original", [False, True])
@on_ranks(2)
def test_an_optimizer_inside_the_backward_is_refused(rank: int, original: bool) -> None:
    model = FSDP(nn.Sequential(nn.Linear(4, 4)), use_orig_params=original)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    text = (
        "parameter '0.weight' has an optimizer that steps inside the backward. In FSDP1 that is only supported with "
        "use_orig_params=True"
    )
    with pytest.raises(RuntimeError, match=text):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_ranks_that_call_instances_in_other_orders_get_the_words_of_fsdp1(rank: int) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (FSDP(nn.Linear(4, 4), use_orig_params=True) for _ in range(2))

        def forward(self, x: Tensor, first: bool) -> Tensor:
            return self.two(self.one(x)) if first else self.one(self.two(x))

    model = FSDP(Either(), use_orig_params=True)
    with pytest.raises(fsdp.WorldError, match=r"^Forward order differs across ranks\. .*'one'"):
        model(torch.ones(2, 4), rank == 0)
