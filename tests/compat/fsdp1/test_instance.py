"""What an instance does after its constructor: other dtypes, full precision in evaluation, gathers ahead, the flat view."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._runtime_utils import _reshard

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.compat.torch_fsdp import CPUOffload, FlatParameter, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from state_machine import ResidencyState
from tests.compat.fsdp1.test_torch_fsdp import Block, Net, batch, wrapped
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    ("strategy", "precision", "within"),
    [
        *((strategy, None, 1e-6) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")),
        ("FULL_SHARD", MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 2e-2),
    ],
)
@on_ranks(2)
def test_a_wrapped_model_may_become_double_and_trains_like_a_plain_one(
    rank: int, strategy: str, precision: MixedPrecision | None, within: float
) -> None:
    model, plain = wrapped(sharding_strategy=ShardingStrategy[strategy], mixed_precision=precision), Net()
    objects, dtype = [*model.parameters()], torch.float32
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, plain)]
    for step in range(4):
        if step == 1:
            assert model.double() is model
            assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
            plain, dtype = plain.double(), torch.float64
            for kept in (kept for optimizer in optimizers for kept in optimizer.state.values()):
                kept["momentum_buffer"] = kept["momentum_buffer"].double()
        model(batch(step, rank).to(dtype)).square().mean().backward()
        for other in range(2):
            (plain(batch(step, other).to(dtype)).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float64
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=within, atol=within)
    assert model.half().state_dict()["scale"].dtype is torch.float16
    assert [*model.state_dict()] == [*plain.state_dict()], "a conversion brings back the engine's state dicts"


@on_ranks(2)
def test_one_instance_of_a_model_may_be_converted_and_a_model_around_instances(rank: int) -> None:
    model = wrapped()
    model.blocks[1].double()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "blocks.1" in name} == {torch.float64}
    assert {dtype for name, dtype in dtypes.items() if "blocks.1" not in name} == {torch.float32}
    around = nn.Sequential(FSDP(nn.Linear(3, 3)), nn.Linear(3, 3)).double()
    around(batch(0, rank).double()).sum().backward()


@pytest.mark.parametrize(
    ("strategy", "dtype"), [("FULL_SHARD", torch.bfloat16), ("SHARD_GRAD_OP", torch.bfloat16), ("NO_SHARD", torch.float16)]
)
@on_ranks(2)
def test_low_precision_gradients_are_kept_and_added_to(rank: int, strategy: str, dtype: torch.dtype) -> None:
    """Those of a copy too, those of a parameter that is thawed later, and those that summon_full_params shows."""

    def trained(keeps: bool) -> FSDP:
        net = Net()
        net.first.weight.requires_grad = False
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16, keep_low_precision_grads=keeps)
        model = FSDP(net, sharding_strategy=ShardingStrategy[strategy], mixed_precision=policy, use_orig_params=True)
        model = copy.deepcopy(model)
        model.first.weight.requires_grad = True
        model(batch(0, rank)).float().square().mean().backward()
        return model

    kept, plain = trained(keeps=True), trained(keeps=False)
    grads = [p.grad for p in kept.parameters() if p.grad is not None]
    assert grads and all(grad.dtype is dtype for grad in grads)
    torch.testing.assert_close(grads, [p.grad.to(dtype) for p in plain.parameters() if p.grad is not None])
    for model in (kept, plain):
        with FSDP.summon_full_params(model, with_grads=True):
            assert all(p.grad is not None for p in model.parameters())
        model(batch(0, rank)).float().square().mean().backward()
    torch.testing.assert_close(kept.clip_grad_norm_(1.0).float(), plain.clip_grad_norm_(1.0), rtol=0.01, atol=0.0)
    torch.optim.SGD(kept.parameters(), lr=0.1).step()


def test_evaluations_leave_mixed_precision_out_if_the_variable_of_fsdp1_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[tuple[torch.dtype, torch.dtype, torch.dtype]]] = {}

    def fn(rank: int, full: bool) -> None:
        policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = wrapped(mixed_precision=policy)
        found: list[torch.Tensor] = []
        model.first.register_forward_hook(lambda module, args, output: found.append(output.detach()))
        kinds = []
        for training in (True, False, True):
            model.train(training)
            output = model(batch(0, rank))
            output.float().sum().backward()
            kinds.append((found[-1].dtype, model.scale.dtype, output.dtype))
        seen[rank] = kinds
        assert bool((model.state_dict()["scale"] == 1).all()) and model.state_dict()["scale"].dtype is torch.float32

    low, high = (torch.bfloat16,) * 3, (torch.float32,) * 3
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    simulate(2, lambda rank: fn(rank, True))
    assert seen == {rank: [low, high, low] for rank in range(2)}
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "0")
    simulate(2, lambda rank: fn(rank, False))
    assert seen == {rank: [low, low, low] for rank in range(2)}


@on_ranks(2)
def test_an_instance_is_gathered_ahead_of_its_forward(rank: int) -> None:
    model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), backward_prefetch=None)
    model(batch(0, rank)).sum().backward()
    block = model.blocks[0]
    handle = block._unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert block.module.up.weight.shape == (5, 3)
    assert block._unshard() is None
    model._wait_unshard_streams_on_current_stream()
    model(batch(1, rank)).sum().backward()
    assert FSDP(nn.Sequential(nn.ReLU()))._unshard() is None


def test_the_flat_view_has_the_values_and_gradients_of_this_rank_end_to_end() -> None:
    def fn(rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        model = wrapped()
        handle = model.blocks[0]._handle
        assert handle is not None and handle.uses_sharded_strategy
        flat = handle.flat_param
        assert flat.grad is None and handle.sharded_grad is None
        model(batch(0, rank)).sum().backward()
        assert flat.numel() == sum(p.numel() for p in model.blocks[0].params) == flat.shape[0]
        with FSDP.summon_full_params(model):
            assert flat.numel() == sum(p.numel() for p in Block().parameters())
        assert FSDP(nn.Sequential(nn.ReLU()))._handle is None
        assert FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)._handle.uses_sharded_strategy is False
        return flat.data, flat.grad

    torch.manual_seed(0)
    parts = simulate(2, fn)
    plain = Net()
    (sum(plain(batch(0, rank)).sum() for rank in range(2)) / 2).backward()
    for index, of in ((0, lambda p: p.detach()), (1, lambda p: p.grad)):
        found = torch.cat([part[index] for part in parts if part[index] is not None]).sort().values
        wanted = torch.cat([of(p).reshape(-1) for p in plain.blocks[0].parameters()]).sort().values
        torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_full_parameters_are_refused_in_a_forward_and_inside_each_other(rank: int) -> None:
    model = wrapped()

    def summon(*_: object) -> None:
        with FSDP.summon_full_params(model):
            pass

    handle = model.first.register_forward_pre_hook(summon)
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
        model(batch(0, rank))
    handle.remove()
    out = model(batch(0, rank))
    out.register_hook(summon)
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
        out.sum().backward()
    with (
        FSDP.summon_full_params(model),
        pytest.raises(AssertionError, match="Cannot manually unshard parameters when already unsharding parameters"),
    ):
        summon()
    with pytest.raises(NotImplementedError, match="is not supported"), FSDP.summon_full_params(model, rank0_only=True):
        pass
    with pytest.raises(ValueError, match="is expected to be in states IDLE but"), FSDP.summon_full_params(model):
        model.apply(lambda module: None)


@on_ranks(2)
def test_a_factor_of_fsdp1_that_is_not_followed_is_refused(rank: int) -> None:
    model = wrapped()
    for name in ("_gradient_predivide_factor", "_gradient_postdivide_factor"):
        with pytest.raises(
            fsdp.ShardingError, match=r"was set to 4.0, and gradients are averaged over its ranks: scale the loss"
        ):
            setattr(model, name, 4.0)
        assert not hasattr(model, name)


def test_warnings_and_errors_have_the_words_that_users_of_fsdp1_match() -> None:
    def fn(rank: int) -> None:
        model = wrapped()
        with pytest.warns(UserWarning, match="The passed-in `module` is on CPU"):
            FSDP(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
            model.blocks[0].clip_grad_norm_(1.0)
        with pytest.raises(AssertionError, match=r"^register_comm_hook can only be called on a root instance.$"):
            model.blocks[0].register_comm_hook(None, print)
        with pytest.raises(ValueError, match=r"modules to not already have FSDP applied but found blocks.0 in Net"):
            FSDP(model.module, auto_wrap_policy=ModuleWrapPolicy({Block}))

    simulate(2, fn)
    with pytest.warns(
        UserWarning, match="switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the world size"
    ):
        simulate(1, lambda rank: wrapped())
    with pytest.warns(UserWarning, match="on rank 0 with no gradients -- returning the total norm in the default dtype"):
        simulate(1, lambda rank: wrapped().clip_grad_norm_(1.0))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks("size")
def test_what_is_written_into_summoned_copies_of_offloaded_parameters_is_dropped_without_writeback(
    rank: int, strategy: str, size: int
) -> None:
    for offloads in (False, True):
        # a rank that holds all of it, in the memory where it computes, is changed in place
        in_place = not offloads and (size == 1 or strategy == "NO_SHARD")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
            options: Any = {"sharding_strategy": ShardingStrategy[strategy], "cpu_offload": CPUOffload(offloads)}
            model = FSDP(nn.Linear(3, 2), use_orig_params=True, **options)
        for writeback in (False, True):
            with torch.no_grad(), FSDP.summon_full_params(model, writeback=writeback):
                model.module.bias.fill_(7.0)
            kept = bool((model.state_dict()["bias"] == 7).all())
            assert kept is (writeback or in_place), (strategy, size, offloads, writeback)


@on_ranks(2)
def test_params_are_vectors_over_the_parameters_with_names_and_ranges(rank: int) -> None:
    model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    model(batch(0, rank)).sum().backward()
    block = model.module.blocks[0]
    assert [part._fqns for part in block.params] == [("up.weight",), ("up.bias",), ("down.weight",), ("down.bias",)]
    full = model.state_dict()
    for part, parameter in zip(block.params, block.parameters(), strict=True):
        (name,), (shape,), (info,) = part._fqns, part._shapes, part._shard_param_infos
        assert isinstance(part, FlatParameter) and part.dim() == 1 and part.numel() == parameter.numel()
        assert shape == full[f"blocks.0.{name}"].shape
        assert info.in_shard == bool(part.numel())
        if info.in_shard:
            there = full[f"blocks.0.{name}"].flatten()[info.intra_param_start_idx : info.intra_param_end_idx + 1]
            torch.testing.assert_close(part[: info.numel_in_shard], there)
        if parameter.grad is None:  # it is frozen, or all of it is elsewhere
            assert part.grad is None
            continue
        assert torch.equal(part.grad, parameter.grad.reshape(-1))
        part.grad = torch.ones_like(part)
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
        part.grad = None
        assert parameter.grad is None
    with torch.no_grad():
        torch._foreach_mul_(block.params, 0.0)
        torch._foreach_add_(block.params, 0.25)
    found = torch.cat([value.flatten() for name, value in model.state_dict().items() if name.startswith("blocks.0")])
    assert bool((found == 0.25).all())


@on_ranks(2)
def test_an_instance_is_resharded_by_its_handle(rank: int) -> None:
    model = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
    model(torch.ones(1, 4))
    ref = model._unit_ref
    assert ref is not None and model._handle is not None
    _reshard(model, model._handle, False)
    assert ref.engine.snapshot().units[0].residency is not ResidencyState.SHARDED
    _reshard(model, model._handle, True)
    assert ref.engine.snapshot().units[0].residency is ResidencyState.SHARDED
    model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_a_frozen_module_that_was_replaced_is_saved_and_loaded_as_it_is(rank: int) -> None:
    inner = FSDP(nn.Linear(4, 4), use_orig_params=True)
    model = FSDP(nn.Sequential(nn.Linear(4, 4), inner), use_orig_params=True)
    model.module[0] = nn.Linear(4, 4).requires_grad_(False)
    with torch.no_grad():
        model.module[0].weight.fill_(3.0)
    model(torch.ones(2, 4)).sum().backward()
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"] and bool((state["0.weight"] == 3).all())
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    assert bool((model.module[0].weight == 4).all())
    torch.testing.assert_close(model.state_dict()["1.weight"], state["1.weight"] + 1)
