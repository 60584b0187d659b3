"""The engine's peak on many ranks is the one that a plan states."""

from pathlib import Path

import pytest

from fsdp.commands.rehearsal.rehearse import rehearse
from tests.commands.rehearsal.models import MODELS
from tests.commands.rehearsal.test_rehearse import job_of, options_of
from tests.commands.rehearsal.wide_program import SIZES, STRATEGIES
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of


@pytest.mark.skipif(not EVERYTHING, reason="60 trainings; make test-all runs them")
def test_the_peak_on_many_ranks_is_exact(tmp_path: Path) -> None:
    peaks = results_of("tests.commands.rehearsal.wide_program", 1, tmp_path)[0]
    assert len(peaks) == len(MODELS) * len(STRATEGIES) * len(SIZES)
    for (name, strategy, ranks), peak in peaks.items():
        found = rehearse(job_of(MODELS[name], ranks), options_of(MODELS[name], strategy, ranks))
        assert found.engine_peak == peak, (name, strategy, ranks)
