"""fsdp.compat.torch_fsdp: it trains as plain torch does, and its names, arguments and formats are FSDP1's."""

import copy
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.compat import torch_fsdp
from fsdp.compat.torch_fsdp import (
    CPUOffload,
    CustomPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    enable_wrap,
    wrap,
)
from tests.support.described_torch import describes_this_torch
from tests.support.ranks import on_ranks

STEPS = 3
PAGE = Path(__file__).parents[3] / "docs" / "migration" / "from-fsdp1.md"
FSDP = FullyShardedDataParallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x)) * self.scale.to(x.dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def old_script(names: Any, rank: int, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a user wrote for torch's FSDP1: `names` is the module that it imports from."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    model = names.FullyShardedDataParallel(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    assert model.sharding_strategy is options.get("sharding_strategy", ShardingStrategy.FULL_SHARD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        losses.append(loss.detach())
    with names.FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return torch.stack(losses), dict(model.state_dict())


def plain() -> dict[str, Tensor]:
    """The weights of a single process on the batches of two ranks."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch(step, rank)).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return dict(model.state_dict())


def wrapped(**options: Any) -> FullyShardedDataParallel:
    return FSDP(Net(), **{"auto_wrap_policy": ModuleWrapPolicy({Block}), **options})


def trained(**options: Any) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    model = wrapped(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("strategy", [None, "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_an_old_script_gives_the_weights_of_a_single_process(strategy: str | None) -> None:
    options: dict[str, Any] = {}
    if strategy is not None:
        options = {"use_orig_params": False, "device_id": None, "sharding_strategy": ShardingStrategy[strategy]}
    for _, weights in simulate(2, lambda rank: old_script(torch_fsdp, rank, **options)):
        torch.testing.assert_close(weights, plain())


@on_ranks(2)
def test_names_are_those_of_fsdp1_and_plain_inside_summon_full_params(rank: int) -> None:
    model = wrapped()
    sharded = dict(model.named_parameters())
    assert list(sharded)[:2] == ["_fsdp_wrapped_module.first.weight", "_fsdp_wrapped_module.first.bias"]
    assert "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.up.weight" in sharded
    with FSDP.summon_full_params(model):
        full = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert [name for name, _ in model.named_buffers()] == ["scale"]
    assert {name: p.shape for name, p in full.items()} == {name: p.shape for name, p in Net().named_parameters()}
    assert [*map(type, FSDP.fsdp_modules(model))] == [FSDP] * 3
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    assert isinstance(model.module, Net)


@on_ranks(2)
def test_rank0_only_shows_full_parameters_on_rank_0_alone(rank: int) -> None:
    model, numel = wrapped(), sum(p.numel() for p in Net().parameters())
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        shown = sum(p.numel() for p in model.parameters())
    assert shown < numel if rank else shown == numel


@on_ranks(2)
def test_with_grads_shows_full_gradients_and_keeps_changes_of_them(rank: int) -> None:
    model, alone = wrapped(use_orig_params=True), Net()
    model(batch(0, rank)).sum().backward()
    (sum(alone(batch(0, one)).sum() for one in range(2)) / 2).backward()
    for factor in (1, 2):
        with FSDP.summon_full_params(model, with_grads=True):
            torch.testing.assert_close(model.first.weight.grad, factor * alone.first.weight.grad)
            model.first.weight.grad.mul_(2)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, with_grads=True):
        if rank == 0:
            torch.testing.assert_close(model.first.weight.grad, 4 * alone.first.weight.grad)


@on_ranks(2)
def test_full_states_have_plain_names_and_load(rank: int) -> None:
    model, optimizer = trained()
    state, optimizer_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    other = wrapped()
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, optimizer_state))
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(before, after)
        for key, value in optimizer.state[before].items():
            assert torch.equal(value, other_optimizer.state[after][key])
    assert other_optimizer.param_groups[0]["lr"] == 0.05
    assert set(state) == set(Net().state_dict())
    assert set(optimizer_state["state"]) == {name for name, _ in Net().named_parameters()}


@on_ranks(2)
def test_a_module_in_two_places_has_its_values_under_both_names(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(shared := nn.Linear(6, 6), nn.Tanh(), shared)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
        model.load_state_dict({name: Unread(value=value + 1) for name, value in plain.state_dict().items()})
        torch.testing.assert_close(model.state_dict(), {name: value + 1 for name, value in plain.state_dict().items()})


class Unread(SimpleNamespace):
    """A tensor that is read from a file when torch uses it, as Lightning's checkpoints have them."""

    __torch_function__ = classmethod(lambda cls, func, types, args, kwargs=None: func(*(one.value for one in args)))


@on_ranks(2)
def test_rank0_only_states_are_empty_on_other_ranks_and_scatter(rank: int) -> None:
    model, optimizer = trained()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        state = model.state_dict()
    assert FSDP.get_state_dict_type(model).state_dict_config == FullStateDictConfig()
    full = FSDP.full_optim_state_dict(model, optimizer)
    assert (len(state), len(full)) == ((len(Net().state_dict()), 2) if rank == 0 else (0, 0))


@on_ranks(2)
def test_a_value_of_another_shape_is_refused_by_name(rank: int) -> None:
    model = wrapped()
    state = model.state_dict()
    # the shape of this rank's part, which would fit the memory
    state["first.weight"] = torch.zeros(dict(model.named_parameters())["_fsdp_wrapped_module.first.weight"].shape)
    with pytest.raises(RuntimeError, match=r"size mismatch for first.weight: the state dict has .*, the model has \(3, 3\)"):
        model.load_state_dict(state)


@on_ranks(2)
def test_no_sync_is_for_the_outermost_instance(rank: int) -> None:
    model = wrapped()
    with pytest.raises(RuntimeError, match="no_sync: this instance is inside another one"), model.blocks[0].no_sync():
        pass
    with model.no_sync():
        model(batch(0, rank)).sum().backward()
    model(batch(0, rank)).sum().backward()
    twice = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(batch(0, rank)).sum().backward()
    for double, p in zip(twice, model.parameters(), strict=True):
        assert (double is None) == (p.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(double, 2 * p.grad)


@on_ranks(2)
def test_clipping_counts_instances_over_other_ranks_and_ignored_parameters_once(rank: int) -> None:
    net, alone = Net(), Net()
    net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=ShardingStrategy.NO_SHARD)
    model = FSDP(net, ignored_modules=[net.blocks[1]])
    for one in (model, alone):
        one(batch(0, 0)).sum().backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5))


