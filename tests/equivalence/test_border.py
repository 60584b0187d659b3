"""What other parts of torch do to a sharded model, over gloo: right, or refused before anything moves, on every rank."""

from typing import Any

import pytest

from tests.api.test_shard_grads import assert_same, plain_gradients
from tests.equivalence.border_programs import BORDER, ENGINES, OPTIMIZERS
from tests.equivalence.test_gloo import SIZES, run
from tests.shards.optimizer_table import rows
from tests.shards.programs import PROGRAMS
from tests.shards.test_border import REFUSED, assert_of_one_process
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


def test_a_parameter_that_one_rank_cannot_shard_stops_all_ranks_and_can_be_mended(ranks: Results) -> None:
    for one in ranks:
        said, gradients = one["bad parameter"]
        assert "parameter 'enter.weight' has layout torch.sparse_coo; make it dense" in said
        assert_same(gradients, plain_gradients(len(ranks)))


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_asked_of_shards_are_those_of_one_process(way: str, ranks: Results) -> None:
    for one in ranks:
        assert_same(one["gradients of shards"][way], plain_gradients(len(ranks)))


def test_a_rank_that_steps_alone_is_named_on_all(ranks: Results) -> None:
    for one in ranks:
        assert one["one rank steps"][1] == "nothing", "they go on, for example from a checkpoint"
        assert "was changed on rank 0 since the last backward, and nothing was changed on rank" in one["one rank steps"][0]


def test_a_module_that_one_rank_adds_is_named_on_all_and_they_go_on_without_it(ranks: Results) -> None:
    for rank, one in enumerate(ranks):
        said, after = one["added"]
        assert said.startswith("ShardingError: " if rank == 1 else "PeerFailed: ")
        assert "parameter 'more.weight' was added after wrapping" in said
        assert after == "nothing"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_right_or_refused(name: str, ranks: Results) -> None:
    row, found = rows()[name], [one["optimizers"][name] for one in ranks]
    if row.refused:
        assert_refused(row, found)
    else:
        assert_right(row, found, len(ranks))


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_full_tensor_is_refused_with_the_remedy(name: str, ranks: Results) -> None:
    for one in ranks:
        said = one["needs the full tensor"][name]
        assert said.startswith("ShardingError: ")
        assert REFUSED[name][1] in said


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_has_the_numbers_and_weights_of_one_process(name: str, ranks: Results) -> None:
    assert_of_one_process([one["scripts"][name] for one in ranks], PROGRAMS[name](range(len(ranks)), False))
