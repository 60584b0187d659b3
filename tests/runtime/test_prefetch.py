"""The record of a pass, and what prefetch takes from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp.runtime.prefetch import PrefetchSchedule


def run(schedule: PrefetchSchedule, *units: int) -> list[tuple[int, ...]]:
    """One pass; what each need asked to gather ahead."""
    schedule.begin()
    return [tuple(schedule.needed(unit)) for unit in units]


Asked = list[tuple[int, ...]]
PASSES: dict[str, tuple[int, list[tuple[tuple[int, ...], Asked]]]] = {
    "the first pass asks for nothing": (2, [((0, 1, 2), [(), (), ()])]),
    "no depth": (0, [((0, 1, 2), [(), (), ()]), ((0, 1, 2), [(), (), ()])]),
    "the next unit": (1, [((0, 1, 2), [(), (), ()]), ((0, 1, 2), [(1,), (2,), ()])]),
    "the next two units": (2, [((0, 1, 2), [(), (), ()]), ((0, 1, 2), [(1, 2), (2,), ()])]),
    "as many as there are": (9, [((0, 1, 2), [(), (), ()]), ((0, 1, 2), [(1, 2), (2,), ()])]),
    "a pass that leaves the record asks no further and becomes the record": (
        1,
        [
            ((0, 1, 2, 3), [(), (), (), ()]),
            ((0, 2, 1, 3), [(1,), (), (), ()]),
            ((0, 2, 1, 3), [(2,), (1,), (3,), ()]),
        ],
    ),
    "a shorter pass becomes the record": (1, [((0, 1, 2), [(), (), ()]), ((0, 1), [(1,), (2,)]), ((0, 1), [(1,), ()])]),
    "a longer pass becomes the record": (1, [((0,), [()]), ((0, 1), [(), ()]), ((0, 1), [(1,), ()])]),
    "an empty pass changes no record": (1, [((0, 1), [(), ()]), ((), []), ((0, 1), [(1,), ()])]),
    "a unit may come twice": (1, [((0, 1, 0, 2), [(), (), (), ()]), ((0, 1, 0, 2), [(1,), (0,), (2,), ()])]),
}


@pytest.mark.parametrize("passes", PASSES)
def test_a_pass_asks_ahead_as_the_record_says(passes: str) -> None:
    depth, rounds = PASSES[passes]
    schedule = PrefetchSchedule(depth)
    assert [run(schedule, *units) for units, _ in rounds] == [asked for _, asked in rounds]


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6), st.integers(0, 3))
def test_asks_are_the_same_for_all_who_do_alike_and_only_what_was_recorded(passes: list[list[int]], depth: int) -> None:
    one, other = PrefetchSchedule(depth), PrefetchSchedule(depth)
    before: set[int] = set()
    for units in passes:
        asked = run(one, *units)
        assert asked == run(other, *units)
        assert all(len(ahead) <= depth and set(ahead) <= before for ahead in asked)
        before |= set(units)


def test_the_units_that_the_user_gives_are_gathered_ahead_whatever_the_record_says() -> None:
    schedule = PrefetchSchedule(1)
    schedule.give(0, [2, 1])
    assert run(schedule, 0, 1, 2) == [(2, 1), (), ()]
    assert run(schedule, 0, 1, 2) == [(2, 1), (2,), ()]
