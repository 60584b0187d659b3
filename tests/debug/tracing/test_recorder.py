"""The recorder never says that a collective had ended before it had."""

import time

from fsdp.debug.tracing.recorder import Recorder


class SlowToAnswer:
    """A collective that ends while it is asked or waited for, as where the system stops the process for a moment."""

    def __init__(self) -> None:
        self.ended = 0

    def _end(self) -> None:
        before = time.perf_counter_ns()
        while time.perf_counter_ns() == before:
            pass
        self.ended = time.perf_counter_ns()

    def is_completed(self) -> bool:
        self._end()
        return True

    def wait(self) -> None:
        self._end()


def test_a_collective_that_ends_between_the_clock_and_the_question() -> None:
    recorder, work = Recorder(), SlowToAnswer()
    recorder.launch("gather", 2, "all_gather", "root", 8, lambda: work)
    recorder.look(time.perf_counter_ns())
    assert recorder.collectives[0].ended >= work.ended > 0


def test_a_collective_that_ends_in_a_wait_however_short() -> None:
    recorder, work = Recorder(), SlowToAnswer()
    recorder.launch("gather", 2, "all_gather", "root", 8, lambda: work).wait()
    assert recorder.collectives[0].ended >= work.ended > 0
