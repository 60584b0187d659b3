"""Loading of files: a first start without any, and names that only one of the model and the files has."""

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import CASES, X, loss_of, make_net, wrap
from tests.support.ranks import on_ranks
from tests.support.states import assert_same_state, refused_whole, shifted

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
NET = CASES["net"]


class Longer(nn.Module):
    """The net of the tests under another name, and a head that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        net = make_net()
        self.enter, self.blocks = net.enter, net.blocks
        self.head = nn.Linear(8, 3)
        self.count = 4

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Its full tensors."""
    state = fsdp.full_state_dict(model, rank0_only=False)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


MISSING = ["head.bias", "head.weight", "_extra_state"]
UNEXPECTED = ["leave.bias", "leave.weight", "scale"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_first_start_is_answered_with_the_two_lines_that_it_needs(alone: bool, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = wrap(NET)
        path: Any = fsdp.latest(tmp_path / "nothing") if not alone or rank else tmp_path / "there"
        with pytest.raises(fsdp.ShardingError) as refusal:
            fsdp.load(path, model)
        assert "load: the path is None, as fsdp.latest returns where no checkpoint is finished" in str(refusal.value)
        assert "`if (path := fsdp.latest(folder)) is not None: fsdp.load(path, model, optimizer)`" in str(refusal.value)

    fsdp.simulate(2, lambda rank: fsdp.save(tmp_path / "there", wrap(NET)))
    fsdp.simulate(2, fn)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    def save(rank: int) -> None:
        model = wrap(NET)
        fsdp.load_full_state_dict(model, shifted(NET))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        fsdp.save(tmp_path / "before", model, optimizer, extra={"step": 3})
        loss_of(model(X)).backward()
        fsdp.save(tmp_path / "one", model, optimizer, extra={"step": 3}, accumulated=True)
        fsdp.export_safetensors(model, tmp_path / "two")

    fsdp.simulate(2, save)
    return tmp_path


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["one", "two"])
@on_ranks("size")
def test_names_are_left_out_and_reported(rank: int, kind: str, size: int, files: Path) -> None:
    model = fsdp.fully_shard(Longer())
    before = state_of(model)
    load: Any = fsdp.load if kind == "one" else fsdp.load_safetensors
    given = (files / kind, model) if kind == "one" else (model, files / kind)
    with pytest.raises(fsdp.ShardingError, match=r"Missing key.*Unexpected key.* or strict=False to leave these names out"):
        load(*given)
    assert_same_state(state_of(model), before)
    found: Any = load(*given, strict=False)
    # files of safetensors hold tensors only
    assert sorted(found.missing_keys) == sorted(MISSING if kind == "one" else MISSING[:2])
    assert found.unexpected_keys == UNEXPECTED
    if kind == "one":
        assert found == {"step": 3}
    plain = Longer()
    plain.load_state_dict(shifted(NET), strict=False)
    wanted = {**dict(plain.state_dict()), "head.weight": before["head.weight"], "head.bias": before["head.bias"]}
    assert_same_state(state_of(model), {name: wanted[name] for name in before})
    assert model.count == 4


@on_ranks(2)
def test_extra_state_that_is_missing_is_named_before_anything_is_loaded(rank: int, tmp_path: Path) -> None:
    """The names of tensors are the same, so only the extra state differs."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, count: int) -> None:
            raise AssertionError("there is none")

    fsdp.save(tmp_path / "a", fsdp.fully_shard(nn.Linear(3, 3)))
    model = fsdp.fully_shard(Counting(3, 3))
    with refused_whole(model, r"Missing key\(s\): \['_extra_state'\]. Unexpected key\(s\): none"):
        fsdp.load(tmp_path / "a", model)
    assert fsdp.load(tmp_path / "a", model, strict=False).missing_keys == ["_extra_state"]


@on_ranks(2)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_loaded(rank: int, files: Path) -> None:
    wide = Longer()
    wide.enter = nn.Linear(5, 8)
    model, text = fsdp.fully_shard(wide), r"'enter.weight' has shape \(8, 6\), the model has \(8, 5\)"
    with refused_whole(model, text):
        fsdp.load(files / "one", model, strict=False)
    with refused_whole(model, text):
        fsdp.load_safetensors(model, files / "two", strict=False)


@on_ranks(2)
def test_the_parameters_of_an_optimizer_must_be_those_of_the_checkpoint(rank: int, files: Path) -> None:
    model = fsdp.fully_shard(Longer())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with refused_whole(model, "in one of the state dict and the optimizer only"):
        fsdp.load(files / "one", model, optimizer, strict=False)


@on_ranks(2)
def test_what_load_returns_is_pickled_as_something_that_torch_loads(rank: int, tmp_path: Path) -> None:
    model = wrap(NET)
    fsdp.save(tmp_path / "a", model, extra={"step": 1})
    found = fsdp.load(tmp_path / "a", model)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert type(pickle.loads(pickle.dumps(found))) is OrderedDict
    torch.save(found, tmp_path / f"{rank}.pt")
    assert torch.load(tmp_path / f"{rank}.pt") == {"step": 1}
