"""What cannot be sharded is refused on every rank before anything changes, also if one rank alone has it."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fsdp
from fsdp.compat.fully_shard import fully_shard as by_fsdp2
from tests.support.models import loss_of, two_layers
from tests.support.ranks import on_ranks, refused_everywhere


class Scaled(nn.Parameter):
    """A parameter with functions of its own."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Marked(nn.Parameter):
    """A parameter whose class adds no operators."""


def dense() -> Tensor:
    return torch.eye(3)


def released() -> nn.Parameter:
    parameter = nn.Parameter(dense())
    parameter.untyped_storage().resize_(0)
    return parameter


def with_sparse_gradient() -> nn.Parameter:
    parameter = nn.Parameter(dense())
    parameter.grad = dense().to_sparse()
    return parameter


def quantised() -> nn.Parameter:
    return nn.Parameter(torch._empty_affine_quantized((3, 3), scale=0.1, zero_point=0, dtype=torch.qint8), requires_grad=False)


BAD: dict[str, tuple[Callable[[], nn.Parameter], str]] = {
    "sparse": (lambda: nn.Parameter(dense().to_sparse()), "has layout torch.sparse_coo; make it dense, or name its module in"),
    "mkldnn": (lambda: nn.Parameter(dense().to_mkldnn(), requires_grad=False), "has layout torch._mkldnn; make it dense"),
    "subclass": (
        lambda: nn.Parameter(TwoTensor(dense(), dense())),
        "is a TwoTensor, a tensor class with operators of its own, as quantised weights are; its parts would be plain tensors. "
        "Convert it to a plain parameter, or name its module in ignored_modules.",
    ),
    "functions of its own": (lambda: Scaled(dense()), "is a Scaled, a tensor class with operators of its own"),
    "quantised": (quantised, "is torch.qint8, whose elements cannot be copied one by one; convert it to a dtype of whole bytes"),
    "four bits": (
        lambda: nn.Parameter(torch.empty(3, 3, dtype=torch.uint4), requires_grad=False),
        "is torch.uint4, whose elements cannot be copied one by one",
    ),
    "expanded": (
        lambda: nn.Parameter(torch.ones(1, 3).expand(3, 3)),
        "is an expanded tensor, of which several elements are one number in memory; give each its own",
    ),
    "without memory": (released, "has no memory, because something has released it; load or build the module anew."),
    "uninitialised": (
        lambda: nn.UninitializedParameter(),
        "is not initialised yet; run one forward of the plain module before wrapping it.",
    ),
    "with a sparse gradient": (
        with_sparse_gradient,
        "has a gradient from before wrapping that cannot be cut, because it is sparse, of a class of its own or on another "
        "device; step the optimizer and set the gradient to None first.",
    ),
}
WORLDS = pytest.mark.parametrize(
    ("size", "bad"), [(2, (0, 1)), (2, (1,)), (3, (0,))], ids=["all", "the last of 2", "the first of 3"]
)


def assert_trains(model: nn.Module) -> None:
    fsdp.fully_shard(model)
    loss_of(model(torch.ones(2, 3))).backward()
    assert all(p.grad is not None or not p.numel() for p in model.parameters() if p.requires_grad)


@WORLDS
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_parameter_that_cannot_be_sharded_is_named(kind: str, size: int, bad: tuple[int, ...]) -> None:
    make, text = BAD[kind]

    def fn(rank: int) -> str:
        model = two_layers()
        if rank in bad:
            model[1].weight = make()
        before = list(model.parameters())
        attributes = [dict(vars(module)) for module in model.modules()]
        with pytest.raises(fsdp.ShardingError) as caught:
            fsdp.fully_shard(model)
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert [dict(vars(module)) for module in model.modules()] == attributes
        # mended, it can be wrapped
        model[1].weight = nn.Parameter(dense())
        assert_trains(model)
        return str(caught.value)

    for rank, said in enumerate(fsdp.simulate(size, fn)):
        assert f"parameter '1.weight' {text}" in said
        assert (rank in bad) or said.startswith(f"rank {bad[0]} could not wrap its module: ")


@pytest.mark.parametrize("kind", ["subclass", "quantised", "sparse"])
@on_ranks(2)
def test_an_ignored_module_may_have_such_a_parameter(rank: int, kind: str) -> None:
    model = two_layers()
    extra = model[1].extra = nn.Module()
    extra.weight = BAD[kind][0]()
    fsdp.fully_shard(model, ignored_modules=[extra])
    loss_of(model(torch.ones(2, 3))).backward()


@on_ranks(2)
def test_a_class_of_parameters_without_operators_of_its_own_is_sharded(rank: int) -> None:
    model = two_layers()
    model[1].weight = Marked(dense())
    assert_trains(model)


@WORLDS
@on_ranks(
    "size", "parameters '0.weight' and '1.weight' are two objects over the same memory, so that one changes with the other; tie"
)
def test_two_parameters_over_one_memory_are_named(rank: int, size: int, bad: tuple[int, ...]) -> None:
    model = two_layers()
    if rank in bad:
        model[1].weight = nn.Parameter(model[0].weight.data)
    fsdp.fully_shard(model)


