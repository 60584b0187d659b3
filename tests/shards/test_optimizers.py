"""Each optimizer on shards: the weights of one process, or a refusal on every rank, as docs/reference/optimizers.md says."""

from typing import Any

import pytest
import torch

import fsdp
from fsdp.shards.optimizer_steps import ELEMENT_WISE_OPTIMIZERS
from tests.shards.optimizer_table import WITHIN, Row, rows, rows_elsewhere, trained
from tests.support.everything import some
from tests.support.models import assert_close, join_all

ROWS = rows()


@pytest.mark.parametrize("size", some(3, 2))
@pytest.mark.parametrize("name", ROWS)
def test_an_optimizer_is_right_or_refused(name: str, size: int) -> None:
    row = ROWS[name]
    strategy = "NO_SHARD" if "NO_SHARD" in name else "FULL_SHARD"
    found = fsdp.simulate(size, lambda rank: outcome(row, rank, strategy))
    if row.refused:
        assert_refused(row, found)
    else:
        assert_right(row, found, size)


def assert_refused(row: Row, found: list[Any]) -> None:
    begin, _, end = row.refused.partition(" ... ")
    for told in found:
        assert isinstance(told, str), "it was not refused"
        assert told.startswith(begin)
        assert end in told


def outcome(row: Row, rank: int, strategy: str = "FULL_SHARD") -> Any:
    """The weights of this rank, or the text of the error."""
    try:
        return trained(row, range(rank, rank + 1), sharding_strategy=strategy)
    except (fsdp.ShardingError, RuntimeError) as refusal:
        return str(refusal)


def assert_right(row: Row, found: list[Any], size: int) -> None:
    wanted = trained(row, range(size))
    begun = row.case.model()
    assert all(isinstance(one, dict) for one in found), found
    assert_close(join_all(found, wanted), {**wanted}, WITHIN)
    assert any(not torch.equal(weight, begun.get_parameter(name)) for name, weight in wanted.items()), "nothing was trained"


@pytest.mark.parametrize(("name", "row"), list(rows_elsewhere()))
@pytest.mark.parametrize("size", some(3, 2))
def test_an_optimizer_of_another_package_is_refused(name: str, row: Row, size: int) -> None:
    assert_refused(row, fsdp.simulate(size, lambda rank: outcome(row, rank)))


class Compiled(torch.optim.SGD):
    """Stands for torchao's, which need not be installed."""

    __module__ = "torchao.optim.adam"


def test_a_compiled_optimizer_is_refused_before_it_steps() -> None:
    told = fsdp.simulate(2, lambda rank: outcome(Row(lambda model: Compiled(model.parameters())), rank))
    assert told[0].startswith(
        "Compiled.step: torchao compiles it, and a compiled step does not know shards. Use an optimizer that"
    )


def test_every_optimizer_that_takes_shards_for_ordinary_tensors_is_in_the_table() -> None:
    for optimizer in ELEMENT_WISE_OPTIMIZERS:
        assert not ROWS[f"torch.optim.{optimizer.__name__}()"].refused


def test_a_refusal_names_the_optimizer_and_one_that_fits() -> None:
    told = fsdp.simulate(2, lambda rank: outcome(ROWS["torch.optim.Muon()"], rank))
    assert told[0] == (
        "Muon.step: aten.permute.default on 'enter.weight', of which this rank holds (4, 6) of (7, 6): it needs the full tensor. "
        "Use an optimizer that computes each element of a parameter by itself, such as torch.optim.AdamW or SGD; "
        "docs/reference/optimizers.md lists them."
    )
