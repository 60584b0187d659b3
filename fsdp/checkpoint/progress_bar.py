"""The progress of a long call: a bar, or calls of a function of the user."""

import warnings
from collections.abc import Callable
from typing import Any

from fsdp.errors import ShardingError, require_package

ProgressOption = bool | Callable[[int, int], object]
"""The values of the option `progress`: True for a bar of rank 0's bytes, or a function of this rank's (done, total) bytes."""


class Progress:
    """Bytes done of all bytes, on one rank. A failure to report them is only warned of, because a save matters more."""

    def __init__(self, function_name: str, option: ProgressOption, rank: int) -> None:
        self._function_name = function_name
        self._option = option
        self._report: Callable[[int, int], object] | None = None if isinstance(option, bool) else option
        self._wants_bar = option is True and rank == 0
        self._bar: Any = None
        self._done = self._total = 0

    def check(self) -> None:
        """Raise ShardingError if a bar is asked for and tqdm is missing, or the option is neither a bool nor a function."""
        if not isinstance(self._option, bool) and not callable(self._option):
            raise ShardingError(
                f"{self._function_name}: progress is {self._option!r}; give True, or a function of (done_bytes, total_bytes)."
            )
        if self._option is True:
            require_package(f"{self._function_name}: progress=True", "tqdm")

    def begin(self, total: int) -> None:
        """Report that none of `total` bytes is done."""
        self._done, self._total = 0, total
        if self._wants_bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._function_name, unit="B", unit_scale=True)
        self._set(0)

    def add(self, count: int) -> None:
        """Report `count` more bytes as done."""
        self._set(min(self._done + count, self._total))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        """Close the bar; if the call succeeded, report all bytes as done before."""
        if failure is None:
            self._set(self._total)
        if self._bar is not None:
            self._bar.close()

    def _set(self, done: int) -> None:
        before, self._done = self._done, done
        if self._bar is not None:
            self._bar.update(done - before)
        if self._report is None or (done == before and done):
            return
        try:
            self._report(done, self._total)
        except Exception as failure:  # the other ranks wait in a collective for this rank, so its work must continue
            self._report = None
            warnings.warn(f"{self._function_name}: progress raised {failure!r}, and is not called again.")
