"""The record of a pass, and what prefetch takes from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp.runtime.prefetch import PrefetchSchedule


def run(schedule: PrefetchSchedule, *units: int) -> list[tuple[int, ...]]:
    """One pass; what each need asked to gather ahead."""
    schedule.begin()
    return [tuple(schedule.needed(unit)) for unit in units]


def test_the_first_pass_asks_for_nothing() -> None:
    assert run(PrefetchSchedule(2), 0, 1, 2) == [(), (), ()]


@pytest.mark.parametrize(
    ("depth", "asked"), [(0, [(), (), ()]), (1, [(1,), (2,), ()]), (2, [(1, 2), (2,), ()]), (9, [(1, 2), (2,), ()])]
)
def test_the_second_pass_asks_for_the_next_units(depth: int, asked: list[tuple[int, ...]]) -> None:
    schedule = PrefetchSchedule(depth)
    run(schedule, 0, 1, 2)
    assert run(schedule, 0, 1, 2) == asked


def test_a_pass_that_leaves_the_record_asks_no_further_and_becomes_the_record() -> None:
    schedule = PrefetchSchedule(1)
    run(schedule, 0, 1, 2, 3)
    assert run(schedule, 0, 2, 1, 3) == [(1,), (), (), ()]
    assert run(schedule, 0, 2, 1, 3) == [(2,), (1,), (3,), ()]


def test_a_shorter_pass_becomes_the_record() -> None:
    schedule = PrefetchSchedule(1)
    run(schedule, 0, 1, 2)
    assert run(schedule, 0, 1) == [(1,), (2,)]
    assert run(schedule, 0, 1) == [(1,), ()]


def test_a_longer_pass_becomes_the_record() -> None:
    schedule = PrefetchSchedule(1)
    run(schedule, 0)
    assert run(schedule, 0, 1) == [(), ()]
    assert run(schedule, 0, 1) == [(1,), ()]


def test_an_empty_pass_changes_no_record() -> None:
    schedule = PrefetchSchedule(1)
    run(schedule, 0, 1)
    run(schedule)
    assert run(schedule, 0, 1) == [(1,), ()]


def test_a_unit_may_come_twice() -> None:
    schedule = PrefetchSchedule(1)
    run(schedule, 0, 1, 0, 2)
    assert run(schedule, 0, 1, 0, 2) == [(1,), (0,), (2,), ()]


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