@pytest.mark.parametrize("wrap", ["in one call", "from inside", "by FSDP2's names"])
@pytest.mark.parametrize("shared", [slice(None), slice(1, None)], ids=["all of it", "some rows"])
@on_ranks(2)
def test_parameters_that_share_memory_are_refused_in_one_call_and_named_in_several(rank: int, shared: slice, wrap: str) -> None:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    model[1].weight = nn.Parameter(model[0].weight.data[shared])
    door = by_fsdp2 if wrap == "by FSDP2's names" else fsdp.fully_shard
    if wrap == "in one call":
        with pytest.raises(fsdp.ShardingError, match=r"'0.weight' and '1.weight' are two objects over the same memory"):
            door(model)
        return
    for layer in model:
        door(layer)
    # they may be apart by intention: two modules that have loaded one state dict, or a buffer in which each layer was loaded
    with pytest.warns(UserWarning, match=r"'weight' of unit .* and 'weight' of unit .* were two objects over the same memory"):
        door(model)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": lambda weight: weight,
    "some rows": lambda weight: weight[1:],
    "transposed": lambda weight: weight.t(),
    "by numpy": lambda weight: torch.from_numpy(weight.numpy()),
}


@on_ranks(2)
def test_a_buffer_between_the_elements_of_a_parameter_is_accepted(rank: int) -> None:
    both = torch.ones(3, 2)
    model = two_layers()
    model[0].bias, model[1].bias = nn.Parameter(both[:, 0]), nn.Parameter(torch.ones(3))
    model[1].register_buffer("other", both[:, 1])
    fsdp.fully_shard(model)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_buffer_over_the_memory_of_a_parameter_is_refused_if_that_is_trained(rank: int, strategy: str, view: str) -> None:
    model = two_layers()
    model[1].register_buffer("table", VIEWS[view](model[0].weight.data))
    with pytest.raises(
        fsdp.ShardingError, match=r"buffer '1\.table' is over the memory of parameter '0\.weight', which is trained"
    ):
        fsdp.fully_shard(model, sharding_strategy=strategy)
    model[0].weight.requires_grad_(False)
    fsdp.fully_shard(model, sharding_strategy=strategy)


@on_ranks(2)
def test_a_nested_buffer_is_accepted(rank: int) -> None:
    model = two_layers()
    model[1].register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), persistent=False)
    fsdp.fully_shard(model)


@on_ranks(2)
def test_frozen_parameters_may_share_memory(rank: int) -> None:
    model = nn.Sequential(*two_layers(), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    model[0].weight.requires_grad_(False)
    assert_trains(model)


@on_ranks(2, "parameter '1.weight' is on the meta device and in use by an autograd graph or a weak reference")
def test_a_meta_parameter_that_something_refers_to_is_named(rank: int) -> None:
    with torch.device("meta"):
        model = two_layers()
    watched = weakref.ref(model[1].weight)
    fsdp.fully_shard(model)
    assert watched() is not None


@WORLDS
@on_ranks(
    "size", "unit 'Sequential' contains a scripted Linear, whose parameters TorchScript keeps; wrap the module that was scripted"
)
def test_a_scripted_module_is_named(rank: int, size: int, bad: tuple[int, ...]) -> None:
    model = two_layers()
    if rank in bad:
        model[1] = torch.jit.script(model[1])  # type: ignore[no-untyped-call]
    fsdp.fully_shard(model)


@on_ranks(2)
def test_a_scripted_module_without_parameters_may_be_inside(rank: int) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # from now on, backwards look for compiled modules
    assert_trains(nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.ReLU())))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (lambda: torch.ones(1).expand(3), "'1.mask' is an expanded tensor, of which several elements are one number in memory"),
        (lambda: dense().to_sparse(), "'1.mask' is a Tensor of layout torch.sparse_coo and dtype torch.float32"),
        (lambda: nn.UninitializedBuffer(), "'1.mask' is not initialised yet"),
    ],
    ids=["expanded", "sparse", "uninitialised"],
)
@pytest.mark.parametrize("option", ["sync_module_states", "broadcast_buffers"])
def test_a_buffer_that_cannot_be_broadcast_is_named(buffer: Callable[[], Tensor], text: str, option: str) -> None:
    def fn(rank: int) -> None:
        model = two_layers()
        model[1].register_buffer("mask", buffer())
        fsdp.fully_shard(model, **{option: True})

    refused_everywhere(2, fn, f"{text}, so it cannot be broadcast; make it a plain dense tensor, or leave out sync_module_states")


def test_a_parameter_from_inference_mode_cannot_be_broadcast_and_can_be_sharded() -> None:
    def model() -> nn.Module:
        with torch.inference_mode():
            values = dense()
        layers = two_layers()
        layers[1].weight = nn.Parameter(values, requires_grad=False)
        return layers

    text = "'1.weight' was made in torch.inference_mode, so it cannot be broadcast"
    refused_everywhere(2, lambda rank: fsdp.fully_shard(model(), sync_module_states=True), text)
    fsdp.simulate(2, lambda rank: assert_trains(model()))


def test_a_shallow_copy_of_a_unit_is_refused() -> None:
    def build() -> None:
        model = two_layers()
        model.append(copy.copy(model[0]))
        fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})

    refused_everywhere(2, lambda rank: build(), "is a copy.copy of another unit, which has the same hooks; use copy.deepcopy")
