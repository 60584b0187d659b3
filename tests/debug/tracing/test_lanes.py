"""Lanes of made-up records."""

from fsdp.debug.tracing.lanes import computing, outermost, steps, sublanes
from fsdp.debug.tracing.recorder import Collective, Phase, UnitEvent
from state_machine import Event


def test_a_unit_computes_between_its_events_without_the_phases_of_the_engine() -> None:
    events = [
        UnitEvent(0, 0, Event.PRE_FORWARD),
        UnitEvent(10, 1, Event.PRE_FORWARD),
        UnitEvent(30, 1, Event.POST_FORWARD),
        UnitEvent(40, 0, Event.POST_FORWARD),
        UnitEvent(60, 0, Event.PRE_BACKWARD),
        UnitEvent(70, 1, Event.PRE_BACKWARD),
        UnitEvent(90, 1, Event.POST_BACKWARD),
        UnitEvent(95, 0, Event.FINAL_CALLBACK),
    ]
    phases = [Phase(12, 15, "all_gather", 1), Phase(11, 18, "unshard", 1), Phase(92, 99, "commit", 0)]
    assert [tuple(one) for one in computing(events, phases)] == [
        (0, 10, 0, "forward"),
        (10, 11, 1, "forward"),
        (18, 30, 1, "forward"),
        (30, 40, 0, "forward"),
        (60, 70, 0, "backward"),
        (70, 90, 1, "backward"),
        (90, 92, 0, "backward"),
    ]


def test_phases_inside_others_are_left_out() -> None:
    inner, outer, later = Phase(12, 15, "a", 0), Phase(11, 18, "b", 0), Phase(18, 20, "c", 0)
    assert outermost([inner, later, outer]) == [outer, later]


def test_a_recompute_is_a_segment_apart_from_the_backward_around_it() -> None:
    events = [
        UnitEvent(0, 0, Event.PRE_BACKWARD),
        UnitEvent(5, 0, Event.PRE_RECOMPUTE),
        UnitEvent(9, 0, Event.POST_RECOMPUTE),
        UnitEvent(12, 0, Event.POST_BACKWARD),
    ]
    assert [one.kind for one in computing(events, [])] == ["backward", "recompute", "backward"]


def test_a_step_ends_where_the_next_begins_and_the_last_one_with_the_trace() -> None:
    one = [(0, Event.PRE_FORWARD), (5, Event.PRE_BACKWARD), (9, Event.FINAL_CALLBACK)]
    events = [UnitEvent(begin + time, 0, event) for begin in (0, 20) for time, event in one]
    assert [tuple(span) for span in steps(events, [0], 33)] == [(0, 20, 5, False), (20, 33, 25, False)]


def test_collectives_that_overlap_get_lanes_of_their_own() -> None:
    ends = [10, 20, 18, 30]
    found = [
        Collective("shard", 2, "all_gather", "a", 1, start, ended=end) for start, end in zip((0, 5, 11, 20), ends, strict=True)
    ]
    assert sublanes(found, 40) == [0, 1, 0, 0]
