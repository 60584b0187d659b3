"""A module or parameter that is added, replaced or taken away after wrapping is noticed when the next forward begins."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fsdp
from fsdp.shards.shard_tensor import ShardTensor
from tests.support.models import loss_of
from tests.support.ranks import on_ranks

X = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    """Modules in every kind of container, and one more, if there is one."""

    more: nn.Module

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.enter(x))
        for layer in self.layers:
            x = layer(x)
        return self.more(x) if hasattr(self, "more") else x


class Doubled(nn.Module):
    """A parametrization element by element."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def layer() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 4)


def sharded(strategy: str = "FULL_SHARD", units: set[type[nn.Module]] | None = None) -> Net:
    model = fsdp.fully_shard(Net(), auto_wrap_policy=units or {nn.Linear}, sharding_strategy=strategy)
    loss_of(model(X)).backward()
    with torch.no_grad():
        model(X)  # some strategies keep a copy, so that the next forward gathers nothing
    return model


ADDED: dict[str, tuple[Callable[[Net], object], str]] = {
    "a module": (lambda net: setattr(net, "more", layer()), "more.weight"),
    "add_module": (lambda net: net.add_module("other", layer()), "other.weight"),
    "a module in an inner unit": (lambda net: setattr(net.enter, "extra", layer()), "enter.extra.weight"),
    "a parameter": (lambda net: net.register_parameter("gain", nn.Parameter(torch.ones(4))), "gain"),
    "a parameter in an inner unit": (lambda net: setattr(net.enter, "gain", nn.Parameter(torch.ones(4))), "enter.gain"),
    "inserted into a list": (lambda net: net.layers.insert(0, layer()), "layers.0.weight"),
    "in another's place": (lambda net: net.middle.__setitem__(1, layer()), "middle.1.weight"),
    "in a dict of torch": (lambda net: net.middle._modules.update({"0": layer()}), "middle.0.weight"),
}
STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS"])


@STRATEGIES
@pytest.mark.parametrize("kind", ADDED)
@on_ranks(2)
def test_what_is_added_is_named_on_every_rank_until_it_is_gone(rank: int, kind: str, strategy: str) -> None:
    add, name = ADDED[kind]
    model = sharded(strategy)
    before = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]
    add(model)
    for _ in range(2):
        with pytest.raises(
            fsdp.ShardingError, match=rf"parameter '{name}' was added after wrapping: it is not sharded, and each rank would"
        ):
            model(X)
    for module, modules, parameters in before:
        for content, was in ((module._modules, modules), (module._parameters, parameters)):
            for other in set(content) - set(was):
                del content[other]
            content.update(was)  # type: ignore[arg-type]
    model.layers._modules = {"0": model.layers[-1]}
    loss_of(model(X)).backward()


@on_ranks(2)
def test_one_rank_alone_names_it_and_the_others_are_notified(rank: int) -> None:
    model = sharded()
    if rank:
        model.more = layer()
    error = fsdp.ShardingError if rank else fsdp.PeerFailed
    with pytest.raises(error, match=r"parameter 'more.weight' was added after wrapping"):
        model(X)
    if rank:
        del model.more
    loss_of(model(X)).backward()


@pytest.mark.parametrize(
    "add",
    [
        lambda net: setattr(net, "more", nn.Tanh()),
        lambda net: setattr(net, "more", layer().requires_grad_(False)),
        lambda net: setattr(net, "other", net.enter),
        lambda net: delattr(net, "layers") or setattr(net, "layers", []),
    ],
    ids=["without parameters", "frozen", "shared", "taken away"],
)
@on_ranks(2)
def test_what_does_no_harm_is_accepted(rank: int, add: Callable[[Net], object]) -> None:
    model, plain = sharded(), Net()
    add(model)
    add(plain)
    for _ in range(2):
        assert torch.allclose(model(X), plain(X))
    loss_of(model(X)).backward()


def test_the_remedy_is_right() -> None:
    """A module that is sharded by itself may be put in."""
    plain = Net()
    plain.more = layer()
    loss_of(plain(X)).backward()

    def fn(rank: int) -> dict[str, Tensor]:
        model = sharded()
        model.zero_grad()
        model.more = fsdp.fully_shard(layer())
        loss_of(model(X)).backward()
        with fsdp.summon_full_params(model):
            pass
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
        return fsdp.full_state_dict(model, rank0_only=False)

    for found in fsdp.simulate(2, fn):
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_ignored_modules_may_change(rank: int) -> None:
    net = Net()
    model = fsdp.fully_shard(net, ignored_modules=[net.layers])
    model.layers.append(layer())
    loss_of(model(X)).backward()


@on_ranks(2)
def test_a_root_that_became_an_inner_unit_is_checked_by_its_new_root(rank: int) -> None:
    model = Net()
    fsdp.fully_shard(model.enter)
    model.more = layer()
    fsdp.fully_shard(model)
    loss_of(model(X)).backward()
    model.enter.extra = layer()
    with pytest.raises(fsdp.ShardingError, match=r"parameter 'enter.extra.weight' was added after wrapping"):
        model(X)