@on_ranks(2)
def test_buffers_are_cast_in_the_forward_and_saved_as_they_were(rank: int) -> None:
    model = wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float64))
    model(batch(0, rank)).float().sum().backward()
    assert (model.scale.dtype, model.state_dict()["scale"].dtype) == (torch.float64, torch.float32)


@on_ranks(2)
def test_a_policy_may_give_options_to_one_module(rank: int) -> None:
    policy = CustomPolicy(lambda one: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(one, Block) else False)
    found = [one.sharding_strategy for one in FSDP.fsdp_modules(wrapped(auto_wrap_policy=policy))]
    assert found == [ShardingStrategy.FULL_SHARD, *[ShardingStrategy.SHARD_GRAD_OP] * 2]


@on_ranks(1)  # torch's context is that of the process, which all simulated ranks share
def test_wrap_makes_instances_inside_enable_wrap(rank: int) -> None:
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.NO_SHARD):
        model = wrap(nn.Sequential(wrap(nn.Linear(3, 3)), nn.Linear(3, 3)))
    model(batch(0, rank)).sum().backward()
    assert [type(one) for one in FSDP.fsdp_modules(model)] == [FSDP, FSDP]


@on_ranks(2)
def test_a_communication_hook_gets_the_gradient_and_the_place_of_its_part(rank: int) -> None:
    def hook(seen: list[int], gradient: Tensor, result: Tensor) -> None:
        seen.append(gradient.numel() // result.numel())
        result.fill_(7)

    model, seen = wrapped(), list[int]()
    model.register_comm_hook(seen, hook)
    model(batch(0, rank)).sum().backward()
    assert seen == [2, 2, 2]
    assert all(bool((p.grad == 7).all()) for p in model.parameters() if p.grad is not None)
    with pytest.raises(AssertionError, match=r"^A communication hook is already registered$"):
        model.register_comm_hook(seen, hook)


@on_ranks(2)
def test_a_communication_hook_gets_what_the_strategy_of_each_instance_needs(rank: int) -> None:
    def hook(seen: list[tuple[int, ...]], *tensors: Tensor) -> None:
        seen.append(tuple(one.numel() for one in tensors))

    for replicated in (0, 1):
        strategies = {replicated: ShardingStrategy.NO_SHARD}
        inner = FSDP(nn.Linear(3, 3), sharding_strategy=strategies.get(0))
        model = FSDP(nn.Sequential(inner, nn.Linear(3, 4)), sharding_strategy=strategies.get(1))
        seen: list[tuple[int, ...]] = []
        model.register_comm_hook(seen, hook)
        model(batch(0, rank)).sum().backward()
        assert [len(one) for one in seen] == [2, 1] if replicated == 0 else [1, 2]


@on_ranks(2)
def test_a_number_is_the_host_and_offload_changes_nothing_where_there_is_no_accelerator(rank: int) -> None:
    model = wrapped(device_id=0, cpu_offload=CPUOffload(offload_params=True))
    assert model.compute_device == torch.device("cpu")
    model(batch(0, rank)).sum().backward()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both groups": ({"process_group": object(), "device_mesh": object()}, ValueError, "process_group and device_mesh contradict"),
    "both kinds of ignored": ({"ignored_modules": [], "ignored_states": []}, ValueError, "Cannot pass both ignored_modules and"),
    "no module": ({"ignored_modules": [3]}, ValueError, r"elements but got types \[<class 'int'>\]"),
    "no state": ({"ignored_states": [3]}, ValueError, "ignored_states expects all nn.Parameter or all nn.Module list"),
    "no function": ({"param_init_fn": 3}, ValueError, "Expected param_init_fn to be callable, not 3"),
    "a hybrid by hand": (
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "auto_wrap_policy": None},
        ValueError,
        "requires explicit specification of process group or device_mesh",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_arguments_are_refused_by_name(rank: int, case: str) -> None:
    options, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        wrapped(**options)


def test_trainable_and_frozen_parameters_need_original_parameters() -> None:
    def fn(rank: int, use_orig_params: bool) -> None:
        net = Net()
        net.first.bias.requires_grad = False
        FSDP(net, use_orig_params=use_orig_params)

    simulate(2, partial(fn, use_orig_params=True))
    with pytest.raises(ValueError, match="Net has both parameters with requires_grad=True and False"):
        simulate(2, partial(fn, use_orig_params=False))


@describes_this_torch
def test_the_signatures_are_those_of_torch() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer

    for name in METHODS:
        theirs, mine = (inspect.signature(getattr(cls, name)) for cls in (Peer, FSDP))
        assert list(mine.parameters) == list(theirs.parameters), name
        assert [p.default for p in mine.parameters.values()] == [p.default for p in theirs.parameters.values()], name


def _public(cls: type) -> list[str]:
    return ["__init__", *(name for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name)))]


