"""fsdp.compat.fairscale: it trains as plain torch does, and its names, shapes and formats are fairscale's."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.compat import fairscale
from fsdp.compat.fairscale import FullyShardedDataParallel, TrainingState, checkpoint_wrapper, get_fsdp_instances
from tests.support.everything import some
from tests.support.jobs import run_alone
from tests.support.ranks import on_ranks

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Net(nn.Module):
    """Three units if it is wrapped. The last layer has the first one's weight."""

    def __init__(self, wrap: Any = lambda module: module, ties: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        around = checkpoint_wrapper if checkpoints else lambda module: module
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([wrap(around(Block())), around(wrap(Block()))])
        self.last = nn.Linear(3, 3)
        if ties:
            self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, ranks: Any, optimizer: torch.optim.Optimizer, scale: float) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(step, rank)).square().sum() * scale).backward()
        optimizer.step()


def plain(world_size: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, range(world_size), optimizer, 1 / world_size)
    return model, optimizer


def wrapped(ties: bool = False, checkpoints: bool = False, **config: Any) -> FullyShardedDataParallel:
    wrap = partial(FullyShardedDataParallel, **config)
    return FullyShardedDataParallel(Net(wrap, ties, checkpoints), **config)


CONFIGS: dict[str, dict[str, Any]] = {
    "flat": {},
    "not flat": {"flatten_parameters": False},
    "kept after the forward": {"reshard_after_forward": False},
    "the root too": {"disable_reshard_on_root": False, "bucket_cap_mb": 0},
    "tied": {"ties": True},
    "tied, not flat": {"ties": True, "flatten_parameters": False},
    "checkpoints": {"checkpoints": True},
    "checkpoints, not flat": {"checkpoints": True, "flatten_parameters": False},
}


