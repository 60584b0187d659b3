"""What other parts of torch do to a sharded model, over gloo: right, or refused before anything moves, on every rank."""

from typing import Any

import pytest

from tests.equivalence.border_programs import BORDER, ENGINES, OPTIMIZERS
from tests.equivalence.test_gloo import SIZES, run
from tests.shards.optimizer_table import rows
from tests.shards.programs import PROGRAMS
from tests.shards.test_border import assert_of_one_process
from tests.shards.test_optimizers import assert_refused, assert_right

pytestmark = pytest.mark.gloo

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=SIZES, ids=[f"{size} processes" for size in SIZES])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(request.param, tmp_path_factory.mktemp("ranks"), *BORDER)


@pytest.mark.parametrize("engine", ENGINES)
def test_another_engine_is_refused_before_it_communicates(engine: str, ranks: Results) -> None:
    for one in ranks:
        said, same = one["other engines"][engine]
        assert said.startswith("ShardingError: Net is sharded by fsdp, which averages its gradients over the ranks already")
        assert same


def test_what_contains_a_unit_is_refused_as_well(ranks: Results) -> None:
    """DistributedDataParallel looks at the shards, which refuse to be taken for full tensors."""
    for one in ranks:
        said, same = one["around a container"]
        assert said.startswith("ShardingError: aten.cat.default on 'weight'")
        assert same


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_right_or_refused(name: str, ranks: Results) -> None:
    row, found = rows()[name], [one["optimizers"][name] for one in ranks]
    if row.refused:
        assert_refused(row, found)
    else:
        assert_right(row, found, len(ranks))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_has_the_numbers_and_weights_of_one_process(name: str, ranks: Results) -> None:
    assert_of_one_process([one["scripts"][name] for one in ranks], PROGRAMS[name](range(len(ranks)), False))
