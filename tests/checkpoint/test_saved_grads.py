"""Saves in the middle of a step: gradients come back if asked for; those kept under `no_sync` are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.checkpoint import dcp
from tests.support.models import CASES, Case, loss_of, weights_of, wrap
from tests.support.optimizers import assert_same, in_groups, wrapped
from tests.support.ranks import on_ranks


def micro(model: nn.Module, case: Case, rank: int, step: int) -> None:
    loss_of(model(case.batch(rank, step))).backward()


@pytest.mark.parametrize("case", ["net", "tied", "odd"])
@pytest.mark.parametrize(
    ("strategy", "size", "loading"), [("FULL_SHARD", 2, 2), ("FULL_SHARD", 3, 2), ("NO_SHARD", 2, 3), ("HYBRID_SHARD", 4, 2)]
)
def test_gradients_come_back_if_asked_for(case: str, strategy: str, size: int, loading: int, tmp_path: Path) -> None:
    one = CASES[case]

    def full_gradients(model: nn.Module) -> dict[str, Any]:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        return fsdp.full_state_dict(model)

    def save(rank: int) -> dict[str, Any]:
        model = wrap(one, sharding_strategy=strategy, **({"mesh": (2, 2)} if size == 4 else {}))
        micro(model, one, rank, 0)
        fsdp.save(tmp_path / "a", model, accumulated=True)
        return full_gradients(model)

    def load(rank: int) -> dict[str, Any]:
        model = wrap(one)
        micro(model, one, rank, 3)
        fsdp.load(tmp_path / "a", model)
        assert all(p.grad is None for p in model.parameters() if not p.numel())
        return full_gradients(model)

    wanted = fsdp.simulate(size, save)[0]
    assert_same(fsdp.simulate(loading, load)[0], wanted)


@on_ranks(2)
def test_the_rest_of_the_step_is_exact_to_the_bit(rank: int, tmp_path: Path) -> None:
    case = CASES["net"]

    def rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        micro(model, case, rank, 1)
        optimizer.step()
        return weights_of(model)

    model, optimizer = wrapped(case, in_groups)
    micro(model, case, rank, 0)
    fsdp.save(tmp_path / "a", model, optimizer, accumulated=True)
    wanted = rest(model, optimizer)
    model, optimizer = wrapped(case, in_groups)
    fsdp.load(tmp_path / "a", model, optimizer)
    assert_same(rest(model, optimizer), wanted)


def test_without_being_asked_they_are_left_out(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        micro(model, CASES["net"], rank, 0)
        fsdp.save(tmp_path / "a", model)
        before = [p.grad for p in model.parameters()]
        fsdp.load(tmp_path / "a", model)
        assert all(p.grad is one for p, one in zip(model.parameters(), before, strict=True))

    fsdp.simulate(2, fn)
    assert not [key for key in dcp.StoredCheckpoint(tmp_path / "a").paths if key.startswith("gradients")]


@pytest.mark.parametrize("accumulated", [False, True])
@on_ranks(2)
def test_gradients_kept_under_no_sync_are_refused(rank: int, accumulated: bool, tmp_path: Path) -> None:
    model = wrap(CASES["net"])
    with fsdp.no_sync(model):
        micro(model, CASES["net"], rank, 0)
    with pytest.raises(fsdp.ShardingError, match=r"gradients are kept under no_sync, unsharded on each rank"):
        fsdp.save(tmp_path / "a", model, accumulated=accumulated)
    assert not list(tmp_path.iterdir())
    model.zero_grad()
    fsdp.save(tmp_path / str(rank // 2), model, accumulated=accumulated)


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, HYBRID)], ids=["one row", "a mesh"])
@on_ranks("size")
def test_gradients_that_only_some_ranks_have_are_named(rank: int, size: int, options: dict[str, Any], tmp_path: Path) -> None:
    model = wrap(CASES["net"], **options)
    micro(model, CASES["net"], rank, 0)
    if rank == size - 1:
        model.zero_grad()
    with pytest.raises(fsdp.ShardingError, match=rf"'.*' has a gradient on some ranks only \(on \[.*\], not on \[{size - 1}\]\)"):
        fsdp.save(tmp_path / "a", model, accumulated=True)


@on_ranks(2)
def test_gradients_of_what_is_not_sharded_are_refused(rank: int, tmp_path: Path) -> None:
    net = CASES["net"].model()
    model = fsdp.fully_shard(net, ignored_modules={net.leave})
    micro(model, CASES["net"], rank, 0)
    with pytest.raises(fsdp.ShardingError, match=r"gradient of 'leave.weight', which is not sharded, is each rank's own"):
        fsdp.save(tmp_path / "a", model, accumulated=True)


def test_a_gradient_the_model_has_no_parameter_for_is_named(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model = wrap(CASES["net"])
        micro(model, CASES["net"], rank, 0)
        fsdp.save(tmp_path / "a", model, accumulated=True)

    def load(rank: int) -> None:
        net = CASES["net"].model()
        model = fsdp.fully_shard(net, ignored_modules={net.leave})
        with pytest.raises(fsdp.ShardingError, match=r"there is a gradient of 'leave.weight', \(2, 8\), and no such sharded"):
            fsdp.load(tmp_path / "a", model)

    fsdp.simulate(2, save)
    fsdp.simulate(2, load)