def steps_like(model: nn.Module, expected: nn.Module, rank: int, world_size: int = 2, kind: Any = torch.optim.Adam) -> None:
    """Train one rank, and a plain model on the batches of all ranks, to the same state."""
    train(model, [rank], kind(model.parameters(), lr=0.05), 1)
    train(expected, range(world_size), kind(expected.parameters(), lr=0.05), 1 / world_size)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("world_size", [2, *some(1, 3)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@on_ranks("world_size")
def test_it_trains_as_the_plain_model_does(rank: int, config: dict[str, Any], world_size: int) -> None:
    options = {name: config[name] for name in ("ties", "checkpoints") if name in config}
    model, expected = wrapped(**config), Net(**options)
    steps_like(model, expected, rank, world_size)
    model.assert_state(TrainingState.IDLE)
    assert list(model.state_dict()) == list(expected.state_dict())


AROUND: dict[str, Any] = {
    "an instance": partial(wrapped),
    "an instance that is not flat": partial(wrapped, flatten_parameters=False),
    "a model with a frozen layer": lambda: Net(partial(FullyShardedDataParallel, flatten_parameters=False)),
}


@pytest.mark.parametrize("inside", AROUND)
@on_ranks(2)
def test_what_is_inside_may_be_an_instance_or_partly_frozen(rank: int, inside: str) -> None:
    freezes, model, expected = "frozen" in inside, AROUND[inside](), Net()
    for one in (model, expected):
        one.get_submodule("first").requires_grad_(not freezes)
    steps_like(FullyShardedDataParallel(model, flatten_parameters=not freezes), expected, rank)


@on_ranks(2)
def test_names_and_shapes_are_fairscales(rank: int) -> None:
    """12 and 53 elements over 2 ranks; without flat parameters each one is cut by itself."""
    model = wrapped()
    flat, apart = ({n: tuple(p.shape) for n, p in one.named_parameters()} for one in (model, wrapped(flatten_parameters=False)))
    with model.summon_full_params():
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    block = "_fsdp_wrapped_module._fpw_module.blocks"
    assert flat == {
        "_fsdp_wrapped_module.flat_param_0": (12,),
        f"{block}.0._fsdp_wrapped_module.flat_param_0": (24,),
        f"{block}.1._fsdp_wrapped_module.flat_param_0": (24,),
    }
    assert list(apart) == [name for name, _ in Net().named_parameters()]
    assert apart["first.weight"] == (5,) and apart["first.bias"] == (2,)


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks(2)
def test_an_evaluation_works_where_full_parameters_are_summoned(rank: int, flatten: bool) -> None:
    model, plain = wrapped(flatten_parameters=flatten), Net()
    with model.summon_full_params(), torch.no_grad():
        for p in (*model.parameters(), *plain.parameters()):
            p.add_(1)
        x = torch.ones(2, 3)
        torch.testing.assert_close(model(x), plain(x))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(x[:, :1])
    steps_like(model, plain, rank)


def test_the_state_of_each_rank_loads_again_and_is_put_together_offline() -> None:
    def one_rank(rank: int, **config: Any) -> tuple[Any, Any, Any]:
        model = wrapped(**config)
        train(model, [rank], torch.optim.SGD(model.parameters(), lr=0.05), 1)
        local = {name: value.clone() for name, value in model.local_state_dict().items()}
        full = dict(model.state_dict())
        train(model, [rank], torch.optim.SGD(model.parameters(), lr=0.05), 1)
        model.load_local_state_dict(local)
        for name, value in model.state_dict().items():
            assert torch.equal(value, full[name])
        return local, model.local_metadata_dict(), full

    for config in ({}, {"flatten_parameters": False}, {"ties": True}):
        states, metadata, full = zip(*simulate(2, partial(one_rank, **config)), strict=True)
        together = FullyShardedDataParallel.consolidate_shard_weights(list(states), list(metadata))
        assert set(together) == set(full[0])
        assert all(torch.equal(together[name], value) for name, value in full[0].items())
        assert "flat_param_0" in states[0] or config.get("flatten_parameters") is False


def test_missing_shards_are_refused_or_left_out() -> None:
    states, metadata = zip(*simulate(2, lambda rank: ((m := wrapped()).local_state_dict(), m.local_metadata_dict())), strict=True)
    cut = [{name: value for name, value in state.items() if name != "flat_param_0"} for state in states]
    together = FullyShardedDataParallel.consolidate_shard_weights(cut, list(metadata), with_module_buffers=False, strict=False)
    assert together and all(name.startswith("blocks.") for name in together)
    with pytest.raises(KeyError):
        FullyShardedDataParallel.consolidate_shard_weights(cut, list(metadata))
    with pytest.raises(ValueError, match="got 2 state dicts and 1 metadata; give both of every rank"):
        FullyShardedDataParallel.consolidate_shard_weights(cut, [metadata[0]])


def test_names_that_the_wrapped_module_itself_has_for_one_parameter_are_plain_offline() -> None:
    class Tied(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.same = self.weight

    def one_rank(rank: int) -> Any:
        model = FullyShardedDataParallel(Tied())
        return model.local_state_dict(), model.local_metadata_dict()

    states, metadata = zip(*simulate(2, one_rank), strict=True)
    together = FullyShardedDataParallel.consolidate_shard_weights(list(states), list(metadata))
    assert together.keys() == {"weight", "same", "bias"}


@pytest.mark.parametrize("ties", [False, True])
def test_optimizer_state_is_gathered_by_plain_parameter_and_cut_again(ties: bool) -> None:
    expected = plain(2, ties=ties)[1].state_dict()

    def one_rank(rank: int) -> Any:
        model = wrapped(ties=ties)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        train(model, [rank], optimizer, 1)
        full = model.gather_full_optim_state_dict(optimizer, recipient_rank=0)
        assert (full is None) == (rank > 0)
        if full is None:
            return None
        shard = model.get_shard_from_optim_state_dict(copy.deepcopy(full))
        mine = optimizer.state_dict()
        assert shard.keys() == mine.keys() and shard["param_groups"] == mine["param_groups"]
        for number, state in mine["state"].items():
            for name, value in state.items():
                assert torch.equal(shard["state"][number][name], value)
        return full

    full = simulate(2, one_rank)[0]
    # fairscale numbers parameters by instance, outer ones first
    by_shape = sorted(expected["state"].values(), key=lambda state: float(state["exp_avg"].sum()))
    gathered = sorted(full["state"].values(), key=lambda state: float(state["exp_avg"].sum()))
    for mine, plain_state in zip(gathered, by_shape, strict=True):
        torch.testing.assert_close(mine["exp_avg"], plain_state["exp_avg"])
        assert mine["step"] == STEPS
    assert full["uncollected_local_ids"] == []


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2, refuses="Wrap the module that contains both uses, and not each by itself")
def test_a_tie_that_would_be_lost_is_refused(rank: int, flat: bool) -> None:
    one, other = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    other.weight = one.weight
    FullyShardedDataParallel(one, flatten_parameters=flat)
    FullyShardedDataParallel(other, flatten_parameters=flat)


@on_ranks(2, refuses="makes a vector of 'weight', which is in a graph from before wrapping")
def test_a_graph_from_before_knows_the_shape(rank: int) -> None:
    layer = nn.Linear(3, 3)
    graph = layer(torch.ones(3))
    FullyShardedDataParallel(layer, flatten_parameters=False)
    graph.sum().backward()


@on_ranks(2)
def test_the_weight_of_another_instance_is_used_and_trained(rank: int) -> None:
    class Shared(nn.Module):
        def __init__(self, wrap: Any = None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight
            if wrap is not None:
                self.one, self.two = wrap(self.one), wrap(self.two)
                self.two.append_shared_param(self.one.module.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    model = FullyShardedDataParallel(Shared(partial(FullyShardedDataParallel, flatten_parameters=False)))
    assert model.module.two.module.weight.is_meta and model.module.two.module.weight.shape == (3, 3)
    steps_like(model, Shared(), rank, kind=torch.optim.SGD)
    state = model.state_dict()
    assert torch.equal(state["one.weight"], state["two.weight"])


class Alone:
    """A group of one rank, which needs no communication."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class NoGroup(Alone):
    """A group that cannot communicate."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def test_experts_differ_between_ranks_and_clipping_over_them_is_refused() -> None:
    def one_rank(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        shared = nn.Linear(3, 3)
        torch.manual_seed(rank)
        expert = FullyShardedDataParallel(nn.Linear(3, 3), Alone(), Alone())
        model = FullyShardedDataParallel(nn.Sequential(shared, expert))
        assert expert.no_broadcast_optim_state and not model.no_broadcast_optim_state
        train(model, [rank], torch.optim.SGD(model.parameters(), lr=0.05), 1)
        with pytest.raises(NotImplementedError, match="the instances have different process groups"):
            model.clip_grad_norm_(1.0)
        state = model.state_dict()
        return state["0.weight"], state["1.weight"]

    (shared_0, expert_0), (shared_1, expert_1) = simulate(2, one_rank)
    assert torch.equal(shared_0, shared_1) and not torch.equal(expert_0, expert_1)


@on_ranks(2)
def test_an_instance_is_pickled_and_trains_with_a_new_group(rank: int) -> None:
    model = wrapped()
    model(batch(0, rank)).sum().backward()
    again = pickle.loads(pickle.dumps(model))
    assert again.process_group == "MISSING"
    with pytest.raises(fsdp.ShardingError, match="made or unpickled without a process group that communicates"):
        again(batch(0, rank))
    for one in get_fsdp_instances(again):
        one.process_group = one.process_group_reduce_scatter = model.process_group
    steps_like(again, Net(), rank)


@on_ranks(2)
def test_an_instance_without_a_group_has_its_shard_and_trains_once_it_has_one(rank: int) -> None:
    group = NoGroup(rank)
    model = wrapped(process_group=group, process_group_reduce_scatter=group)
    assert sum(p.numel() for p in model.parameters()) == 12 + 24 + 24
    for one in get_fsdp_instances(model):
        one.process_group = fairscale.get_process_group_cached()
    steps_like(model, Net(), rank)


@on_ranks(2)
def test_mixed_precision_casts_inputs_of_the_root_to_fp16_and_buffers(rank: int) -> None:
    seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, self.weight.dtype, self.bias.dtype))
            return super().forward(x)

    model = FullyShardedDataParallel(nn.Sequential(Looks(3, 3)), mixed_precision=True, fp32_reduce_scatter=True)
    model.module.module.register_buffer("stats", torch.ones(3))
    model(torch.ones(2, 3)).float().sum().backward()
    (parameter,) = model.parameters()
    assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert model.stats.dtype is torch.float16
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert model.stats.dtype is torch.float16
    assert seen == [(torch.float16,) * 3]


@on_ranks(2)
def test_vectors_are_ordinary_tensors_of_this_rank(rank: int) -> None:
    model = FullyShardedDataParallel(Net())
    model(batch(0, rank)).sum().backward()
    vector = model.params[0]
    assert isinstance(vector, fairscale.FlatParameter) and type(vector.grad) is Tensor
    assert len(vector.detach().view(-1).tolist()) == vector.numel() == len(vector)
    torch.testing.assert_close(vector.detach().norm(), torch.tensor(vector.tolist()).norm())
    assert vector.numel() == -(-sum(p.numel() for p in Net().parameters()) // 2)


@on_ranks(2)
def test_units_have_plain_names_and_a_changed_dtype_is_refused(rank: int) -> None:
    model = wrapped()
    assert [name.split()[0] for name in fsdp.story(model).splitlines() if "blocks" in name] == ["blocks.0", "blocks.1"]
    model.half()
    with pytest.raises(fsdp.ShardingError, match="Convert or move the module before wrapping it"):
        model(batch(0, rank))


@on_ranks(2)
def test_inputs_that_are_cast_let_the_backward_pass(rank: int) -> None:
    model = FullyShardedDataParallel(nn.ReLU(), mixed_precision=True)
    x = torch.ones(2, requires_grad=True)
    model(x).float().sum().backward()
    assert x.grad is None


@on_ranks(2)
def test_outside_a_forward_a_flat_model_shows_shapes_without_memory(rank: int) -> None:
    model = FullyShardedDataParallel(nn.Linear(3, 5))
    for _ in range(2):
        assert model.module.weight.is_meta and model.module.weight.shape == (5, 3)
        assert "out_features=5, bias=True" in repr(model)
        model(torch.ones(1, 3)).sum().backward()
    with model.summon_full_params():
        assert not model.module.weight.is_meta
        model.module.weight.data.fill_(7)
    assert model.module.weight.is_meta
    assert (model.state_dict()["weight"] == 7).all()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(1)
def test_a_recompute_by_torchs_checkpoint_sees_the_parameters(rank: int, reentrant: bool) -> None:
    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    def trained(model: nn.Module) -> Tensor:
        for _ in range(2):
            model(torch.ones(1, 3, requires_grad=True)).square().sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    expected = trained(Recomputes())
    for flat in (True, False):
        torch.testing.assert_close(trained(FullyShardedDataParallel(Recomputes(), flatten_parameters=flat)), expected)


@on_ranks(2)
def test_an_lstm_trains(rank: int) -> None:
    def trained(**config: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.LSTM(3, 4, batch_first=True)
        model = FullyShardedDataParallel(model, **config) if config else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2, 3))[0].sum().backward()
            optimizer.step()
        return dict(model.state_dict())

    for flat in (True, False):
        torch.testing.assert_close(trained(flatten_parameters=flat), trained())


@on_ranks(2)
def test_a_predivide_factor_is_that_of_its_instance(rank: int) -> None:
    inner = FullyShardedDataParallel(nn.Linear(3, 3), gradient_predivide_factor=1.5)
    model = FullyShardedDataParallel(nn.Sequential(inner, FullyShardedDataParallel(nn.Linear(3, 3))))
    assert [one._unit_ref.unit.settings.divide_factors for one in get_fsdp_instances(model)] == [None, (1.5, 2 / 1.5), None]
    with pytest.raises(fsdp.ShardingError, match="gradient_predivide_factor: a factor must be a positive number, not -1"):
        FullyShardedDataParallel(nn.Linear(3, 3), gradient_predivide_factor=-1)


@on_ranks(2)
def test_divide_factors_of_all_instances(rank: int) -> None:
    model = wrapped()
    inner = get_fsdp_instances(model)[1]
    model.set_gradient_divide_factors(1.0, 1.0, True)
    model(batch(0, 0)).sum().backward()
    summed = [p.grad.clone() for p in model.parameters()]
    model.set_gradient_divide_factors(2.0, 4.0, True)
    inner.set_gradient_divide_factors(1.0, 2.0, False)
    assert (model.gradient_postdivide_factor, inner.gradient_postdivide_factor) == (4.0, 2.0)
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    of_inner = {id(p) for p in inner.parameters()}
    for parameter, total in zip(model.parameters(), summed, strict=True):
        torch.testing.assert_close(parameter.grad * (2 if id(parameter) in of_inner else 8), total)


@on_ranks(2)
def test_attributes_of_an_instance_have_an_effect_or_are_fixed(rank: int) -> None:
    model = wrapped()
    inner = get_fsdp_instances(model)[1]
    model(batch(0, 0)).sum().backward()
    before = [p.grad.clone() for p in inner.parameters()]
    inner.gradient_postdivide_factor = 8.0
    assert inner.gradient_predivide_factor == 2.0, "fairscale's default for two ranks"
    again = pickle.loads(pickle.dumps(inner))
    assert again.gradient_postdivide_factor == 8.0
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    for parameter, old in zip(inner.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad * 8, old)
    for name in ("fp32_reduce_scatter", "mixed_precision"):
        with pytest.raises(fsdp.ShardingError, match=f"{name} is fixed at wrapping: give {name}=True to FullySharded"):
            setattr(inner, name, True)
        setattr(inner, name, False)


@on_ranks(2)
def test_overflow_of_one_rank_lowers_the_scale_of_all(rank: int) -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fairscale.ShardedGradScaler()
    scaler.scale(model(batch(0, rank)).sum()).backward()
    if rank == 1:
        next(model.parameters()).grad.fill_(float("inf"))
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert float(scaler.get_scale()) == 2.0**15


@on_ranks(2)
def test_state_dicts_on_rank_0_only_and_of_inner_instances(rank: int) -> None:
    model = wrapped(state_dict_on_rank_0_only=True)
    assert bool(model.state_dict()) == (rank == 0)
    inner = get_fsdp_instances(model)[1]
    inner.state_dict_on_rank_0_only = False
    assert list(inner.state_dict()) == list(Block().state_dict())
    nested = nn.Sequential(inner).state_dict()
    assert list(nested) == [f"0.{name}" for name in Block().state_dict()]


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "fp32_reduce_scatter=True needs mixed_precision=True": (ValueError, {"fp32_reduce_scatter": True}),
    "a parameter is torch.float32; with mixed_precision=False and compute_dtype=torch.float16": (
        ValueError,
        {"compute_dtype": torch.float16},
    ),
    "move_params_to_cpu=True with move_grads_to_cpu=False: parameters and their gradients must be on one device": (
        fsdp.ShardingError,
        {"cpu_offload": True, "move_grads_to_cpu": False},
    ),
    "process_group_reduce_scatter must be a process group or a ProcessGroupName, not 3": (
        TypeError,
        {"process_group_reduce_scatter": 3},
    ),
}


@pytest.mark.parametrize(("text", "case"), REFUSED.items(), ids=lambda value: str(value)[:30])
@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, text: str, case: tuple[type[Exception], dict[str, Any]]) -> None:
    with pytest.raises(case[0], match=text):
        FullyShardedDataParallel(nn.Linear(2, 2), **case[1])


@pytest.mark.parametrize("flat", [True, False])
@on_ranks(2)
def test_a_module_that_is_refused_stays_what_it_was(rank: int, flat: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6 + rank), nn.LSTM(6 + rank, 3))
    before = {name: (p, p.detach().clone(), dict(p.__dict__)) for name, p in module.named_parameters()}
    with pytest.raises(fsdp.ShardingError, match="built differently on different ranks"):
        FullyShardedDataParallel(module, flatten_parameters=flat)
    assert list(before) == [name for name, _ in module.named_parameters()]
    for name, p in module.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1]) and p.__dict__ == before[name][2]
    module(torch.ones(2, 4))[0].sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("flat", [True, False])
