"""Optimizer states of FSDP1's door: from one world into another, of groups, tied and frozen parameters, and of some parameters.

The oracle is a single process that trains on without a break. Every rank gets the same batches, so the number of ranks does not
matter.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from fsdp.compat.torch_fsdp import ModuleWrapPolicy, OptimStateKeyType, StateDictType
from tests.compat.fsdp1.test_torch_fsdp import Block, batch
from tests.support.everything import some
from tests.support.optimizers import assert_same
from tests.support.ranks import on_ranks

Optimizer = torch.optim.Optimizer
Make = Callable[[nn.Module], Optimizer]


class Tied(nn.Module):
    """Two layers of the root share a weight, one of a block is frozen, and a scale has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.Sequential(Block(), Block())
        self.blocks[0].up.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x))) * self.gain


def in_groups(model: nn.Module) -> Optimizer:
    """Groups of different options, in an order that is not the model's."""
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for p in model.parameters() if p.requires_grad]
    blocks, rest = ([p for p in params if ("blocks" in names[id(p)]) is inside] for inside in (True, False))
    return torch.optim.AdamW(
        [{"params": rest[::-1], "weight_decay": 0.0, "lr": 0.02}, {"params": blocks, "betas": (0.8, 0.9), "weight_decay": 0.3}],
        lr=0.05,
    )


def of_one_block(model: nn.Module) -> Optimizer:
    return torch.optim.Adam([p for name, p in model.named_parameters() if "blocks.1" in name], lr=0.05, amsgrad=True)


OPTIMIZERS: dict[str, Make] = {
    "groups": in_groups,
    "some": of_one_block,
    "frozen": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "nothing": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
}


