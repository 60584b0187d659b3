"""How a backward begins and ends: its kind, its final callback, and whether one is expected."""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Final

from fsdp.autograd.frames import GRAD, backward_caller, in_backward, in_split_backward
from fsdp.autograd.visits import Visit
from fsdp.comm.context import CommContext
from fsdp.errors import PeerFailed, ShardingError
from state_machine import BackwardEvent, Root

UNWINDING: Final = 5.0
"""Seconds that a thread of autograd may take to drop the graph task of a backward that has failed, and its graph."""


class _End:
    """Whether the final callback of a backward has been called or dropped, and has done its work."""

    is_over = False


class FinalCallback:
    """The callback at the end of a backward. If torch drops it uncalled, the backward has failed.

    It runs when the outermost graph task is done, also around reentrant checkpoints.

    On a device a thread of autograd may drop it a moment after the error was raised; see `PendingBackward.await_end`.
    """

    __slots__ = ("_end", "_number", "_on_ended", "_on_failed", "_root")

    def __init__(self, root: Root, on_ended: Callable[[], None], on_failed: Callable[[], None], end: _End) -> None:
        self._root = root
        self._end = end
        self._on_ended = on_ended
        self._on_failed = on_failed
        self._number = root.number

    def __call__(self) -> None:
        try:
            if self._is_current():
                self._on_ended()
        finally:
            self._end.is_over = True

    def __del__(self) -> None:
        try:
            if not self._end.is_over and self._is_current():
                self._on_failed()
        finally:
            self._end.is_over = True

    def _is_current(self) -> bool:
        # an abandoned step or the next forward may have ended the backward already
        return self._root.number == self._number


def kind_of_backward(synchronises: bool | None, may_be_split: bool) -> BackwardEvent:
    """Return the event with which the backward that runs begins. `synchronises`: whether it is not under `no_sync`.

    `may_be_split`: whether somebody takes the gradients of weights that are computed later.

    Raises:
        ShardingError: it is the first half of a backward that a pipeline schedule has split; or units differ in `synchronises`.
    """
    if synchronises is None:
        raise ShardingError(
            "the units of a root reduce their gradients together or not at all, and only some of this one's are told to do so; "
            "call set_requires_gradient_sync, or set_requires_all_reduce, on all of them or on the outermost module."
        )
    caller = backward_caller()
    only_grad = caller is GRAD
    if only_grad and not may_be_split and in_split_backward():
        raise ShardingError(
            "a pipeline schedule that computes gradients of inputs and of weights apart (zero bubble: stage_backward_input) "
            "would find no gradient of sharded weights: make the stage a fsdp.PipelineStage, or use a schedule with complete "
            "backwards, such as Schedule1F1B or ScheduleGPipe."
        )
    if not synchronises:
        return BackwardEvent.NO_SYNC_BEGINS
    if caller is not None and caller.co_name == "stage_backward":
        warnings.warn(
            "a stage of torch's pipelining reduces gradients with each micro-batch, and waits for the time-out if a rank of "
            "another stage fails: make it a fsdp.PipelineStage, which reduces them once a step.",
            stacklevel=2,
        )
    return BackwardEvent.GRAD_ONLY_BEGINS if only_grad else BackwardEvent.SYNC_BEGINS


class PendingBackward:
    """Whether a backward may still follow the last forward of a root, here and on the other ranks.

    A step can fail between its forward and its backward, where no hook sees it, such as in the loss.
    """

    __slots__ = ("_comms", "_end", "_epoch", "_on_host", "_visits", "expected")

    def __init__(self, comms: CommContext, on_host: bool, visits: Sequence[Visit]) -> None:
        """`visits`: those of all units of the root."""
        self._comms = comms
        self._on_host = on_host
        self._visits = visits
        self._epoch = 0
        """The epoch of the communicators when the last pass began."""
        self.expected = False
        """Whether the last forward made a graph, and no backward in which other ranks would wait has entered it."""
        self._end = _End()
        """That of the last backward. There was none."""
        self._end.is_over = True

    def callback(self, root: Root, on_ended: Callable[[], None], on_failed: Callable[[], None]) -> FinalCallback:
        """The final callback of a backward that begins."""
        self._end = _End()
        return FinalCallback(root, on_ended, on_failed, self._end)

    def await_end(self) -> None:
        """Wait until autograd's thread has dropped the last backward, if that has failed. Otherwise it is over already.

        That thread cleans up after the failure and notifies the other ranks. In the middle of it this thread must not begin a
        forward, read parameters or launch a collective.
        """
        if self._on_host or self._end.is_over or in_backward():
            return  # on the host the thread of the user drops it
        limit = time.monotonic() + UNWINDING
        while not self._end.is_over and time.monotonic() < limit:
            time.sleep(0.001)

    @property
    def is_due(self) -> bool:
        """Whether a backward may follow the last forward, whose graph is alive."""
        return self.expected and self._has_graph()

    def _has_graph(self) -> bool:
        """Whether the graph of a call of a unit is alive."""
        return any([visit.living_paths() for visit in self._visits])

    def was_abandoned(self) -> bool:
        """Return whether another model on the same communicators has abandoned a step since the last pass began."""
        epoch, self._epoch = self._epoch, self._comms.epoch()
        abandoned = epoch != self._epoch
        self.expected = self.expected and not abandoned
        return abandoned

    def announce_restart(self, unit: str) -> PeerFailed | None:
        """Announce a forward that follows a forward without a backward; return the error if that step failed on another rank.

        All ranks may have left the backward out, or the step has failed on this rank where no hook sees it.

        Raises:
            PeerFailed: the step failed on another rank, and a graph of it is alive on this rank, so that it may continue.
        """
        awaited, self.expected = self.expected, False
        failure = self._comms.shard_comm.announce_restart(unit) if awaited else None
        if failure is not None and self._has_graph():
            raise failure
        # its frames lead to those of the caller, and would keep the graph of the forward that begins
        return failure and failure.with_traceback(None)