@STRATEGIES
@pytest.mark.parametrize("way", ["parametrize", "prune"])
@on_ranks(2)
def test_a_parameter_that_torch_takes_away_is_named(rank: int, way: str, strategy: str) -> None:
    model = sharded(strategy)
    if way == "parametrize" and isinstance(model.enter.weight, ShardTensor):
        with pytest.raises(fsdp.ShardingError, match=r"aten.set_.* on 'enter.weight'.* it needs the full tensor"):
            parametrize.register_parametrization(model.enter, "weight", Doubled())
        loss_of(model(X)).backward()  # the model is as it was
        return
    if way == "parametrize":
        parametrize.register_parametrization(model.enter, "weight", Doubled())
    else:
        prune.identity(model.enter, "weight")  # type: ignore[no-untyped-call]
    with pytest.raises(
        fsdp.ShardingError,
        match=r"Linear.weight in unit 'enter' was taken away after wrapping, as torch.nn.utils.parametrize, prune and",
    ):
        model(X)


Slots = dict[str, nn.Parameter | None]
PUT_IN: dict[str, Callable[[Slots, nn.Parameter], object]] = {
    "[]": lambda slots, other: slots.__setitem__("weight", other),
    "del": lambda slots, other: slots.__delitem__("weight"),
    "|=": lambda slots, other: slots.__ior__({"weight": other}),
    "clear": lambda slots, other: slots.clear(),
    "pop": lambda slots, other: slots.pop("weight"),
    "popitem": lambda slots, other: slots.popitem(),
    "setdefault": lambda slots, other: (slots.pop("weight"), slots.setdefault("weight", other)),
    "update": lambda slots, other: slots.update(weight=other),
}


@pytest.mark.parametrize("way", PUT_IN)
@on_ranks(2)
def test_what_a_forward_does_to_the_dict_of_parameters_of_a_later_unit_is_seen_by_that(rank: int, way: str) -> None:
    model = sharded("FULL_SHARD")
    slots = model.layers[0]._parameters
    before, other = dict(slots), nn.Parameter(torch.ones(4, 4))
    handle = model.enter.register_forward_hook(lambda *_: [PUT_IN[way](slots, other)].clear())
    with pytest.raises(fsdp.ShardingError, match=r"Linear.\w+ in unit 'layers.0' was (taken away|replaced by another parameter)"):
        model(X)
    handle.remove()
    slots.update(before)
    loss_of(model(X)).backward()


@STRATEGIES
@on_ranks(2)
def test_functional_call_with_other_tensors_is_refused_and_leaves_the_model_as_it_was(rank: int, strategy: str) -> None:
    model = sharded(strategy)
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(fsdp.ShardingError, match=r"was replaced by another parameter after wrapping.*functional_call replaces"):
        torch.func.functional_call(model, others, (X,))
    loss_of(torch.func.functional_call(model, dict(model.named_parameters()), (X,))).backward()


TRANSFORMS: dict[str, Callable[[nn.Module], object]] = {
    "vmap": lambda model: torch.vmap(model)(X.expand(3, 2, 4).clone()),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "jvp": lambda model: torch.func.jvp(model, (X,), (X,)),
    "jacrev": lambda model: torch.func.jacrev(model)(X),
    "grad of functional_call": lambda model: torch.func.grad(
        lambda parameters: torch.func.functional_call(model, parameters, (X,)).sum()
    )(dict(model.named_parameters())),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS", "NO_SHARD"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@on_ranks(2)
def test_transforms_are_refused_in_a_sentence(rank: int, transform: str, strategy: str) -> None:
    model = fsdp.fully_shard(Net(), sharding_strategy=strategy)
    for _ in range(2):
        with pytest.raises(fsdp.ShardingError, match=r"a transform of torch.func \(vmap, grad, .* goes through 'Net', whose"):
            TRANSFORMS[transform](model)
        loss_of(model(X)).backward()


class Around(nn.Module):
    """Applies a transform to its inner unit, or to what reads the weight of that unit."""

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.transform = Net(), ""

    def forward(self, x: Tensor) -> Any:
        if self.transform == "a read of a weight":
            return torch.vmap(lambda row: row @ self.unit.enter.weight)(x)
        return TRANSFORMS[self.transform](self.unit) if self.transform else self.unit(x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacrev", "a read of a weight"])
@on_ranks(2)
def test_transforms_of_an_inner_unit_are_refused_and_the_next_step_works(rank: int, transform: str, strategy: str) -> None:
    model = fsdp.fully_shard(Around(), auto_wrap_policy={Net}, sharding_strategy=strategy)
    for model.transform in (transform, ""):
        with pytest.raises(fsdp.ShardingError, match="goes through 'unit', whose") if model.transform else nullcontext():
            loss_of(model(X)).backward()


def test_the_jacobian_of_autograd_is_the_remedy() -> None:
    plain = torch.autograd.functional.jacobian(Net(), X)

    def fn(rank: int) -> Tensor:
        found = torch.autograd.functional.jacobian(fsdp.fully_shard(Net()), X)  # type: ignore[no-untyped-call]
        assert isinstance(found, Tensor)
        return found

    for found in fsdp.simulate(2, fn):
        torch.testing.assert_close(found, plain)