def wrapped(**options: Any) -> FSDP:
    return FSDP(Tied(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()


def trained(make: Make, steps: int, **options: Any) -> tuple[FSDP, Optimizer]:
    model = wrapped(**options)
    optimizer = make(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def unbroken(make: Make) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of a single process after five steps, and the state of its optimizer."""
    model = Tied()
    optimizer = make(model)
    train(model, optimizer, range(5))
    return model.state_dict(), optimizer.state_dict()


@contextmanager
def quiet() -> Iterator[None]:
    """One rank has nothing to share, and the door warns of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("saving", "loading"), some((3, 2), (1, 3), (2, 1)))
def test_a_run_goes_on_in_another_world_as_if_it_had_not_stopped(name: str, saving: int, loading: int) -> None:
    make = OPTIMIZERS[name]

    def save(rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = trained(make, 3)
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)

    def load(rank: int, weights: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Tensor]:
        model, optimizer = trained(make, 0)
        model.load_state_dict(weights)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        train(model, optimizer, range(3, 5))
        return dict(model.state_dict())

    with quiet():
        weights, state = simulate(saving, save)[0]
        found = simulate(loading, lambda rank: load(rank, weights, state))
    plain = Tied()
    wanted, _ = unbroken(make)
    assert [group["params"] for group in state["param_groups"]] == [
        [{id(p): key for key, p in reversed([*plain.named_parameters(remove_duplicate=False)])}[id(p)] for p in group["params"]]
        for group in make(plain).param_groups
    ]
    for one in found:
        torch.testing.assert_close(one, wanted)


@on_ranks(2)
def test_the_state_that_rank_0_alone_has_reaches_the_others(rank: int) -> None:
    model, again = wrapped(), wrapped()
    optimizer, other, third = in_groups(model), in_groups(again), in_groups(again)
    train(model, optimizer, range(2))
    full = FSDP.full_optim_state_dict(model, optimizer)
    assert rank == 0 or not full
    other.load_state_dict(FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, again, optim=other))
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(again, StateDictType.FULL_STATE_DICT, *configs):
        third.load_state_dict(FSDP.optim_state_dict_to_load(again, third, full))
    for one in (other, third):
        assert_same(FSDP.full_optim_state_dict(again, one), full)


@pytest.mark.parametrize("kind", [StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@on_ranks(2)
def test_parts_of_torch_need_a_process_group(rank: int, kind: StateDictType) -> None:
    model = wrapped()
    with FSDP.state_dict_type(model, kind), pytest.raises(fsdp.ShardingError, match=f"{kind.name}: torch's ShardedTensor needs"):
        model.state_dict()


def test_a_plain_optimizer_takes_the_state_and_returns_it() -> None:
    make = OPTIMIZERS["groups"]

    state = simulate(2, lambda rank: FSDP.full_optim_state_dict(*trained(make, 3), rank0_only=False))[0]
    plain = Tied()
    optimizer = make(plain)
    train(plain, optimizer, range(3))
    by_number = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain, optim=optimizer)
    mine = optimizer.state_dict()
    assert by_number["state"].keys() == mine["state"].keys()
    for number, kept in mine["state"].items():
        for key, value in kept.items():
            torch.testing.assert_close(by_number["state"][number][key], value)
    again = FSDP.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, plain, optim=optimizer)
    assert again["state"].keys() == state["state"].keys()


@on_ranks(2)
def test_the_given_state_counts_in_place_of_the_optimizers_own(rank: int) -> None:
    model, optimizer = trained(of_one_block, 2)
    given = deepcopy(optimizer.state_dict())
    for kept in given["state"].values():
        kept["exp_avg"] = kept["exp_avg"] + 1
        kept["note"], kept["nothing"] = 2.5, None
    state = FSDP.optim_state_dict(model, optimizer, given)
    own = FSDP.optim_state_dict(model, optimizer)
    for name, kept in own["state"].items():
        assert torch.equal(state["state"][name]["exp_avg"], kept["exp_avg"] + 1)
        assert (state["state"][name]["note"], state["state"][name]["nothing"]) == (2.5, None)
    groupless = FSDP.optim_state_dict(model, optimizer, {"state": given["state"]})
    assert "param_groups" not in groupless
    back = FSDP.optim_state_dict_to_load(model, optimizer, groupless)
    assert back.keys() == {"state"} and all(kept["note"] == 2.5 for kept in back["state"].values())
    with pytest.raises(fsdp.ShardingError, match=r"the optimizer has no parameters \['77'\]"):
        FSDP.optim_state_dict(model, optimizer, {"state": {77: {}}})


@on_ranks(2)
def test_parameters_that_are_not_sharded_may_be_left_out_of_a_state_and_those_of_a_unit_not(rank: int) -> None:
    model, optimizer = trained(lambda model: torch.optim.Adam(model.parameters()), 2)
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    bigger = nn.ModuleDict({"_fsdp_wrapped_module": wrapped()})
    bigger["own"] = nn.Linear(2, 2)
    other = torch.optim.Adam(bigger.parameters())
    found = FSDP.shard_full_optim_state_dict(state, bigger, optim=other)
    numbers = list(range(len([*bigger.parameters()])))
    assert found["param_groups"][0]["params"] == numbers[:-2] and not {*numbers[-2:]} & {*found["state"]}
    del state["state"]["first.bias"]
    state["param_groups"][0]["params"].remove("first.bias")
    with pytest.raises(ValueError, match=r"must have scalar state with the same value and dtype: .*\['first.bias'\]"):
        FSDP.shard_full_optim_state_dict(state, bigger, optim=other)


@on_ranks(2)
def test_an_optimizer_that_leaves_out_what_rank_0_steps_is_refused_on_every_rank(rank: int) -> None:
    model = wrapped()
    params = [*model.parameters()]
    optimizer = torch.optim.Adam(params[: len(params) - rank])
    with pytest.raises(RuntimeError, match=r"some ranks are missing some of those states: rank 1 leaves out \['blocks.1"):
        FSDP.full_optim_state_dict(model, optimizer)


class Named(torch.optim.Adam):
    """An optimizer whose state dict has names of its own, those of `named_parameters()`."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        super().__init__(model.parameters(), lr=0.05)

    def state_dict(self) -> dict[str, Any]:
        names = [self.names[id(p)] for group in self.param_groups for p in group["params"]]
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": sorted(names)}
            for group in self.param_groups
        ]
        return {"state": {self.names[id(p)]: kept for p, kept in self.state.items()}, "param_groups": groups}


@on_ranks(2)
def test_an_optimizer_with_names_of_its_own_saves_and_loads_by_them(rank: int) -> None:
    model = wrapped()
    named, plain = Named(model), wrapped()
    ordinary = torch.optim.Adam(plain.parameters(), lr=0.05)
    train(model, named, range(2))
    train(plain, ordinary, range(2))
    state = FSDP.optim_state_dict(model, named, named.state_dict())
    wanted = FSDP.optim_state_dict(plain, ordinary)
    assert state["state"].keys() == wanted["state"].keys()
    for name, kept in wanted["state"].items():
        for key, value in kept.items():
            assert torch.equal(state["state"][name][key], value)
    back = FSDP.optim_state_dict_to_load(model, named, state, is_named_optimizer=True)
    current = named.state_dict()["state"]
    assert {*back["state"]} >= {name for name, kept in current.items() if kept} and {*back["state"]} <= {*named.names.values()}
    for name, kept in back["state"].items():
        assert all(torch.equal(value, current[name][key]) for key, value in kept.items())
