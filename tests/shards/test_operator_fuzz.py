"""Every function of torch that takes one tensor, called with a shard: the global result or a refusal, never a local result."""

import warnings
from collections.abc import Callable, Container
from functools import cache
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.shards import shard_tensor
from fsdp.shards.operators import Rule, rule_of
from fsdp.shards.shard_tensor import ShardTensor
from tests.support.everything import EVERYTHING
from tests.support.models import local
from tests.support.ranks import on_ranks

MORE_CASES: Final = {"rows on two ranks": ((6, 4), 2), "a vector": ((7,), 2)}
"""Cut as others are. `make test-all` tests them."""
CASES: Final = {
    "rows on three ranks": ((7, 4), 3),
    "by element": ((3, 5), 2),
    "all on one of two ranks": ((1, 4), 2),
    **(MORE_CASES if EVERYTHING else {}),
}
WITH: Final[dict[str, tuple[Any, ...]]] = {
    "nothing": (),
    "a number": (2,),
    "the first dimension": (0,),
    "the last dimension": (-1,),
    "a fraction": (0.5,),
    "two numbers": (0, 1),
    "itself": ("self",),
    "itself twice": ("self", "self"),
    "a tensor of one number": (torch.tensor(3.0),),
    "a dtype": (torch.float64,),
}
"""What is given beside the shard."""
SKIPPED: Final = {
    *(
        "save",
        "load",
        "compile",
        "classproperty",
        "export",
        "fork",
        "wait",
        "import_ir_module",
        "set_printoptions",
        "vmap",
        "cond",
    ),
    *("is_storage", "typename", "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "as_subclass"),
    *("is_tensor", "numel", "element_size", "storage", "untyped_storage", "data_ptr", "storage_offset", "stride", "size"),
    *("dim", "ndimension", "nelement", "get_device", "type", "is_contiguous", "is_coalesced", "storage_type", "dim_order"),
    *("const_data_ptr", "mutable_data_ptr"),
    # give memory without values
    *("empty_like", "new", "new_empty"),
    # expands the other tensor, which is an ordinary one
    *("broadcast_tensors",),
    # read the memory of a tensor without an operator, so nothing can be refused: docs/reference/limits.md
    *("fbgemm_linear_quantize_weight", "fbgemm_pack_gemm_matrix_fp16", "to_dlpack"),
}
"""What does not compute, or asks for the memory or the local shape of the part."""
DECIDED_BY_PART: Final = ("torch.quantile", "torch.nanquantile", "F.scaled_dot_product_attention")
"""Functions that look at the size of the part before they call an operator, so that some ranks may wait for others that have
failed: docs/reference/limits.md. Each is called in a world of its own."""
WITHOUT_ELEMENTS: Final = {("torch.vander", "the first dimension")}
"""Calls that make an empty tensor from the size of the part, and call no operator: docs/reference/limits.md."""


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Functions of torch and torch.nn.functional, and methods of Tensor, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for where, space in (
        ("torch", torch),
        ("F", nn.functional),
        ("Tensor", Tensor),
        ("linalg", torch.linalg),
        ("special", torch.special),
        ("fft", torch.fft),
    ):
        for name in dir(space):
            function = getattr(space, name)
            is_magic = name.startswith("_") and not (where == "Tensor" and name in MAGIC)
            called = callable(function) and not isinstance(function, type) and f"{where}.{name}" not in DECIDED_BY_PART
            if called and not is_magic and name not in SKIPPED:
                found[f"{where}.{name}"] = method(name) if space is Tensor else function
    return found


def method(name: str) -> Callable[..., Any]:
    return lambda tensor, *given: getattr(tensor, name)(*given)


MAGIC: Final = {
    *(
        "__add__",
        "__and__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__eq__",
        "__float__",
        "__floordiv__",
        "__ge__",
        "__getitem__",
    ),
    *("__gt__", "__int__", "__invert__", "__iadd__", "__imul__", "__len__", "__lshift__", "__matmul__", "__mod__", "__mul__"),
    *("__ne__", "__neg__", "__or__", "__pow__", "__radd__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__"),
}


def outcome(function: Callable[..., Any], first: Tensor, given: tuple[Any, ...]) -> tuple[str, Any, Tensor]:
    """What a function returned for a copy of `first`, or the error that it raised; and the copy, which it may have changed."""
    target = first.clone()
    arguments = [first.clone() if argument == "self" else argument for argument in given]
    try:
        return "returned", function(target, *arguments), target
    except fsdp.errors.WorldError as error:
        raise AssertionError(f"ranks differ in {function} with {given}") from error
    except Exception as error:  # any error is a refusal
        return "refused", error, target


def in_full(result: Any) -> Any:
    """`result` with each shard in full. Communicates."""
    if isinstance(result, ShardTensor):
        return fsdp.full_tensor(result)
    if isinstance(result, list | tuple):
        return [in_full(one) for one in result]
    return result


def same(one: Any, other: Any) -> bool:
    if isinstance(other, list | tuple):
        return isinstance(one, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, Tensor):
        if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True) if one.numel() else True
    return bool(one == other) or (one != one and other != other)


