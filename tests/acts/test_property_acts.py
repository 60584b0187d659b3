"""Random programs of moves and acts are equal to plain torch, or refused on all ranks; and programs that once were neither."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.acts.machine import LATER, ActsAtAnyMoment, check
from tests.acts.trial import Arm, Backward, Do, Forward, Program

EXAMPLES = 60
MOVES = 14
FOUND: dict[str, tuple[Program, str, int]] = {
    "new memory for shards in inference mode": (
        (Do("convert one unit"), Do("evaluate in inference mode"), Forward(9)),
        "FULL_SHARD",
        2,
    ),
    "a forward in a recompute calls units that are frozen for it": (
        (Arm("in a recompute", "call the model frozen, thaw it"), Forward(9), Backward(9), Forward(1), Backward(1)),
        "FULL_SHARD",
        1,
    ),
    "a recompute thaws a unit that comes later in the backward": (
        (Arm("in a recompute", "freeze a parameter and thaw it"), Forward(1), Do("freeze a parameter"), Backward(1, retain=True)),
        "FULL_SHARD",
        1,
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_a_program_that_was_found(found: str) -> None:
    program, door, size = FOUND[found]
    check([*program, *LATER], door, size, 0)


def test_random_programs_are_right_or_refused() -> None:
    run_state_machine_as_test(
        ActsAtAnyMoment,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=MOVES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
