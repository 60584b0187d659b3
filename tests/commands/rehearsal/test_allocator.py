"""The peak that a plan states is the one that torch's allocator reaches, within five percent; the engine's part is exact."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fsdp.commands.rehearsal.rehearse import Batch, rehearse
from tests.commands.rehearsal.allocator_program import ACCUMULATED, ACCUMULATING, ROWS, SIZE, STRATEGIES
from tests.commands.rehearsal.models import MODELS
from tests.commands.rehearsal.test_rehearse import job_of, options_of
from tests.support.processes import results_of

Peaks = dict[tuple[str, str], tuple[int, int]]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peaks]:
    yield results_of("tests.commands.rehearsal.allocator_program", 1, tmp_path_factory.mktemp("peaks"))[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_the_allocator(name: str, strategy: str, peaks: Peaks) -> None:
    job = job_of(MODELS[name], SIZE)
    inputs = torch.cat([MODELS[name].inputs()] * ROWS).to("meta")
    found = rehearse(replace(job, batch=lambda: Batch((inputs,))), options_of(MODELS[name], strategy, SIZE))
    peak, engine = peaks[name, strategy]
    assert found.engine_peak == engine
    assert found.peak == pytest.approx(peak, rel=0.05)
    assert sum(found.held.values()) == found.peak


@pytest.mark.parametrize("name", ACCUMULATED)
def test_gradients_that_are_kept_under_no_sync_are_counted_once(name: str, peaks: Peaks) -> None:
    job = job_of(MODELS[name], SIZE, micro_batches=3)
    inputs = torch.cat([MODELS[name].inputs()] * ROWS).to("meta")
    found = rehearse(replace(job, batch=lambda: Batch((inputs,))), options_of(MODELS[name], "FULL_SHARD", SIZE))
    peak, engine = peaks[name, ACCUMULATING]
    assert found.engine_peak == engine
    assert found.peak == pytest.approx(peak, rel=0.03)
    assert sum(found.held.values()) == found.peak
