"""Calls besides training, of models that lie on several meshes: tensor parallelism, experts, replicas. See dimensions.py."""

import pytest

from tests.api.dimensions import CHECKS
from tests.state_dict.test_dimensions import KINDS, on_all


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_works_over_several_meshes(kind: str, name: str) -> None:
    on_all(kind, lambda: CHECKS[name](kind))
