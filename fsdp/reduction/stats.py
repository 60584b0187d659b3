"""What the last step did, in numbers. Counted always: a step costs two clocks for each wait and each pass, and one a launch."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Final, NamedTuple

import torch

from fsdp.device.storage import MemoryTracker
from fsdp.reduction.bucket import Bucket

_BYTES: Final = attrgetter("bytes")
_LOCAL_USED: Final = attrgetter("local_used")
_NBYTES: Final = attrgetter("nbytes")
_ZEROS: Final[dict[str, float]] = {
    **dict.fromkeys(("number", "gathers", "gather_bytes", "reductions", "reduce_bytes"), 0),
    **dict.fromkeys(("forward_s", "backward_s", "gather_wait_s", "reduce_wait_s", "period_s"), 0.0),
}
"""The numbers of one step of one root on one rank: its forwards and backwards, up to the backward that reduces.

Times are host times. The period is from the first forward of the step before: with the optimizer and the data loader.
`reduce_wait_s` includes sums on the host.
"""


class BucketStats(NamedTuple):
    """One reduction of the last backward that synchronised, on this rank. Times are host times."""

    units: tuple[str, ...]
    """The units whose gradients it reduced."""
    bytes: int
    """Size of the unsharded gradients in the dtype of the reduction, with padding; of sparse ones, of the rows of this rank."""
    pending: tuple[str, ...]
    """Trainable parameters whose gradients were missing at the launch. Zeros stood for them."""
    ready_s: float
    """When its gradients had arrived, or autograd had left its unit: seconds since the backward reached the first unit."""
    launched_s: float
    """When it was launched, in its turn."""


class _Launch(NamedTuple):
    buckets: Sequence[Bucket]
    used: Sequence[Sequence[bool]]
    bytes: int
    ready: float
    launched: float


class StepStats:
    """Counts the steps of one root, one at a time."""

    def __init__(self, gather_sizes: Sequence[Sequence[int]], tracker: MemoryTracker) -> None:
        self._gather_sizes = [(len(sizes), sum(sizes)) for sizes in gather_sizes]
        """For each unit, the number of its all-gathers and the bytes that they fill."""
        self._tracker = tracker
        self._last: dict[str, float] = {**_ZEROS}
        """The last step that was completed."""
        self._step = {**self._last}
        """The step that runs."""
        self._is_open = False
        """Whether a step has begun and its gradients are not reduced."""
        self._began = self._last_began = self._pass_began = self._reductions_began = 0.0
        """When the first forward of this step began, that of the last one, the pass, and the backward."""
        self._reduced: list[_Launch] = []
        """The reductions of the last backward that synchronised."""
        self._launches: list[_Launch] = []

    def begin_pass(self, is_forward: bool) -> None:
        """A forward of the root, or a backward, begins."""
        now = perf_counter()
        if is_forward and not self._is_open and torch.is_grad_enabled():
            self._began, self._is_open = now, True
            self._step = {**_ZEROS}
        if not is_forward:
            self._step["forward_s"] += now - self._pass_began
            self._reductions_began, self._launches = now, []
        self._pass_began = now

    def add_gathers(self, units: Sequence[int]) -> None:
        """A unit was gathered, or several by one all-gather."""
        count, size = self._gather_sizes[units[0]]
        if len(units) > 1:
            count, size = 1, sum(self._gather_sizes[unit][1] for unit in units)
        self._step["gathers"] += count
        self._step["gather_bytes"] += size

    def wait(self, name: str, until_done: Callable[[], None]) -> None:
        """Call `until_done`, which waits for a collective, and add its time to the number `name` of the step."""
        began = perf_counter()
        until_done()
        self._step[name] += perf_counter() - began

    def add_launch(self, buckets: Sequence[Bucket], ready: float) -> None:
        """Add a reduction; `ready` is when the last of its buckets became ready (`time.perf_counter`)."""
        used, size, began = [*map(_LOCAL_USED, buckets)], sum(map(_NBYTES, buckets)), self._reductions_began
        self._launches.append(_Launch(buckets, used, size, ready - began, perf_counter() - began))

    def end_backward(self, reduces: bool) -> None:
        """A backward has ended. `reduces`: it has reduced the gradients, which ends the step."""
        now = perf_counter()
        self._step["backward_s"] += now - self._pass_began
        # what follows until the next pass belongs to no pass
        self._pass_began = now
        self._is_open = not reduces
        if not reduces:
            return
        self._reduced = self._launches
        self._last = {
            **self._step,
            "number": self._last["number"] + 1,
            "reductions": len(self._reduced),
            "reduce_bytes": sum(map(_BYTES, self._reduced)),
            "period_s": self._began - self._last_began if self._last["number"] else 0.0,
        }
        self._last_began = self._began

    def abandon_step(self) -> None:
        """The step that runs was abandoned: the next forward begins another one."""
        self._is_open = False

    def report(self) -> dict[str, float]:
        """The last step as flat numbers."""
        return {**self._last, "bytes_held": self._tracker.now, "bytes_peak": self._tracker.peak}

    def report_reductions(self) -> list[BucketStats]:
        """The reductions of the last backward that synchronised, in the order of their launches."""
        return [
            BucketStats(
                tuple(dict.fromkeys(bucket.name for bucket in one.buckets)),
                one.bytes,
                tuple(name for bucket, used in zip(one.buckets, one.used, strict=True) for name in bucket.missing_params(used)),
                one.ready,
                one.launched,
            )
            for one in self._reduced
        ]
