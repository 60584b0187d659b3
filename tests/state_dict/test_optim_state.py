"""Optimizer state by parameter name: gathered, loaded, into any other world and into plain torch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import fsdp
from tests.support.everything import some
from tests.support.models import (
    CASES,
    Block,
    Case,
    join,
    loss_of,
    make_net,
    own_batches,
    train,
    weights_of,
    wrap,
)
from tests.support.optimizers import OPTIMIZERS, ROWS, Make, RowStatistics, assert_same, in_groups, trained, wrapped
from tests.support.ranks import on_ranks
from tests.support.states import STATEFUL


def saved_by(size: int, case: Case, make: Make) -> dict[str, Any]:
    return fsdp.simulate(size, lambda rank: fsdp.full_optim_state_dict(*trained(case, rank, make)))[0]


@pytest.mark.parametrize(
    ("case_name", "optimizer_name"), [*((case, "AdamW in groups") for case in CASES), *(("odd", one) for one in OPTIMIZERS)]
)
@pytest.mark.parametrize(("saving", "loading"), some((3, 2), (1, 3)))
def test_state_goes_from_one_world_into_another(case_name: str, optimizer_name: str, saving: int, loading: int) -> None:
    case, make = CASES[case_name], OPTIMIZERS[optimizer_name]
    saved = saved_by(saving, case, make)
    assert saved["state"]

    def load(rank: int) -> dict[str, Any]:
        model, optimizer = wrapped(case, make)
        fsdp.load_full_optim_state_dict(model, optimizer, saved)
        for p in model.parameters():
            assert p.numel() or p not in optimizer.state, "state was invented for a part without elements"
            for kept in optimizer.state.get(p, {}).values():
                assert kept.untyped_storage().nbytes() <= max(p.nbytes, 8), "a part keeps the full tensor alive"
        return fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)

    for found in fsdp.simulate(loading, load):
        assert_same(found, saved)


@STATEFUL
def test_it_is_the_shards_put_together(case: Case) -> None:
    def fn(rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = trained(case, rank, OPTIMIZERS["SGD"])
        names = dict(model.named_parameters())
        mine = {name: optimizer.state[p]["momentum_buffer"] for name, p in names.items() if optimizer.state.get(p)}
        return mine, fsdp.full_optim_state_dict(model, optimizer)["state"] if rank == 0 else fsdp.full_optim_state_dict(
            model, optimizer
        )

    by_rank = fsdp.simulate(3, fn)
    full = by_rank[0][1]
    shapes = {name: p.shape for name, p in case.model().named_parameters()}
    joined = {name: join([mine.get(name) for mine, _ in by_rank], shapes[name]) for name in shapes}
    assert_same(
        {name: kept["momentum_buffer"] for name, kept in full.items()}, {n: t for n, t in joined.items() if t is not None}
    )
    assert by_rank[1][1] == {}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_plain_torch_goes_on_with_it_and_returns_it(make: Make) -> None:
    case = CASES["net"]

    def fn(rank: int, given: dict[str, Any] | None = None) -> Any:
        model, optimizer = trained(case, rank, make)
        weights = fsdp.full_state_dict(model)
        saved = fsdp.full_optim_state_dict(model, optimizer)
        if given is not None:
            fsdp.load_full_optim_state_dict(model, optimizer, given if rank == 0 else None)
        loss_of(model(case.batch(0, 9))).backward()
        optimizer.step()
        return weights, saved, fsdp.full_state_dict(model)

    weights, saved, after = fsdp.simulate(2, fn)[0]
    plain = case.model()
    plain.load_state_dict(weights)
    optimizer = make(plain.parameters())
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(plain, optimizer, saved, options=options)
    by_name, by_number = get_optimizer_state_dict(plain, optimizer, options=options), optimizer.state_dict()
    assert_same(by_name["state"], saved["state"])
    loss_of(plain(case.batch(0, 9))).backward()
    # the sharded gradients held those of the last step as well
    reference_gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert all(g is not None for g in reference_gradients.values())
    for given in (by_name, by_number):
        again = fsdp.simulate(2, lambda rank, given=given: fn(rank, given))[0]
        assert_same(again[2], after)


@on_ranks(2)
def test_a_sharded_run_resumed_from_full_state_equals_the_one_that_went_on(rank: int) -> None:
    case = CASES["net"]
    batches = own_batches(case, rank, 6)
    straight, one = wrapped(case, in_groups)
    train(straight, batches[:3], lambda _: one)
    weights, state = fsdp.full_state_dict(straight), fsdp.full_optim_state_dict(straight, one)
    wanted = train(straight, batches[3:], lambda _: one)
    resumed, other = wrapped(case, in_groups)
    fsdp.load_full_state_dict(resumed, weights if rank == 0 else None)
    fsdp.load_full_optim_state_dict(resumed, other, state if rank == 0 else None)
    found = train(resumed, batches[3:], lambda _: other)
    assert all(torch.equal(found.weights[name], weight) for name, weight in wanted.weights.items())


def loaded(rank: int, make: Make, saved: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = wrapped(ROWS, make)
    fsdp.load_full_optim_state_dict(model, optimizer, saved)
    return fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)


def test_a_number_a_row_is_cut_like_the_rows() -> None:
    saved = saved_by(2, ROWS, RowStatistics)
    assert {name: tuple(kept["square"].shape) for name, kept in saved["state"].items()} == {
        "0.weight": (12, 1),
        "1.weight": (24, 1),
    }
    assert {kept["count"] for kept in saved["state"].values()} == {2}
    for size in (1, 2, 3):
        for found in fsdp.simulate(size, lambda rank: loaded(rank, RowStatistics, saved)):
            assert_same(found, saved)


def test_a_statistic_over_one_ranks_rows_is_refused_by_name() -> None:
    text = r"'col_var' of parameter '0.weight' has shape \(1, 6\)"

    def save(rank: int) -> None:
        model, optimizer = trained(ROWS, rank, torch.optim.SGD)
        for parameter in model.parameters():
            optimizer.state[parameter]["col_var"] = fsdp.to_local(parameter).detach().mean(dim=0, keepdim=True)
        with pytest.raises(fsdp.ShardingError, match=f"{text} on each rank.*no full form; fsdp.save keeps it"):
            fsdp.full_optim_state_dict(model, optimizer)

    def load(rank: int) -> None:
        model, optimizer = wrapped(ROWS, torch.optim.Adafactor)
        with pytest.raises(fsdp.ShardingError, match=f"{text}, which cannot be cut like the parameter"):
            fsdp.load_full_optim_state_dict(model, optimizer, one)
        assert not optimizer.state

    fsdp.simulate(2, save)
    one = saved_by(1, ROWS, torch.optim.Adafactor)
    fsdp.simulate(2, load)
    assert_same(fsdp.simulate(1, lambda rank: loaded(rank, torch.optim.Adafactor, one))[0], one)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state["state"].update(more={}), r"parameters \['more'\] are in one of"),
        (lambda state: state["param_groups"][0]["params"].pop(), r"parameters \['\S+'\] are in one of"),
        (lambda state: state.pop("state"), "give a dict with 'state' and 'param_groups'"),
        (lambda state: state["state"]["leave.bias"].update(step=object()), "'step' of parameter 'leave.bias' is a object"),
        (
            lambda state: state["state"]["blocks.0.down.weight"].update(exp_avg=torch.ones(5, 8)),
            r"'exp_avg' of parameter 'blocks.0.down.weight' has shape \(5, 8\)",
        ),
    ],
    ids=["unexpected", "missing", "no state", "no tensor", "shape"],
)
def test_what_does_not_fit_is_named_on_every_rank_and_nothing_is_loaded(change: Callable[[Any], Any], text: str) -> None:
    saved = saved_by(2, CASES["net"], in_groups)
    change(saved)

    def fn(rank: int) -> None:
        model = fsdp.fully_shard(make_net())
        optimizer = in_groups(model.parameters())
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.load_full_optim_state_dict(model, optimizer, saved if rank == 0 else None)
        assert not optimizer.state

    fsdp.simulate(4, fn)


@on_ranks(2)
def test_state_that_belongs_to_no_parameter_is_refused_where_it_would_be_lost(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained(CASES["net"], rank, in_groups)
    wanted = fsdp.full_optim_state_dict(model, optimizer)
    fsdp.save(tmp_path / "a", model, optimizer)
    lost = torch.ones(3)
    optimizer.state[lost]["steps"] = 1
    with pytest.raises(
        fsdp.ShardingError, match=r"has state under \['a tensor of shape \(3,\)'\], which belongs to no parameter"
    ):
        fsdp.save(tmp_path / "b", model, optimizer)
    del optimizer.state[lost]
    if rank == 1:
        optimizer.state["global"]["steps"] = 1
    for call in (partial(fsdp.save, tmp_path / "b", model, optimizer), partial(fsdp.full_optim_state_dict, model, optimizer)):
        with pytest.raises(fsdp.ShardingError, match=r"has state under \['global'\], which belongs to no parameter"):
            call()
    fsdp.load(tmp_path / "a", model, optimizer)
    assert_same(fsdp.full_optim_state_dict(model, optimizer), wanted)


@pytest.mark.parametrize("full", [False, True])
@on_ranks(2)
def test_state_that_is_loaded_in_inference_mode_is_trained_with(rank: int, full: bool, tmp_path: Path) -> None:
    model, optimizer = trained(CASES["net"], rank, in_groups)
    state = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    fsdp.save(tmp_path / "a", model, optimizer)
    other, again = wrapped(CASES["net"], in_groups)
    with torch.inference_mode():
        fsdp.load(tmp_path / "a", other, None if full else again)
        if full:
            fsdp.load_full_optim_state_dict(other, again, state)
        with pytest.raises(fsdp.ShardingError, match="call it outside inference_mode"):
            optimizer.load_state_dict(optimizer.state_dict())
    for one, two in ((model, optimizer), (other, again)):
        train(one, own_batches(CASES["net"], rank), lambda _, two=two: two)
    assert_same(weights_of(other), weights_of(model))


@on_ranks(2)
def test_groups_that_differ_are_named(rank: int) -> None:
    model, optimizer = trained(CASES["net"], rank, in_groups)
    saved = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    with pytest.raises(fsdp.ShardingError, match="the state dict has groups of other parameters"):
        fsdp.load_full_optim_state_dict(model, torch.optim.AdamW(model.parameters()), saved)


@on_ranks(2)
def test_each_group_without_parameters_gets_its_own_options(rank: int, tmp_path: Path) -> None:
    model = wrap(CASES["net"])

    def make(*rates: float) -> torch.optim.Optimizer:
        groups = [{"params": [], "lr": rates[0]}, {"params": list(model.parameters())}, {"params": [], "lr": rates[1]}]
        return torch.optim.SGD(groups, lr=0.5)

    saved, others = make(5.0, 7.0), [make(0.0, 0.0), make(0.0, 0.0)]
    fsdp.save(tmp_path / "a", model, saved)
    fsdp.load(tmp_path / "a", model, others[0])
    fsdp.load_full_optim_state_dict(model, others[1], fsdp.full_optim_state_dict(model, saved))
    assert [[group["lr"] for group in one.param_groups] for one in others] == [[5.0, 0.5, 7.0]] * 2


@on_ranks(1)
def test_an_optimizer_of_another_model_is_refused(rank: int) -> None:
    model, other = wrap(CASES["net"]), wrap(CASES["net"])
    with pytest.raises(fsdp.ShardingError, match="not in this model; make it from"):
        fsdp.full_optim_state_dict(model, torch.optim.SGD(other.parameters()))


@on_ranks(2)
def test_parameters_that_are_not_sharded_keep_their_state(rank: int) -> None:
    net = make_net()
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, ignored_modules={net.leave})
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    train(model, [[CASES["net"].batch(0, 0)]], lambda _: optimizer)
    saved = fsdp.full_optim_state_dict(model, optimizer)
    assert rank != 0 or torch.equal(saved["state"]["leave.weight"]["momentum_buffer"], net.leave.weight.grad)
    other = OPTIMIZERS["SGD"](model.parameters())
    fsdp.load_full_optim_state_dict(model, other, saved if rank == 0 else None)
    assert torch.equal(other.state[net.leave.weight]["momentum_buffer"], net.leave.weight.grad)
