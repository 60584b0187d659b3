"""The clock of the pretend accelerator: records written by hand, and what a computing stream waits for in them."""

import pytest

from tests.support.accelerator.timeline import Speeds, Timeline

SPEEDS = Speeds(operations=10.0, bytes=1.0, link=1.0)
GATHER, SCATTER = 0, 1


def both(lines: str) -> str:
    """The lines for two devices that do the same. `D` stands for the device."""
    return "\n".join(line.strip().replace("D", str(device)) for device in range(2) for line in lines.strip().splitlines())


def test_a_kernel_takes_as_long_as_its_bytes_or_its_products_whichever_is_more() -> None:
    record = "mark 0 0\nkernel 0 0 1 mm 50 2\nkernel 0 0 2 add 0 3\nhost 0 0 2\nmark 0 1"
    step = Timeline(record, SPEEDS).between(0, 0, 1)
    assert (step.seconds, step.computing, step.waits) == (8.0, 8.0, [])


def test_what_comes_before_a_record_or_a_mark_costs_nothing() -> None:
    record = "wait 0 0 8 0 3 4\nkernel 0 0 9 add 0 5\nhost 0 0 9\nmark 0 0\nkernel 0 0 10 add 0 2\nhost 0 0 10\nmark 0 1"
    assert Timeline(record, SPEEDS).between(0, 0, 1)[1:4] == (5.0, 7.0, 2.0)


def test_a_wait_has_its_reasons_step_by_step_back() -> None:
    """A copy on stream 1, then its gather on stream 2, while the stream that computes has work for 1 second."""
    record = both(
        """mark D 0
        kernel D 1 1 copy_ 0 2
        wait D 2 1 D 1 1
        collective D 2 2 7 2 0 4
        kernel D 0 1 add 0 1
        wait D 0 2 D 2 2
        kernel D 0 3 add 0 1
        host D 0 3
        mark D 1"""
    )
    for device in range(2):
        step = Timeline(record, SPEEDS).between(device, 0, 1)
        assert step.seconds == 7.0 and step.computing == 2.0
        assert [wait[:2] for wait in step.waits] == [(1.0, 6.0)]
        assert step.reasons == {"copies": 1.0, "gathers": 4.0}


def test_a_collective_waits_for_the_rank_that_comes_last() -> None:
    record = "\n".join(
        [
            *("mark 0 0", "kernel 0 0 1 add 0 1", "wait 0 1 1 0 0 1", "collective 0 1 2 7 2 1 3", "host 0 1 2", "mark 0 1"),
            *("mark 1 0", "kernel 1 0 1 add 0 5", "wait 1 1 1 1 0 1", "collective 1 1 2 7 2 1 3", "host 1 1 2", "mark 1 1"),
        ]
    )
    timeline = Timeline(record, SPEEDS)
    assert timeline.between(0, 0, 1).reasons == {"peers": 4.0, "reductions": 3.0}
    assert timeline.between(1, 0, 1).reasons == {"reductions": 3.0}


def test_a_host_that_waits_launches_later() -> None:
    record = "mark 0 0\nkernel 0 1 1 copy_ 0 3\nhost 0 1 1\nkernel 0 0 1 add 0 2\nhost 0 0 1\nmark 0 1"
    step = Timeline(record, SPEEDS).between(0, 0, 1)
    assert (step.seconds, step.computing, step.reasons) == (5.0, 2.0, {"copies": 3.0})


TWO = both(
    """mark D 0
    collective D 1 1 7 2 0 4
    kernel D 0 1 add 0 1
    wait D 2 1 D 0 1
    collective D 2 2 8 2 1 2
    host D 1 1
    host D 2 2
    mark D 1"""
)
"""A gather of 4 bytes from the beginning, and a reduction of 2 on another communicator, after 1 second."""


def test_communicators_share_the_link() -> None:
    timeline = Timeline(TWO, SPEEDS)
    # both have half of it from second 1 on: the reduction is over after 4 more, and then the gather has 1 byte left
    assert [(one.begin, one.end) for one, _ in timeline.collectives(0)] == [(0.0, 6.0), (1.0, 5.0)]
    assert timeline.between(0, 0, 1).seconds == 6.0


def test_communicators_may_have_links_of_their_own() -> None:
    timeline = Timeline(TWO, SPEEDS, shares_link=False)
    assert [(one.begin, one.end) for one, _ in timeline.collectives(0)] == [(0.0, 4.0), (1.0, 3.0)]


def test_collectives_of_one_communicator_take_turns() -> None:
    """A gather that is ready stands behind a reduction that is not."""
    record = both(
        """mark D 0
        kernel D 0 1 add 0 3
        wait D 1 1 D 0 1
        collective D 1 2 7 2 1 2
        collective D 1 3 8 2 0 4
        host D 1 3
        mark D 1"""
    )
    timeline = Timeline(record, SPEEDS)
    assert [(one.begin, one.end) for one, _ in timeline.collectives(1)] == [(3.0, 5.0), (5.0, 9.0)]
    assert timeline.between(1, 0, 1).reasons == {"reductions": 2.0, "gathers": 4.0}


def test_ranks_in_other_groups_have_other_links() -> None:
    lines = ["mark D 0", "collective D 1 1 KEY 2 0 4", "host D 1 1", "mark D 1"]
    pairs = {0: 7, 1: 7, 2: 8, 3: 8}
    record = "\n".join(line.replace("D", str(device)).replace("KEY", str(key)) for device, key in pairs.items() for line in lines)
    timeline = Timeline(record, SPEEDS)
    assert timeline.devices == [0, 1, 2, 3]
    assert [timeline.between(device, 0, 1).seconds for device in timeline.devices] == [4.0] * 4


def test_streams_that_wait_for_ever_are_named() -> None:
    with pytest.raises(AssertionError, match="wait for ever"):
        Timeline("collective 0 1 1 7 2 0 4", SPEEDS)
