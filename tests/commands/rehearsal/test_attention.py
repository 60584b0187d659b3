"""Models with attention: what a rehearsal counts is what autograd keeps and what torch's allocator gives out."""

from collections.abc import Iterator
from functools import cache, partial

import pytest

from fsdp.commands.rehearsal.rehearse import Rehearsal, rehearse
from tests.commands.rehearsal.allocator_program import SIZE
from tests.commands.rehearsal.attention_models import MODELS
from tests.commands.rehearsal.attention_program import MESH, WAYS, Measured, units_of
from tests.commands.rehearsal.test_rehearse import job_of, options_of
from tests.support.processes import results_of

Found = tuple[dict[tuple[str, str, bool], tuple[int, int, int]], dict[str, int]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    yield results_of("tests.commands.rehearsal.attention_program", 1, tmp_path_factory.mktemp("attention"))[0]


@cache
def rehearsed(name: str, strategy: str, recompute: bool) -> Rehearsal:
    case = MODELS[name]
    options = options_of(case, strategy, SIZE)
    if strategy == "HYBRID_SHARD":
        options["mesh"] = MESH
    return rehearse(job_of(case, SIZE), options, partial(units_of, case=case) if recompute else None)


@pytest.mark.parametrize(("strategy", "recompute"), WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_and_the_activations_are_those_of_the_allocator(
    name: str, strategy: str, recompute: bool, measured: Found
) -> None:
    found, taken = rehearsed(name, strategy, recompute), Measured(*measured[0][name, strategy, recompute])
    assert found.engine_peak == taken.engine
    assert found.saved == pytest.approx(taken.kept, rel=0.001)
    assert found.peak == pytest.approx(taken.peak, rel=0.001)


@pytest.mark.parametrize("name", MODELS)
def test_the_activations_are_what_autograd_saves(name: str, measured: Found) -> None:
    assert rehearsed(name, "FULL_SHARD", False).saved == pytest.approx(measured[1][name], rel=0.001)
