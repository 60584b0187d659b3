"""Work that goes on while training does: one piece at a time for the ranks of a group, and nobody loses its failure.

Rule: a thread here never touches a channel of training; what it has to agree on goes over one of its own (context.py).
"""

import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fsdp.comm.process_group import Communicator
from fsdp.comm.simulated import current_rank
from fsdp.errors import ShardingError


class Saving:
    """A save, done or under way. What `fsdp.save` returns."""

    def __init__(self, path: Path, future: "Future[None]") -> None:
        self.path = path
        self._future = future
        self._heard = False

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done() else 'under way'})"

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Return the path when the checkpoint is there.

        Raises:
            Exception: why there is none, as `fsdp.save` would have raised it.
            TimeoutError: it is still under way after `timeout` seconds.
        """
        if self._future.exception(timeout) is not None:
            self._heard = True
        self._future.result()
        return self.path

    result = wait
    """As futures name it."""

    def _settle(self) -> None:
        """Return when it is over.

        Raises:
            ShardingError: it failed, and nobody has heard of that.
        """
        failure = self._future.exception()
        if failure is not None and not self._heard:
            self._heard = True
            raise ShardingError(f"save: the save of {self.path} before this one failed in the background: {failure}") from failure


def finished(path: Path) -> Saving:
    """One that is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return Saving(path, future)


def go_on(world_comm: Communicator, path: Path, work: Callable[[], None]) -> Saving:
    """Do `work` on a thread; in a simulated world at once, so that every run can be repeated."""
    if current_rank() is not None:
        future: Future[None] = Future()
        _run(path, work, future)
    else:
        # a thread of an executor is joined when the interpreter ends, so nothing is cut short then
        threads = ThreadPoolExecutor(1, thread_name_prefix="fsdp.save")
        future = Future()
        threads.submit(_run, path, work, future)
        threads.shutdown(wait=False)
    _last[world_comm] = saving = Saving(path, future)
    return saving


def settle(world_comm: Communicator) -> None:
    """Return when nothing goes on in the background for these ranks. Does not communicate.

    Raises:
        ShardingError: what went on has failed, and nobody has heard of that.
    """
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
