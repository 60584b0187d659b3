"""Ranks that go different ways on a mesh of two rows and two columns, as four processes over gloo."""

from pathlib import Path

import pytest

from tests.runtime.uneven.programs import MESH, SEEDS
from tests.support.paths import assert_alike, draw_program, plain
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_programs_have_the_numbers_of_a_single_process(tmp_path: Path) -> None:
    size = MESH[0] * MESH[1]
    results = results_of("tests.runtime.uneven.programs", size, tmp_path)
    for seed in SEEDS:
        wanted, weights = plain(draw_program(seed, size), size)
        for rank, found in enumerate(results):
            assert_alike(found[f"program {seed}"], (wanted[rank], weights))