@pytest.mark.parametrize(("shape", "size"), CASES.values(), ids=CASES)
def test_no_result_is_silently_local(shape: tuple[int, ...], size: int) -> None:
    wrong = fsdp.simulate(size, lambda rank: silently_wrong(shape))
    assert not wrong[0], "\n".join(wrong[0])


@pytest.mark.parametrize("name", DECIDED_BY_PART)
@pytest.mark.parametrize(("shape", "size"), CASES.values(), ids=CASES)
def test_every_rank_gets_an_error_where_the_size_of_its_part_decides(shape: tuple[int, ...], size: int, name: str) -> None:
    where, _, function = name.partition(".")
    call = getattr({"torch": torch, "F": nn.functional}[where], function)

    def one_rank(rank: int) -> None:
        shard, _ = sharded(shape)
        with pytest.raises((fsdp.ShardingError, fsdp.errors.WorldError, RuntimeError)):
            call(*[shard] * 3) if where == "F" else call(shard, 0.5)

    fsdp.simulate(size, one_rank)


@pytest.mark.parametrize("name", ["quantile", "nanquantile", "diff"])
@on_ranks(2)
def test_a_method_that_looks_at_the_size_of_the_part_is_refused_by_name(rank: int, name: str) -> None:
    shard = next(fsdp.fully_shard(nn.Linear(4, 1, bias=False)).parameters())
    with pytest.raises(fsdp.ShardingError, match=f"{name} on 'weight', of which this rank holds"):
        getattr(shard, name)(0.5)


@pytest.mark.parametrize(
    ("broken", "name"), [("elements", "torch.cumsum"), ("elements", "F.softmax"), ("sums", "torch.sum"), ("sums", "Tensor.norm")]
)
def test_a_local_result_is_noticed(broken: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "elements":
        wrong = ("aten::cumsum", "aten::_softmax")
        monkeypatch.setattr(
            shard_tensor, "rule_of", lambda func: Rule.ELEMENT_WISE if func._schema.name in wrong else rule_of(func)
        )
    else:
        monkeypatch.setattr(
            shard_tensor, "gather_and_combine", lambda reductions, *_: [one.combine(one.part[None]) for one in reductions]
        )
    for found in fsdp.simulate(3, lambda rank: silently_wrong((7, 4), {name})):
        assert any(text.startswith(f"{name} with ") for text in found)


def sharded(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A shard, and the parameter of this shape that it is a part of."""
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.rand(shape) + 0.25)
    holder.forward = lambda: holder.weight  # type: ignore[assignment]
    full = holder.weight.detach().clone()
    model = fsdp.fully_shard(holder)
    return next(model.parameters()).detach(), full


def silently_wrong(shape: tuple[int, ...], names: Container[str] | None = None) -> list[str]:
    """What is wrong, of the functions of these names or of all."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    shard, full = sharded(shape)
    assert isinstance(shard, ShardTensor)
    tried = {
        name: [outcome(function, shard, given) for given in WITH.values()]
        for name, function in functions().items()
        if names is None or name in names
    }

    def is_changed(after: Tensor) -> bool:
        return not torch.equal(local(after), local(shard))

    told = {name: [(how, is_changed(after)) for how, _, after in outcomes] for name, outcomes in tried.items()}
    everywhere = shard.shard_info.comm.gather_objects(told, "outcomes")
    assert all([*one] == [*tried] for one in everywhere)
    wrong = []
    for name, outcomes in tried.items():
        function, of_ranks = functions()[name], zip(*(one[name] for one in everywhere), strict=True)
        for (what, given), (how, result, after), here in zip(WITH.items(), outcomes, of_ranks, strict=True):
            hows = [how for how, _ in here]
            if (name, what) in WITHOUT_ELEMENTS:
                continue
            if len(set(hows)) > 1:  # a composite function returns early for a part without elements; the others refuse
                continue
            if how == "refused":
                assert torch.equal(local(after), local(shard)) or "_" in name, f"{name} changed something and then failed"
                continue
            wanted_how, wanted, wanted_after = outcome(function, full, given)
            if wanted_how == "refused":
                wrong.append(f"{name} with {what}: {type(result)} where a plain tensor is refused: {wanted!r}"[:200])
            elif not same(in_full(result), wanted):
                wrong.append(f"{name} with {what}: {in_full(result)!r} for {wanted!r}"[:200].replace("\n", " "))
            elif not same(in_full(after) if any(changed for _, changed in here) else full, wanted_after):
                wrong.append(f"{name} with {what} left {in_full(after)!r} for {wanted_after!r}"[:200].replace("\n", " "))
    return wrong
