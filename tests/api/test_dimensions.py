"""Calls besides training, of models that lie on several meshes: tensor parallelism, experts, replicas. See dimensions.py."""

from pathlib import Path

import pytest

from tests.api.dimensions import CHECKS
from tests.state_dict.test_dimensions import KINDS, on_all
from tests.support.processes import results_of


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_works_over_several_meshes(kind: str, name: str) -> None:
    on_all(kind, lambda: CHECKS[name](kind))


@pytest.mark.gloo
def test_it_works_over_gloo(tmp_path: Path) -> None:
    for passed in results_of("tests.api.dimensions", 4, tmp_path):
        assert len(passed) == 2 * len(CHECKS)
