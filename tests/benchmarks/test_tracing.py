"""The benchmark of traces times steps with a trace and without, and compares what they dispatch."""

import pytest
import tracing


def test_a_trace_dispatches_nothing_and_steps_are_timed_in_turns() -> None:
    settings = tracing.Settings(tensors=2, units=2, width=8, repeats=2, steps=3)
    case = tracing.over_nothing(settings)
    assert {way: len(found) for way, found in case["seconds"].items()} == dict.fromkeys(tracing.WAYS, 6)
    plain, traced, after = (case["operations"][way] for way in tracing.WAYS)
    assert plain and plain == traced == after


def test_added_time_and_differing_operations_are_judged() -> None:
    operations = {"plain": {"aten.mm": 2}, "traced": {"aten.mm": 2}, "after": {"aten.mm": 3}}
    seconds = {"plain": [2.0, 1.0], "traced": [1.1, 3.0], "after": [1.0, 1.0]}
    time, count = tracing.judge("made up", {"seconds": seconds, "operations": operations})
    assert time.value == pytest.approx(0.1) and not time.holds
    assert count.value == 1 and not count.holds
