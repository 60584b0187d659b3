"""Random programs of moves and acts: equal to plain torch, or refused on all ranks, and then right again."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.acts.machine import ActsAtAnyMoment

PROGRAMS = 120
MOVES = 12


def test_property_random_acts_at_random_moments() -> None:
    profile = settings.get_profile(settings.get_current_profile_name())
    examples = max(PROGRAMS, profile.max_examples) if profile.max_examples > 1000 else PROGRAMS
    run_state_machine_as_test(ActsAtAnyMoment, settings=settings(max_examples=examples, stateful_step_count=MOVES, deadline=None))
