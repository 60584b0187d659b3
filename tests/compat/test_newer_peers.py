"""What a peer that is installed has, and its door does not know, is refused by name when it is used; its default is accepted.

And the tables of what the doors know are compared with what is installed, so that a new field is noticed here first.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import fsdp
from fsdp.building.peer_options import PEER_OPTIONS
from fsdp.building.torch_policies import OF_FSDP1, OF_FSDP2, OFFLOADS, UNKNOWN
from fsdp.compat import ddp, fairscale, fully_shard
from fsdp.compat import torch_fsdp as fsdp1
from fsdp.compat.ddp.arguments import ABSENT
from fsdp.compat.ddp.wrapper import TorchDDP
from fsdp.compat.fsdp1.sharding import PREFETCHES, STRATEGIES
from fsdp.compat.fsdp1.state_types import CONFIGS, FIELDS
from fsdp.errors import ShardingError
from tests.support.ranks import on_ranks, refused_everywhere

TORCH_FSDP1 = torch_fsdp.FullyShardedDataParallel
DOORS: dict[str, tuple[type, Any, Callable[[nn.Module], Any]]] = {
    "ddp": (TorchDDP, ddp.DistributedDataParallel, ddp.DistributedDataParallel),
    "torch_fsdp": (TORCH_FSDP1, fsdp1.FullyShardedDataParallel, fsdp1.FullyShardedDataParallel),
    "fully_shard": (torch_fsdp.FSDPModule, fully_shard.FSDPModule, fully_shard.fully_shard),
}
"""For each door of torch: torch's class, ours, and what wraps a module."""
each_door = pytest.mark.parametrize("door", DOORS)


def on_one_rank(program: Callable[[], Any]) -> Any:
    return fsdp.simulate(1, lambda rank: program())[0]


def refuses(program: Callable[[], Any], name: str) -> None:
    """It names what it does not know, on both ranks."""
    assert all(UNKNOWN in text for text in refused_everywhere(2, lambda rank: program(), name))


# what is installed ------------------------------------------------------------------------


def names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def members(kind: type[enum.Enum]) -> set[str]:
    return {one.name for one in kind}


def arguments(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters}


def test_the_doors_know_every_field_of_torchs_policies() -> None:
    assert names(torch_fsdp.MixedPrecisionPolicy) <= {*OF_FSDP2}
    assert names(torch_fsdp.MixedPrecision) <= {*OF_FSDP1}
    for policy in (torch_fsdp.OffloadPolicy, torch_fsdp.CPUOffloadPolicy, torch_fsdp.CPUOffload):
        assert names(policy) <= {*OFFLOADS}
    for configs in CONFIGS.values():
        assert all(names(config) <= {*FIELDS} for config in configs)


def test_the_doors_know_every_member_of_torchs_enumerations() -> None:
    assert members(torch_fsdp.ShardingStrategy) == {*STRATEGIES}
    assert members(torch_fsdp.BackwardPrefetch) == {*PREFETCHES}
    assert members(torch_fsdp.StateDictType) == {one.name for one in CONFIGS}
    assert members(torch_fsdp.OptimStateKeyType) == {"PARAM_NAME", "PARAM_ID"}


@each_door
def test_the_doors_know_every_method_of_torchs_classes_with_its_arguments(door: str) -> None:
    theirs, ours, _ = DOORS[door]
    known = {name for name in public(theirs) if hasattr(ours, name)}
    assert public(theirs) - known - {*ABSENT} - {"module", "train"} == set()
    for name in ("__init__", *sorted(known)):
        if callable(vars(theirs).get(name)) and name != "forward":
            missing = arguments(getattr(theirs, name)) - arguments(getattr(ours, name))
            assert missing <= {*PEER_OPTIONS, "kwargs"}, name


def test_the_doors_know_every_argument_of_fsdp2s_functions() -> None:
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        assert arguments(getattr(torch_fsdp, name)) <= arguments(getattr(fully_shard, name))


# what a later version may have ------------------------------------------------------------


LATER = enum.Enum("Later", "LATER").LATER  # type: ignore[attr-defined]


