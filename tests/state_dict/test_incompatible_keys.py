"""State dicts that other ranks do not have, and state dicts with other names than the model: `strict=False`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import CASES, Case, Counting, make_net, weights_of, wrap
from tests.support.optimizers import assert_same, in_groups, trained
from tests.support.ranks import on_ranks
from tests.support.states import STATEFUL, assert_same_state, assert_state, refused_whole, shifted

NET = CASES["net"]


@STATEFUL
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_what_full_state_dict_returns_can_be_loaded_as_it_is(rank: int, case: Case, size: int) -> None:
    """Other ranks than 0 have an empty one. They may have none as well."""
    model, other = wrap(case), wrap(case)
    fsdp.load_full_state_dict(model, shifted(case) if rank == 0 else None)
    assert fsdp.load_full_state_dict(other, fsdp.full_state_dict(model)) == ([], [])
    assert_state(other, shifted(case))


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_what_full_optim_state_dict_returns_can_be_loaded_as_it_is(rank: int, size: int) -> None:
    model, optimizer = trained(NET, rank, in_groups)
    saved = fsdp.full_optim_state_dict(model, optimizer)
    assert bool(saved) == (rank == 0)
    other = in_groups(model.parameters())
    fsdp.load_full_optim_state_dict(model, other, saved)
    assert_same(fsdp.full_optim_state_dict(model, other), saved)


LOADS: dict[str, Callable[[nn.Module, Any], object]] = {
    "load_full_state_dict": fsdp.load_full_state_dict,
    "load_full_state_dict, not strict": lambda model, state: fsdp.load_full_state_dict(model, state, strict=False),
    "load_full_optim_state_dict": lambda model, state: fsdp.load_full_optim_state_dict(
        model, torch.optim.SGD(model.parameters()), state
    ),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("given", "said"), [({}, "an empty state dict"), (None, "None")])
@on_ranks(2)
def test_rank_0_must_give_it(rank: int, load: str, given: Any, said: str) -> None:
    """Also if another rank has it."""
    model = wrap(NET)
    text = f"{load.partition(',')[0]}: rank 0 gives {said}; it must give the full one. Other ranks may give None"
    with refused_whole(model, text):
        LOADS[load](model, given if rank == 0 or "optim" in load else shifted(NET))


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without one parameter of each unit and without the buffer, and with two names more."""
    missing = {"leave.bias", "blocks.1.up.weight", "scale"}
    return {**{name: value for name, value in state.items() if name not in missing}, "z": torch.ones(1), "more.0": torch.ones(1)}


MISSING = ["scale", "blocks.1.up.weight", "leave.bias"]
UNEXPECTED = ["more.0", "z"]


@pytest.mark.parametrize("other_ranks", ["give it too", "give {}", "give None"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(3)
def test_names_are_left_out_and_returned_as_torch_returns_them(rank: int, other_ranks: str, strategy: str) -> None:
    plain, model = make_net(), wrap(NET, sharding_strategy=strategy)
    wanted = plain.load_state_dict(changed(shifted(NET)), strict=False)
    given = {"give it too": changed(shifted(NET)), "give {}": {}, "give None": None}
    keys = fsdp.load_full_state_dict(model, given["give it too" if rank == 0 else other_ranks], strict=False)
    assert sorted(keys.missing_keys) == sorted(wanted.missing_keys) == sorted(MISSING)
    assert keys.unexpected_keys == sorted(wanted.unexpected_keys) == UNEXPECTED
    assert_same_state(fsdp.full_state_dict(model, rank0_only=False), dict(plain.state_dict()))


@on_ranks(2)
def test_one_of_two_tied_names_is_enough_and_extra_state_may_be_missing(rank: int) -> None:
    model = nn.Sequential(Counting(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model[0].count = 5
    fsdp.fully_shard(model)
    keys = fsdp.load_full_state_dict(model, {"1.weight": torch.ones(3, 3)} if rank == 0 else {}, strict=False)
    assert keys.missing_keys == ["0.weight", "0.bias", "0._extra_state"]
    assert torch.equal(fsdp.full_state_dict(model, rank0_only=False)["0.weight"], torch.ones(3, 3))
    assert model[0].count == 5


@pytest.mark.parametrize("from_rank_0", [True, False])
@on_ranks(2)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_loaded(rank: int, from_rank_0: bool) -> None:
    model = wrap(NET)
    state = {**changed(shifted(NET)), "enter.bias": torch.ones(9)}
    with refused_whole(model, r"'enter.bias' has shape \(9,\), the model has \(8,\)"):
        fsdp.load_full_state_dict(model, {} if from_rank_0 and rank else state, strict=False)


@on_ranks(2)
def test_ranks_that_leave_out_different_names_are_refused(rank: int) -> None:
    model, state = wrap(NET), shifted(NET)
    if rank == 1:
        del state["leave.bias"]
    text = r"the state dict of rank 0 lacks nothing, that of rank 1 lacks \['leave.bias'\]; give the same on every rank"
    with refused_whole(model, text):
        fsdp.load_full_state_dict(model, state, strict=False)


@pytest.mark.parametrize("wrapped", [True, False])
@on_ranks(2)
def test_load_state_dict_of_the_model_does_the_same(rank: int, wrapped: bool) -> None:
    model = wrap(NET, in_place=not wrapped)
    before = weights_of(model)
    with pytest.raises(fsdp.StateMismatch, match=r"Unexpected key\(s\): \['more.0', 'z'\]. .* or strict=False to leave these"):
        model.load_state_dict(changed(shifted(NET)))
    with pytest.raises(fsdp.StateMismatch, match="has shape"):
        model.load_state_dict({**changed(shifted(NET)), "enter.bias": torch.ones(9)}, strict=False)
    assert_same_state(weights_of(model), before)
    keys = model.load_state_dict(changed(shifted(NET)), strict=False)
    assert sorted(keys.missing_keys) == sorted(MISSING) and sorted(keys.unexpected_keys) == UNEXPECTED
    plain = make_net()
    plain.load_state_dict(changed(shifted(NET)), strict=False)
    assert_same_state(fsdp.full_state_dict(model, rank0_only=False), dict(plain.state_dict()))


@pytest.mark.parametrize("door", ["load_state_dict", "load_full_state_dict"])
@on_ranks(2)
def test_a_state_from_before_batches_were_counted_is_loaded_as_by_torch(rank: int, door: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    state = make().state_dict()
    counted = state.pop("1.num_batches_tracked")
    model = fsdp.fully_shard(make())
    model[1].num_batches_tracked.fill_(5)  # type: ignore[index]
    load = model.load_state_dict if door == "load_state_dict" else partial(fsdp.load_full_state_dict, model)
    with pytest.raises(fsdp.ShardingError, match=r"Missing key.*num_batches_tracked"):
        load(state)  # with its version
    load(dict(state))
    assert_same_state(fsdp.full_state_dict(model, rank0_only=False), {**state, "1.num_batches_tracked": counted + 5})