METHODS = _public(torch.distributed.fsdp.FullyShardedDataParallel)


@describes_this_torch
def test_the_page_has_every_name_and_every_argument_of_torch() -> None:
    peer = torch.distributed.fsdp
    text = PAGE.read_text(encoding="utf-8").partition("### Every name")[2].partition("## The code")[0]
    of_fsdp2 = {"CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "fully_shard", "MixedPrecisionPolicy", "OffloadPolicy"}
    of_fsdp2 |= {"register_fsdp_forward_method", "UnshardHandle", "GradientReductionHandle", "share_comm_ctx"}
    names = {*peer.__all__, *torch_fsdp.__all__} - of_fsdp2
    assert not [name for name in sorted(names) if f"`{name}`" not in text or not hasattr(torch_fsdp, name)]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    for method in METHODS:
        row = 0 if method == "__init__" else next(i for i, one in enumerate(rows) if f"`{method}`" in one[1])
        said = "".join("".join(one) for one in rows) if method == "__init__" else "".join(rows[row] + _continued(rows, row))
        for argument in inspect.signature(getattr(peer.FullyShardedDataParallel, method)).parameters:
            assert argument == "self" or f"`{argument}`" in said, (method, argument)


def _continued(rows: list[list[str]], row: int) -> list[str]:
    """The cells of the rows that go on with the method of `row`."""
    found: list[str] = []
    for one in rows[row + 1 :]:
        if one[1].strip():
            break
        found += one
    return found


@on_ranks(2)
def test_what_accelerate_does_in_mixed_precision_makes_float32_parameters_of_lower_ones(rank: int) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(Net().bfloat16(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=policy, use_orig_params=True)
    before = model.state_dict()
    for module in FSDP.fsdp_modules(model):
        found = module._flat_param
        assert module._has_params and found is not None and found.requires_grad and found.device.type == "cpu"
        assert found.dtype is torch.bfloat16 and len(found._fqns) == len(module.params)
        found.data = found.data.to(torch.float32)
        module._handle._orig_param_dtype = torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name].float()) if name != "scale" else value.dtype is torch.bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loss = model(batch(0, rank)).float().square().mean()
    loss.backward()
    optimizer.step()
    flat = model._flat_param
    flat.data = torch.ones_like(flat.data)
    with FSDP.summon_full_params(model):
        assert all(bool((p == 1).all()) for p in model.first.parameters())
    with pytest.raises(ValueError, match=r"_flat_param.data: \(1,\) elements for"):
        flat.data = torch.ones(1)


@on_ranks(2)
def test_an_optimizer_of_matrices_is_refused_where_a_part_is_an_ordinary_tensor(rank: int) -> None:
    """torch's refuses it as well, because its parts are vectors."""
    model = FSDP(nn.Linear(4, 4, bias=False), device_id="cpu")
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(fsdp.ShardingError, match=r"Muon.step: a parameter of unit '.*' is this rank's rows, an ordinary tensor"):
        optimizer.step()
