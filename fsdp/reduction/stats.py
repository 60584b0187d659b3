"""What was launched in a backward, and when: for people."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from fsdp.reduction.bucket import Bucket


class BucketStats(NamedTuple):
    """One reduction of the last backward that synchronised, as this rank saw it. Times are host times."""

    units: tuple[str, ...]
    """Whose gradients it reduced."""
    bytes: int
    """Of the whole gradients, in the dtype they were reduced in, padding included; of sparse ones, what this rank has."""
    pending: tuple[str, ...]
    """Trainable parameters whose gradients had not come when it was launched: zeros stood for them."""
    ready_s: float
    """When its gradients had come, or autograd had left its unit: seconds since the backward came to the first unit."""
    launched_s: float
    """When it was launched, in its turn."""


class _Launch(NamedTuple):
    buckets: Sequence[Bucket]
    came: Sequence[Sequence[bool]]
    bytes: int
    ready: float
    launched: float


class Launches:
    """The reductions of one backward. Costs a clock and a tuple a launch; words are made when somebody asks."""

    def __init__(self) -> None:
        self._of_last: list[_Launch] = []
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self._began = perf_counter()
        self._now: list[_Launch] = []

    def note(self, buckets: Sequence[Bucket], ready: float) -> None:
        """Some buckets were filled and launched; `ready` is when the last of them was (`time.perf_counter`)."""
        came = [bucket.came for bucket in buckets]
        size = sum([bucket.nbytes for bucket in buckets])
        self._now.append(_Launch(buckets, came, size, ready - self._began, perf_counter() - self._began))

    def end(self) -> None:
        """A backward that synchronised is over."""
        self._of_last = self._now

    def stats(self) -> list[BucketStats]:
        """In the order of the launches."""
        return [
            BucketStats(
                tuple(dict.fromkeys(bucket.name for bucket in one.buckets)),
                one.bytes,
                tuple(name for bucket, came in zip(one.buckets, one.came, strict=True) for name in bucket.missing(came)),
                one.ready,
                one.launched,
            )
            for one in self._of_last
        ]
