"""What the last step did, in numbers: counted always, because a step costs two clocks for each wait and each pass."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from fsdp.device.storage import MemoryTracker
from fsdp.reduction.stats import ReducerStats


class Step(NamedTuple):
    """One step of one root on one rank: its forwards and backwards, up to the backward that reduces. Times are host times."""

    number: int = 0
    began: float = 0.0
    """`time.perf_counter` at its first forward."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    gathers: int = 0
    gather_bytes: int = 0
    gather_wait_s: float = 0.0
    reductions: int = 0
    reduce_bytes: int = 0
    reduce_wait_s: float = 0.0
    period_s: float = 0.0
    """From the first forward of the step before to that of this one: with the optimizer and the data loader."""


class StepStats:
    """Counts one step at a time."""

    def __init__(self, gather_sizes: Sequence[Sequence[int]], reductions: ReducerStats, tracker: MemoryTracker) -> None:
        self._gather_sizes = [(len(sizes), sum(sizes)) for sizes in gather_sizes]
        """For each unit, the number of its all-gathers and the bytes that they fill."""
        self._reductions = reductions
        self._tracker = tracker
        self._last = Step()
        self._is_open = False
        """Whether a step has begun and its gradients are not reduced."""
        self._began = self._pass_began = self._forward_s = self._backward_s = self._gather_wait_s = 0.0
        self._gathers = self._bytes = 0
        self._reduce_wait_before = 0.0

    def begin_pass(self, is_forward: bool) -> None:
        """A forward of the root, or a backward, begins."""
        now = perf_counter()
        if is_forward and not self._is_open and torch.is_grad_enabled():
            self._begin(now)
        if not is_forward:
            self._forward_s += now - self._pass_began
        self._pass_began = now

    def add_gathers(self, units: Sequence[int]) -> None:
        """A unit was gathered, or several by one all-gather."""
        count, size = self._gather_sizes[units[0]]
        if len(units) > 1:
            count, size = 1, sum(self._gather_sizes[unit][1] for unit in units)
        self._gathers += count
        self._bytes += size

    def wait_all_gather(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which waits for an all-gather, and add its time."""
        began = perf_counter()
        wait()
        self._gather_wait_s += perf_counter() - began

    def end_backward(self, reduces: bool) -> None:
        """A backward has ended. `reduces`: it has reduced the gradients, which ends the step."""
        now = perf_counter()
        self._backward_s += now - self._pass_began
        # what follows until the next pass belongs to no pass
        self._pass_began = now
        self._is_open = not reduces
        if not reduces:
            return
        launched, reduced = self._reductions.totals
        self._last = Step(
            self._last.number + 1,
            self._began,
            self._forward_s,
            self._backward_s,
            self._gathers,
            self._bytes,
            self._gather_wait_s,
            launched,
            reduced,
            self._reductions.waited - self._reduce_wait_before,
            self._began - self._last.began if self._last.number else 0.0,
        )

    def abandon_step(self) -> None:
        """The step that runs was abandoned: the next forward begins another one."""
        self._is_open = False

    def report(self) -> dict[str, float]:
        """The last step as flat numbers."""
        step = self._last._asdict()
        del step["began"]
        return {**step, "bytes_held": self._tracker.now, "bytes_peak": self._tracker.peak}

    def _begin(self, now: float) -> None:
        self._began, self._is_open = now, True
        self._forward_s = self._backward_s = self._gather_wait_s = 0.0
        self._gathers = self._bytes = 0
        self._reduce_wait_before = self._reductions.waited
