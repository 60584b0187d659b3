"""Saves that run on a thread while training continues: one at a time for each group of ranks, and no failure is lost.

Rule: the thread never uses a communicator of training. Its agreements use a communicator of their own
(comm/open_communicators.py).
"""

import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fsdp.comm.communicator import Communicator
from fsdp.comm.simulated import current_rank
from fsdp.errors import ShardingError


class Saving:
    """A save, finished or running. `fsdp.save` returns it."""

    def __init__(self, path: Path, future: "Future[None]") -> None:
        self.path = path
        self._future = future
        self._reported = False

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done() else 'under way'})"

    def done(self) -> bool:
        """True once the save has succeeded or failed."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete; return its path.

        Raises:
            Exception: the error that made the save fail, as `fsdp.save` would have raised it.
            TimeoutError: the save is still running after `timeout` seconds.
        """
        if self._future.exception(timeout) is not None:
            self._reported = True
        self._future.result()
        return self.path

    result = wait
    """The name that futures use."""

    def _settle(self) -> None:
        """Wait until the save is over. Raise ShardingError if it failed, and neither `wait` nor this has said so before."""
        failure = self._future.exception()
        if failure is not None and not self._reported:
            self._reported = True
            raise ShardingError(f"save: the save of {self.path} before this one failed in the background: {failure}") from failure


def finished(path: Path) -> Saving:
    """A save that has succeeded."""
    future: Future[None] = Future()
    future.set_result(None)
    return Saving(path, future)


def run_in_background(world_comm: Communicator, path: Path, work: Callable[[], None]) -> Saving:
    """Run `work` on a thread. In a simulated world it runs before this returns, so that every run can be repeated."""
    future: Future[None] = Future()
    if current_rank() is not None:
        _run(path, work, future)
    else:
        # the interpreter joins the threads of an executor when it ends, so no save is cut short
        threads = ThreadPoolExecutor(1, thread_name_prefix="fsdp.save")
        threads.submit(_run, path, work, future)
        threads.shutdown(wait=False)
    _last[world_comm] = saving = Saving(path, future)
    return saving


def wait_for_last(world_comm: Communicator) -> None:
    """Wait until no save of these ranks is running, see `Saving._settle`. Does not communicate."""
    if (last := _last.get(world_comm)) is not None:
        last._settle()


def _run(path: Path, work: Callable[[], None], future: "Future[None]") -> None:
    try:
        work()
    except BaseException as failure:
        future.set_exception(failure)
        if not isinstance(failure, Exception):
            raise
        # a program may end without waiting
        warnings.warn(f"save: {path} was not saved: {failure} (wait() raises this, or the next save)")
    else:
        future.set_result(None)


_last: "weakref.WeakKeyDictionary[Communicator, Saving]" = weakref.WeakKeyDictionary()
