"""Checkpoints between this engine, torch's FSDP2 and one process, over one dimension and over several."""

from pathlib import Path

import pytest

from tests.support.everything import EVERYTHING
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_what_each_distribution_saves_each_other_loads_to_the_bit(tmp_path: Path) -> None:
    for result in results_of("tests.checkpoint.matrix_program", 4, tmp_path, seconds=240):
        assert result.pop("compared") == ["190" if EVERYTHING else "77"]
        assert not result, sorted(result.items())[:5]
