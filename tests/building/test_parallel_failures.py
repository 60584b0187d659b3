"""A step that fails over several meshes is done again on all ranks, or on none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from tests.state_dict.test_dimensions import build, on_all, step
from tests.support.processes import results_of


def attempts(failing: set[int], steps: int = 3) -> list[str]:
    """What each of `steps` steps came to, of which the first fails in the forward of a unit on the ranks `failing`."""
    model = build("tensor parallel")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = [1] if torch.distributed.get_rank() in failing else []

    def fail(*_: Any) -> None:
        if left:
            left.pop()
            raise ValueError("first cause")

    model[1].register_forward_pre_hook(fail)
    said = []
    for number in range(steps):
        try:
            step("tensor parallel", model, optimizer, number)
            said.append("fine")
        except (ValueError, fsdp.WorldError) as failure:
            said.append(f"{type(failure).__name__}: {failure}")
    return said


def test_a_step_that_failed_on_all_ranks_is_done_again() -> None:
    for said in on_all("tensor parallel", lambda: attempts({0, 1, 2, 3})):
        assert said == ["ValueError: first cause", "fine", "fine"]


def test_a_rank_of_another_dimension_does_not_take_the_next_step_for_the_one_that_failed() -> None:
    first, *others = on_all("tensor parallel", lambda: attempts({0}))
    assert first[0] == "ValueError: first cause"
    assert "Rank 0 waits for gather_objects('Sequential'), operation 0 of communicator 'joint'" in first[1]
    assert all("fine" not in said for said in (first, *others))


@pytest.mark.gloo
def test_over_gloo_too(tmp_path: Path) -> None:
    results = results_of("tests.building.parallel_failure_program", 4, tmp_path)
    for result in results:
        assert result["said"][0] == result["said"][2] == "fine"
        assert all(map(torch.equal, result["weights"], results[0]["weights"]))
    assert [result["said"][1] for result in results] == [f"ValueError: first cause {rank}" for rank in range(4)]
    first, second, third, fourth = (result["said"][3:] for result in results)
    assert first[0] == "ValueError: first cause 0"
    assert "has not come back within 3 s after a step was abandoned" in first[1]
    assert "PeerFailed: rank 0 has abandoned the step, in unit '1', with ValueError: first cause 0" in third[0]
    assert "fine" not in (*second, *fourth)