def with_field(cls: type, *given: Any) -> type:
    """A policy as a later version may have it: with a field `later`."""
    return dataclasses.make_dataclass(cls.__name__, [("later", int, 0)], bases=(cls,), frozen=cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


POLICIES: dict[str, tuple[type, Callable[[nn.Module, Any], Any]]] = {
    "FSDP2's precision": (torch_fsdp.MixedPrecisionPolicy, lambda module, one: fully_shard.fully_shard(module, mp_policy=one)),
    "FSDP2's offload": (torch_fsdp.CPUOffloadPolicy, lambda module, one: fsdp.fully_shard(module, offload_policy=one)),
    "FSDP2's no offload": (torch_fsdp.OffloadPolicy, lambda module, one: fully_shard.fully_shard(module, offload_policy=one)),
    "FSDP1's precision": (
        torch_fsdp.MixedPrecision,
        lambda module, one: fsdp1.FullyShardedDataParallel(module, mixed_precision=one),
    ),
    "FSDP1's precision, natively": (torch_fsdp.MixedPrecision, lambda module, one: fsdp.fully_shard(module, mp_policy=one)),
    "FSDP1's offload": (torch_fsdp.CPUOffload, lambda module, one: fsdp1.FullyShardedDataParallel(module, cpu_offload=one)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_field_of_a_policy_is_refused_by_name(name: str) -> None:
    cls, wrap = POLICIES[name]
    later = with_field(cls)
    on_one_rank(lambda: wrap(nn.Linear(2, 2), later()))
    refuses(lambda: wrap(nn.Linear(2, 2), later(later=3)), "later=3")


def test_a_new_field_of_a_state_dict_config_is_refused_by_name() -> None:
    config: Any = torch_fsdp.FullStateDictConfig()
    config.later = 3
    wrap = fsdp1.FullyShardedDataParallel
    kind = torch_fsdp.StateDictType.FULL_STATE_DICT
    refuses(lambda: wrap.set_state_dict_type(wrap(nn.Linear(2, 2)), kind, config), "later=3")


@pytest.mark.parametrize("argument", ["sharding_strategy", "backward_prefetch"])
def test_a_new_member_of_an_enumeration_is_refused_by_name(argument: str) -> None:
    refuses(lambda: fsdp1.FullyShardedDataParallel(nn.Linear(2, 2), **{argument: LATER}), "Later.LATER")


def test_a_new_format_of_state_dicts_is_refused_by_name() -> None:
    wrap = fsdp1.FullyShardedDataParallel
    refuses(lambda: wrap.set_state_dict_type(wrap(nn.Linear(2, 2)), LATER), "Later.LATER")


def of_own_class() -> nn.Module:
    """FSDP2's door makes a class for each class that it wraps, and keeps it."""
    made: nn.Module = type("Own", (nn.Linear,), {})(2, 2)
    return made


def later_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """It as a later version may have it: with an argument `later`."""

    def later(*args: Any, later: int = 0, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return later


@each_door
def test_a_new_argument_of_what_wraps_is_refused_by_name(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _, wrap = DOORS[door]
    if door == "fully_shard":
        monkeypatch.setattr(fully_shard, "_fully_shard", later_function(torch_fsdp.fully_shard))
    else:
        monkeypatch.setattr(theirs, "__init__", later_function(theirs.__init__))  # type: ignore[misc]
    on_one_rank(lambda: wrap(nn.Linear(2, 2), later=0))
    refuses(lambda: wrap(nn.Linear(2, 2), later=3), "later=3")


METHODS = {
    "ddp": ("no_sync", ()),
    "torch_fsdp": ("clip_grad_norm_", (1.0,)),
    "fully_shard": ("set_reshard_after_forward", (True,)),
}


@each_door
def test_a_new_argument_of_a_method_is_refused_by_name(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _, wrap = DOORS[door]
    name, given = METHODS[door]
    monkeypatch.setattr(theirs, name, later_function(getattr(theirs, name)))
    on_one_rank(lambda: getattr(wrap(nn.Linear(2, 2)), name)(*given, later=0))
    refuses(lambda: getattr(wrap(nn.Linear(2, 2)), name)(*given, later=3), "later=3")
    with pytest.raises(TypeError, match="unexpected keyword argument 'never'"):
        on_one_rank(lambda: getattr(wrap(nn.Linear(2, 2)), name)(*given, never=3))


def test_a_new_argument_of_a_static_method_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TORCH_FSDP1, "fsdp_modules", staticmethod(later_function(TORCH_FSDP1.fsdp_modules)))
    on_one_rank(lambda: fsdp1.FullyShardedDataParallel.fsdp_modules(nn.Linear(2, 2), later=0))  # type: ignore[call-arg]
    refuses(lambda: fsdp1.FullyShardedDataParallel.fsdp_modules(nn.Linear(2, 2), later=3), "later=3")  # type: ignore[call-arg]


@each_door
@on_ranks(1)
def test_a_new_method_is_refused_by_name(rank: int, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _, wrap = DOORS[door]
    monkeypatch.setattr(theirs, "set_later", lambda self, value: None, raising=False)
    model = wrap(of_own_class())
    with pytest.raises((AttributeError, ShardingError)) as caught:
        model.set_later(3)
    assert "set_later" in str(caught.value) and UNKNOWN in str(caught.value)


@each_door
@pytest.mark.parametrize("later", [property(lambda self: 0), False, None, 1.0])
def test_a_new_property_or_field_that_is_set_is_refused_by_name(door: str, later: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, _, wrap = DOORS[door]
    monkeypatch.setattr(theirs, "later", later, raising=False)
    refuses(lambda: setattr(wrap(of_own_class()), "later", 3), ".later")
    with pytest.raises(AttributeError, match="later"):
        on_one_rank(lambda: wrap(of_own_class()).later)


@each_door
@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@on_ranks(1)
def test_a_new_method_without_an_object_is_refused_by_name(
    rank: int, door: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, wrap = DOORS[door]
    monkeypatch.setattr(theirs, "later", kind(lambda *args: None), raising=False)
    with pytest.raises((AttributeError, ShardingError), match="later"):
        wrap(of_own_class()).later(3)
    with pytest.raises(AttributeError, match="later"):
        ours.later(3)


@on_ranks(1)
def test_a_new_kind_of_keys_is_refused_by_name(rank: int) -> None:
    model = fsdp1.FullyShardedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = fsdp1.FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"Later\.LATER"):
        fsdp1.FullyShardedDataParallel.rekey_optim_state_dict(state, LATER, model, optim=optimizer)


def test_what_a_later_fairscale_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the installed fairscale has, its door takes what it knows: the door does not import fairscale."""
    theirs, ours = pytest.importorskip("fairscale.nn").FullyShardedDataParallel, fairscale.FullyShardedDataParallel
    monkeypatch.setattr(theirs, "__init__", later_function(theirs.__init__))
    monkeypatch.setattr(theirs, "set_later", lambda self, value: None, raising=False)
    monkeypatch.setattr(theirs, "no_sync", later_function(theirs.no_sync))

    def program() -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'later'"):
            ours(nn.Linear(2, 2), later=3)  # type: ignore[call-arg]
        model: Any = ours(nn.Linear(2, 2))
        with pytest.raises(AttributeError, match="set_later"):
            model.set_later(3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'later'"):
            model.no_sync(later=3)

    on_one_rank(program)


@on_ranks(1)
def test_other_attributes_are_found_and_set_as_before(rank: int) -> None:
    for _, _, wrap in DOORS.values():
        model = wrap(nn.Linear(2, 2))
        model.mine = 3
        assert model.mine == 3
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = model.nothing


# torch 2.15 -------------------------------------------------------------------------------


def test_gradients_are_reduced_in_the_dtype_of_the_shards() -> None:
    """With `reduce_dtype=None`, as in FSDP2 since torch 2.15; a parameter that the policy leaves in its dtype computes in it."""

    def gradients(rank: int, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, **options))
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
        model(x).float().square().mean().backward()
        return [fsdp.full_tensor(p.grad) for p in model.parameters() if p.grad is not None]

    def is_exact_in_bf16(found: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, one.bfloat16().float()) for one in found)

    computed, shards, fp32 = (
        fsdp.simulate(2, lambda rank, given=given: gradients(rank, **given))[0]
        for given in ({}, {"reduce_in_shard_dtype": True}, {"reduce_dtype": torch.float32})
    )
    assert is_exact_in_bf16(computed) and not is_exact_in_bf16(shards)
    assert all(torch.equal(one, other) for one, other in zip(shards, fp32, strict=True))


def test_a_function_chooses_the_dtype_of_each_parameter() -> None:
    class Shows(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add((self.weight.dtype, self.bias.dtype))
            return nn.functional.linear(x, self.weight, self.bias.to(x.dtype))

    @dataclasses.dataclass(frozen=True)
    class Policy:
        """FSDP2's, as torch 2.15 has it."""

        param_dtype: torch.dtype = torch.bfloat16
        reduce_dtype: torch.dtype | None = None
        output_dtype: torch.dtype | None = None
        cast_forward_inputs: bool = True
        param_dtype_override_fn: Any = lambda p: torch.float32 if p.ndim == 1 else None

    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def program(policy: Any) -> None:
        model = fsdp.fully_shard(nn.Sequential(Shows(8, 8), Shows(8, 8)), auto_wrap_policy={Shows}, mp_policy=policy)
        model(torch.randn(2, 8)).float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())

    fsdp.simulate(2, lambda rank: program(Policy()))
    assert seen == {(torch.bfloat16, torch.float32)}

    third = Policy(param_dtype_override_fn=lambda p: torch.float16)
    refused_everywhere(2, lambda rank: program(third), "param_dtype_override_fn gives torch.float16 for '0.weight'")

    def differs(rank: int) -> None:
        with pytest.raises(ShardingError, match=r"rank 0 has parameter '0.weight' .* which computes in it, but"):
            program(Policy(param_dtype_override_fn=lambda p: None if rank else torch.float32))

    fsdp.simulate(2, differs)


def test_finalize_backward_reduces_what_was_kept() -> None:
    def gradients(rank: int, finalizes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard.fully_shard(model[0])
        fully_shard.fully_shard(model)
        for step in range(2):
            model.zero_grad()
            model.set_manual_backward_finalization(finalizes)
            model.set_requires_gradient_sync(False)
            for number in range(3):
                if not finalizes:
                    model.set_requires_gradient_sync(number == 2)
                x = torch.randn(2, 4, generator=torch.Generator().manual_seed(6 * step + 3 * rank + number))
                model(x).square().mean().backward()
            model.set_requires_gradient_sync(True)
            if finalizes:
                handle = model.finalize_backward(async_op=step == 0)
                assert isinstance(handle, fully_shard.GradientReductionHandle) is (step == 0)
                if step == 0:
                    handle.wait()
                model.finalize_backward()  # nothing is left
        with pytest.raises(ShardingError, match="finalize_backward must be called on the root"):
            model[0].finalize_backward()
        return [fsdp.full_tensor(p.grad) for p in model.parameters() if p.grad is not None]

    one, other = (fsdp.simulate(2, lambda rank, how=how: gradients(rank, how)) for how in (True, False))
    assert len(one[0]) == 4
    assert all(torch.equal(found, wanted) for found, wanted in zip(one[0] + one[1], other[0] + other[1], strict=True))


@on_ranks(1)
def test_storage_that_shall_be_kept_is_refused(rank: int) -> None:
    model = fully_shard.fully_shard(nn.Linear(2, 2))
    model.set_keep_unsharded_storage(False)
    with pytest.raises(ShardingError, match="set_keep_unsharded_storage: "):
        model.set_keep_unsharded_storage(True)


@on_ranks(1)
def test_ddp_finalizes_after_the_backward(rank: int) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(2, 2))
    assert not model.require_manual_backward_finalization and not model.should_finalize_after_backward
    with pytest.raises(RuntimeError, match="set require_manual_backward_finalization to True first"):
        model.finalize_backward()
    model.require_manual_backward_finalization = True
    assert model.require_manual_backward_finalization and model.should_finalize_after_backward
    x = torch.ones(1, 2, requires_grad=True)
    handle = x.register_hook(lambda _: model.finalize_backward())
    with pytest.raises(ShardingError, match="finalize_backward"):
        model(x).sum().backward()
    handle.remove()
    model(x).sum().backward()
    model.finalize_backward()
    assert model.module.weight.grad is not None
