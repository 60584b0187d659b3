"""Works that are made of several."""

from datetime import timedelta
from functools import partial

import pytest

from fsdp.comm.work import WorkBatch

SECOND = timedelta(seconds=1)


class Recorded:
    """A work that says when it is awaited."""

    def __init__(self, log: list[str], name: str, fails: bool = False) -> None:
        self.log, self.name, self.fails, self.over = log, name, fails, False

    def wait(self, timeout: timedelta) -> None:
        self.log.append(self.name)
        if self.fails:
            raise RuntimeError(f"{self.name} timed out")
        self.over = True

    def is_completed(self) -> bool:
        return self.over


def test_works_together_are_over_when_the_last_one_is() -> None:
    log: list[str] = []
    works = [Recorded(log, "first"), Recorded(log, "second")]
    together = WorkBatch(iter([partial(works.__getitem__, 0), partial(works.__getitem__, 1)]))
    works[0].over = True
    assert not together.is_completed()
    together.wait(SECOND)
    assert log == ["first", "second"] and together.is_completed()


def test_one_that_has_waited_long_can_be_awaited_again() -> None:
    log: list[str] = []
    late = Recorded(log, "late", fails=True)
    together = WorkBatch([lambda: Recorded(log, "first"), lambda: late])
    with pytest.raises(RuntimeError, match="late timed out"):
        together.wait(SECOND)
    late.fails = False
    together.wait(SECOND)
    assert log == ["first", "late", "first", "late"] and together.is_completed()


def test_one_that_fails_is_reported_when_the_others_are_over() -> None:
    log: list[str] = []
    broken, late = Recorded(log, "broken", fails=True), Recorded(log, "late", fails=True)
    broken.over = True
    together = WorkBatch([lambda: broken, lambda: late])
    with pytest.raises(RuntimeError, match="late timed out"):
        together.wait(SECOND)
    late.fails = False
    with pytest.raises(RuntimeError, match="broken"):
        together.wait(SECOND)
    assert late.over


def test_what_was_launched_before_one_failed_is_awaited_before_the_failure() -> None:
    """It writes into memory that is given back after the failure."""
    log: list[str] = []

    def refuses() -> Recorded:
        raise RuntimeError("the connection is closed")

    together = WorkBatch([lambda: Recorded(log, "first"), refuses, lambda: Recorded(log, "third")])
    assert not log
    with pytest.raises(RuntimeError, match="closed"):
        together.wait(SECOND)
    assert log == ["first"]
