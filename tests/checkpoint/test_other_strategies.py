"""Checkpoints where several ranks hold the same shards: any strategy reads what another saved; each rank gets back its own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import fsdp
from fsdp.checkpoint.dcp import StoredCheckpoint
from tests.support import optimizers
from tests.support.models import CASES, own_batches, train, wrap
from tests.support.ranks import on_ranks
from tests.support.states import everything

CASE = CASES["tied"]
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "FULL_SHARD": (2, {}),
    "NO_SHARD": (2, {"sharding_strategy": "NO_SHARD"}),
    "HYBRID_SHARD": (4, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
}


def trained(rank: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return optimizers.trained(CASE, rank, partial(torch.optim.AdamW, lr=0.01), 1, in_place=True, **options)


def train_on(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change everything that was saved."""
    train(model, own_batches(CASE, rank, 1), lambda _: optimizer)


@pytest.mark.parametrize("saves", STRATEGIES)
@pytest.mark.parametrize("loads", STRATEGIES)
def test_what_one_strategy_saves_any_other_loads(saves: str, loads: str, tmp_path: Path) -> None:
    path = tmp_path / "step-3"
    size, options = STRATEGIES[saves]

    def save(rank: int) -> dict[str, Tensor]:
        model, optimizer = trained(rank, **options)
        fsdp.save(path, model, optimizer, extra={"rank": rank})
        return everything(model, optimizer)

    wanted = fsdp.simulate(size, save)[0]
    for key, stored in StoredCheckpoint(path).metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            written = sum(torch.Size(chunk.sizes).numel() for chunk in stored.chunks)
            assert written == torch.Size(stored.size).numel(), f"{key} is there more than once"
    other, others_options = STRATEGIES[loads]

    def load(rank: int) -> tuple[int, dict[str, Tensor]]:
        model, optimizer = trained(rank, **others_options)
        train_on(rank, model, optimizer)
        extra = fsdp.load(path, model, optimizer)
        return extra["rank"], everything(model, optimizer)

    for rank, (given, found) in enumerate(fsdp.simulate(other, load)):
        assert given == (rank if other == size else 0)
        optimizers.assert_same(found, wanted)


@pytest.mark.parametrize(("size", "options"), STRATEGIES.values(), ids=STRATEGIES)
@on_ranks("size")
def test_rank_0_alone_gets_and_gives_the_full_state(rank: int, size: int, options: dict[str, Any]) -> None:
    model, optimizer = trained(rank, **options)
    wanted = everything(model, optimizer)
    state, optim = fsdp.full_state_dict(model), fsdp.full_optim_state_dict(model, optimizer)
    assert bool(state) == bool(optim) == (rank == 0)
    train_on(rank, model, optimizer)
    fsdp.load_full_state_dict(model, state or None)
    fsdp.load_full_optim_state_dict(model, optimizer, optim or None)
    optimizers.assert_same(everything(model, optimizer), wanted)


REPLICATED = ["NO_SHARD", "HYBRID_SHARD"]


@pytest.mark.parametrize("name", REPLICATED)
def test_a_save_that_fails_fails_on_every_rank(name: str, tmp_path: Path) -> None:
    size, options = STRATEGIES[name]
    (tmp_path / "there").mkdir()

    def one_rank(rank: int) -> None:
        model, optimizer = trained(rank, **options)
        with pytest.raises(fsdp.ShardingError, match="there"):
            fsdp.save(tmp_path / "there", model, optimizer)
        fsdp.save(tmp_path / "new", model, optimizer)

    fsdp.simulate(size, one_rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there"]


@pytest.mark.parametrize(("size", "options"), [STRATEGIES[name] for name in REPLICATED], ids=REPLICATED)
@on_ranks("size")
def test_safetensors_are_written_once_and_read_by_all(rank: int, size: int, options: dict[str, Any], tmp_path: Path) -> None:
    model, _ = trained(rank, **options)
    wanted = fsdp.full_state_dict(model, rank0_only=False)
    fsdp.export_safetensors(model, tmp_path / "export")
    other = wrap(CASE, in_place=True, **options)
    fsdp.load_safetensors(other, tmp_path / "export")
    found = fsdp.full_state_dict(other, rank0_only=False)
    assert all(torch.equal(found[key], wanted[key]) for key in dict(model.named_parameters()))
