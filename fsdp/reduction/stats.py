"""Statistics of reductions for `fsdp.reducer_stats`: what was launched in a backward, and when."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from fsdp.reduction.bucket import Bucket


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


class ReducerStats:
    """The reductions of one backward. A launch costs a clock and a tuple; `report` makes the rest."""

    def __init__(self) -> None:
        self._last: list[_Launch] = []
        self.waited = 0.0
        """Seconds for which this rank has waited for reductions since it was wrapped, sums on the host included."""
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self._began = perf_counter()
        self._current: list[_Launch] = []

    def add_launch(self, buckets: Sequence[Bucket], ready: float) -> None:
        """Add a launch; `ready` is when the last of its buckets became ready (`time.perf_counter`)."""
        used = [bucket.local_used for bucket in buckets]
        size = sum([bucket.nbytes for bucket in buckets])
        self._current.append(_Launch(buckets, used, size, ready - self._began, perf_counter() - self._began))

    def add_wait(self, began: float) -> None:
        """Add a wait for reductions that began at `began` (`time.perf_counter`) and ends now."""
        self.waited += perf_counter() - began

    @property
    def totals(self) -> tuple[int, int]:
        """The number of reductions in the last backward that synchronised, and their bytes."""
        return len(self._last), sum(one.bytes for one in self._last)

    def end(self) -> None:
        """A backward that synchronised is over."""
        self._last = self._current

    def report(self) -> list[BucketStats]:
        """The reductions of the last backward that synchronised, in the order of their launches."""
        return [
            BucketStats(
                tuple(dict.fromkeys(bucket.name for bucket in one.buckets)),
                one.bytes,
                tuple(name for bucket, used in zip(one.buckets, one.used, strict=True) for name in bucket.missing_params(used)),
                one.ready,
                one.launched,
            )
            for one in self._last
        ]
