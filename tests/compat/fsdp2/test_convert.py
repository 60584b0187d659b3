"""Modules inside a unit get memory or another dtype by themselves; `load_state_dict` gives memory to what it names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.compat.fully_shard import fully_shard
from tests.support.ranks import on_ranks


def made(device: str = "meta") -> Any:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    fully_shard(model[1])
    return fully_shard(model)


def on_meta(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


@on_ranks(2)
def test_a_parameter_that_was_put_in_place_of_one_on_the_meta_device_is_refused_by_name(rank: int) -> None:
    model = made()
    model[0].bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(fsdp.ShardingError, match=r"Linear.bias in unit .* was replaced by another parameter"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@on_ranks(2)
def test_a_dtensor_that_is_put_in_place_of_a_parameter_gives_it_its_values(rank: int, device: str) -> None:
    """As `init_weights` of a model may do, which computes a parameter from others. The parameter's object stays."""
    model = made(device)
    scale = model[1][1].weight
    for layer in (model[0], model[1]):
        layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        model[1][1].reset_running_stats()
        model[1][1].weight = nn.Parameter(torch.linalg.norm(model[1][0].weight, dim=1) + scale)
    assert model[1][1].weight is scale and scale.full_tensor().tolist() == [1.5] * 4
    model[0].bias = nn.Parameter(model[0].bias.detach() * 2, requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.ones(2, 4) * torch.tensor([[1.0], [2.0]])).square().sum().backward()
    optimizer.step()
    assert scale.full_tensor().tolist() != [1.5] * 4 and model[0].bias.full_tensor().tolist() == [1.0] * 4
    model[0].bias = nn.Parameter(model[0].weight.detach())
    with pytest.raises(fsdp.ShardingError, match=r"Linear.bias in unit .* was replaced by another parameter"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[0]], ids=["model", "layer"])
@on_ranks(2)
def test_what_is_put_in_place_of_a_parameter_brings_its_own_gradient(rank: int, part: Callable[[Any], Any]) -> None:
    """A new parameter has none, so what the one before had is not added to the gradient of the next backward."""
    model = made("cpu")

    def backward() -> list[Any]:
        model(torch.ones(2, 4) * torch.tensor([[1.0], [2.0]])).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in part(model).parameters()]

    first = backward()
    state = {name: value.clone() for name, value in part(model).state_dict().items()}
    part(model).load_state_dict(state, assign=True)
    assert all(parameter.grad is None for parameter in part(model).parameters())
    torch.testing.assert_close(backward(), first)
    bias = nn.Parameter(model[0].bias.detach())
    bias.grad = torch.ones_like(bias)
    model[0].bias = bias
    assert model[0].bias.grad.full_tensor().tolist() == [1.0] * 4


@on_ranks(2)
def test_one_that_is_put_in_place_of_a_parameter_without_memory_gives_it_memory(rank: int) -> None:
    model = made()
    given = [made("cpu")[0].bias, made("cpu")[0].weight]
    model[0].bias, model[0].weight = (nn.Parameter(one.detach()) for one in given)
    assert on_meta(model) == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    assert all(torch.equal(model[0].bias.full_tensor(), one.full_tensor()) for one in given[:1])
    assert torch.equal(model[0].weight.full_tensor(), given[1].full_tensor())


@on_ranks(2)
def test_the_layers_of_a_model_on_the_meta_device_get_memory_one_by_one(rank: int) -> None:
    model = made()
    parameters = [*model.parameters()]
    with pytest.raises(fsdp.NoMemoryYet, match=r"on meta device: \['0.weight', '0.bias'\]. Call to_empty"):
        model(torch.ones(2, 4))
    model[0].to_empty(device="cpu")
    with pytest.raises(fsdp.NoMemoryYet, match=r"on meta device: \['1.0.weight', '1.0.bias', '1.1.weight', '1.1.bias'\]"):
        model(torch.ones(2, 4))
    model[1][0].to_empty(device="cpu")
    model[1][1].to_empty(device="cpu")
    assert not on_meta(model) and all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(0.5)
        model[1][1].reset_running_stats()
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


@pytest.mark.parametrize("get_memory", [lambda model, state: model.to_empty(device="cpu"), lambda model, state: None])
@on_ranks(2)
def test_an_ignored_parameter_on_the_meta_device_gets_memory_too(rank: int, get_memory: Callable[..., object]) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignored = model[1].weight
    ignored.mark = "kept"
    fully_shard(model, ignored_params={ignored})
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    get_memory(model, state)
    model.load_state_dict(state)
    assert not on_meta(model) and model[1].weight is ignored and ignored.mark == "kept" and ignored.requires_grad
    assert torch.equal(ignored, state["1.weight"])
    model(torch.ones(2, 4)).sum().backward()
    assert ignored.grad is not None


@pytest.mark.filterwarnings("ignore:for 1.1.num_batches_tracked")  # BatchNorm adds it to a state dict that leaves it out
@on_ranks(2)
def test_two_loads_give_memory_to_what_each_of_them_names(rank: int) -> None:
    model = made()
    model.load_state_dict({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)}, strict=False, assign=True)
    assert on_meta(model) == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    assert model[1][1].running_mean.is_meta
    rest = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict(prefix="1.")
    model.load_state_dict(rest, strict=False, assign=True)
    assert not on_meta(model) and not model[1][1].running_mean.is_meta
    assert bool((fsdp.full_tensor(model[0].weight) == 1).all())
    assert torch.equal(fsdp.full_tensor(model[1][0].weight), rest["1.0.weight"])


@pytest.mark.parametrize("device", ["meta", "cpu"])
@on_ranks(2)
def test_a_module_around_wrapped_ones_that_is_not_wrapped_loads_with_assign(rank: int, device: str) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    with torch.device(device):
        model: Any = nn.Sequential(block(), block(), nn.Linear(4, 4))
    fully_shard(model[0]), fully_shard(model[1])
    parameters = [*model[:2].parameters()]
    state = nn.Sequential(block(), block(), nn.Linear(4, 4)).double().state_dict()
    model.load_state_dict(state, assign=True)
    assert all(p is q for p, q in zip(model[:2].parameters(), parameters, strict=True))
    assert all(torch.equal(fsdp.full_tensor(p), state[name]) for name, p in model[:2].named_parameters())
    assert model(torch.ones(2, 4).double() + rank).dtype is torch.float64


@on_ranks(2)
def test_all_of_a_model_gets_memory_if_a_module_loads_from_other_names(rank: int) -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}old")

    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    model[0].register_load_state_dict_pre_hook(rename)
    fully_shard(model)
    model.load_state_dict({"0.old": torch.ones(4, 4)}, strict=False)
    assert not on_meta(model) and bool((fsdp.full_tensor(model[0].weight) == 1).all())
    assert bool(fsdp.full_tensor(model[1][0].weight).isnan().all())


@on_ranks(2)
def test_a_layer_that_shares_a_buffer_is_converted_alone(rank: int) -> None:
    model = made("cpu")
    before = [full(p) for p in model.parameters()]
    model[1](torch.rand(3, 4)).sum().backward()
    grads = [full(p.grad) for p in model[1].parameters()]
    model[1][0].double()
    assert [p.dtype for p in model[1].parameters()] == [torch.float64] * 2 + [torch.float32] * (len(grads) - 2)
    torch.testing.assert_close([full(p).float() for p in model.parameters()], before)
    torch.testing.assert_close([full(p.grad).float() for p in model[1].parameters()], grads)


def full(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor()
