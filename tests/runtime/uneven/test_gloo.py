"""Ranks that go different ways, as processes over gloo. Four of them are a mesh of two rows and two columns."""

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

from tests.runtime.uneven.joins import weights_after
from tests.runtime.uneven.programs import MESH, SEEDS, TIME_OUT, waiting_hops
from tests.support.everything import EVERYTHING
from tests.support.paths import Branching, assert_alike, batch, draw_program, plain
from tests.support.processes import beside_each_other, results_of
from tests.support.states import assert_near

pytestmark = pytest.mark.gloo

SIZES = (2, 3) if EVERYTHING else (3,)
FOUR = MESH[0] * MESH[1]
Ended = dict[str, Future[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """By number of ranks."""
    module = "tests.runtime.uneven.programs"
    sizes = (*SIZES, FOUR)
    return beside_each_other({str(size): partial(results_of, module, size, tmp_path_factory.mktemp("ranks")) for size in sizes})


@pytest.fixture(params=SIZES)
def ranks(request: pytest.FixtureRequest, ended: Ended) -> list[dict[str, Any]]:
    return ended[str(request.param)].result()


@pytest.mark.parametrize("size", [*SIZES, FOUR])
def test_programs_have_the_numbers_of_a_single_process(size: int, ended: Ended) -> None:
    for name, seed in [*((f"program {seed}", seed) for seed in SEEDS), *([] if size == FOUR else [("replicas", 0)])]:
        wanted, weights = plain(draw_program(seed, size), size)
        for rank, found in enumerate(ended[str(size)].result()):
            assert_alike(found[name], (wanted[rank], weights))


def test_a_rank_that_fails_where_others_do_not_go_is_named_and_all_go_on(ranks: list[dict[str, Any]]) -> None:
    *others, last = [found["failure"] for found in ranks]
    assert last[0] == "step 2: RuntimeError: this layer is broken"
    for one in others:
        assert one[0].startswith(f"step 2: PeerFailed: rank {len(others)} has abandoned the step"), one
        assert len(one) == 2 and one[1] == last[1]


def test_without_the_option_the_error_names_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "The ranks disagree" in found["skipping"] and "uneven_paths=True" in found["skipping"], found["skipping"]


def test_ranks_without_data_need_no_batch(ranks: list[dict[str, Any]]) -> None:
    wanted, _ = weights_after(None, 1, len(ranks), False, "before")
    for weights, _ in (found["joined"] for found in ranks):
        assert_near(weights, wanted)


def test_a_rank_in_a_collective_of_the_user_is_named_to_those_that_wait_for_it_and_all_go_on(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    torch.manual_seed(0)
    alone = Branching()
    for rank in range(size):
        (alone(batch(1, 0, rank), waiting_hops(rank, size)).sum() / size).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    text = f"rank {size - 1} has not called all_gather of head within {TIME_OUT} s, the time-out of its group."
    for said, norm in (found["waiting"] for found in ranks):
        assert said.startswith(text), said
        assert abs(norm - wanted) < 1e-5 * wanted