@on_ranks(2)
def test_an_embedding_with_max_norm_is_refused(rank: int, flat: bool) -> None:
    with pytest.raises(fsdp.ShardingError, match=r"'weight': Embedding\(max_norm=1.0\)"):
        FullyShardedDataParallel(nn.Embedding(4, 2, max_norm=1.0), flatten_parameters=flat)


@on_ranks(2)
def test_calls_on_the_wrong_instance_or_at_the_wrong_time_are_refused(rank: int) -> None:
    model = wrapped(flatten_parameters=False)
    inner = get_fsdp_instances(model)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (inner.no_sync().__enter__, partial(inner.clip_grad_norm_, 1.0)):
        with pytest.raises(AssertionError, match="this instance is inside another one; call it on the outermost"):
            call()
    with pytest.raises(AssertionError, match="gather_full_optim_state_dict: this instance is inside another one"):
        inner.gather_full_optim_state_dict(optimizer)
    with pytest.raises(NotImplementedError, match="an instance with several parameters has flatten_parameters=False"):
        model.gather_full_optim_state_dict(optimizer)
    two = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    with pytest.raises(AssertionError, match="the optimizer has 16 parameter groups, and the format has one"):
        model.gather_full_optim_state_dict(two)
    with pytest.raises(AssertionError, match="the state is of 3 parameters, and this model has 16"):
        model.get_shard_from_optim_state_dict({"state": {}, "param_groups": [{"params": [0, 1, 2]}]})
    with pytest.raises(ValueError, match="this instance is in IDLE; here it may be in FORWARD, BACKWARD_PRE"):
        model.assert_state([TrainingState.FORWARD, TrainingState.BACKWARD_PRE])
    with pytest.raises(RuntimeError, match="the module was wrapped without allow_reset_parameters=True"):
        model.reset_parameters()
    with model.summon_full_params(), pytest.raises(ValueError, match="an instance is in SUMMON_FULL_PARAMS; call it outside"):
        model.local_state_dict()
    with pytest.raises(AssertionError, match="no module of this instance has this parameter; tie it before wrapping"):
        model.append_shared_param(nn.Parameter(torch.ones(1)))
    with pytest.raises(AssertionError, match="this instance needs at least one parameter of its own"):
        FullyShardedDataParallel(nn.ReLU()).append_shared_param(nn.Parameter(torch.ones(1)))


def test_without_torch_distributed_there_is_no_group() -> None:
    with pytest.raises(RuntimeError, match="is not initialised; call torch"):
        FullyShardedDataParallel(nn.Linear(2, 2))


@on_ranks(3)
def test_a_simulated_group_has_all_ranks_or_one(rank: int) -> None:
    assert [fairscale.get_process_group_cached(ranks=ranks).size() for ranks in (None, [rank], range(3))] == [3, 1, 3]
    with pytest.raises(fsdp.ShardingError, match=r"a group has all 3 ranks or this one alone, not \[0, 1\]"):
        fairscale.get_process_group_cached(ranks=[0, 1])


def test_nothing_imports_it_and_it_does_not_import_fairscale(tmp_path: Path) -> None:
    """In a fork of a process that has imported torch and fsdp alone."""
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys, fsdp; assert not any(n.startswith('fsdp.compat') for n in sys.modules); "
        "import fsdp.compat.fairscale as f; assert 'fairscale' not in sys.modules; "
        "assert f.__all__ == sorted(f.__all__) and all(hasattr(f, n) for n in f.__all__)"
    )
    ended = run_alone(script, cwd=tmp_path)
    assert ended.status == 0, ended.errors
