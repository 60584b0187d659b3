"""A routed group does for torch's functions what the group does that it stands for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.comm.routed_program import CALLS
from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("routed")
    return [life for rank in results_of("tests.comm.routed_program", 2, folder) for life in rank]


def test_it_is_found_by_the_name_of_the_group_and_equals_it(lives: list[dict[str, Any]]) -> None:
    assert [(life["routed"], life["same"]) for life in lives] == [("RoutedGroup", True)] * 4


@pytest.mark.parametrize("name", [*CALLS, "shard"])
@pytest.mark.parametrize("which", ["routed", "held"])
def test_what_torch_calls_on_it_does_the_same(which: str, name: str, lives: list[dict[str, Any]]) -> None:
    for life in lives:
        mine, theirs = (tree_flatten(life["calls"][one][name]) for one in (which, "before"))
        assert mine[1] == theirs[1]
        for one, other in zip(mine[0], theirs[0], strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
