"""How far something long has come: a bar, or a function of the user."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from fsdp.errors import ShardingError

Asked = bool | Callable[[int, int], object]
"""What the option `progress` takes: True for a bar of rank 0's bytes, or a function of this rank's (done, total) bytes."""


class Progress:
    """Bytes done of bytes in all, on one rank. What it tells goes wrong without harm: a save is worth more than its bar."""

    def __init__(self, asker: str, asked: Asked, rank: int) -> None:
        """Raises:
        ShardingError: a bar is asked for, and the package tqdm is missing; or `asked` is neither a bool nor a function.
        """
        if not isinstance(asked, bool) and not callable(asked):
            raise ShardingError(f"{asker}: progress is {asked!r}; give True, or a function of (done_bytes, total_bytes).")
        if asked is True and find_spec("tqdm") is None:
            raise ShardingError(f"{asker}: progress=True needs tqdm: pip install 'fsdp[progress]', or give a function.")
        self._asker = asker
        self._tell: Callable[[int, int], object] | None = asked if callable(asked) else None
        self._wants_bar = asked is True and rank == 0
        self._bar: Any = None
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        """So many bytes there are, of which none is done."""
        self._done, self._total = 0, total
        if self._wants_bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._asker, unit="B", unit_scale=True)
        self._say(0)

    def add(self, count: int) -> None:
        """So many more are done."""
        self._say(min(self._done + count, self._total))

    def end(self, finished: bool = True) -> None:
        """All is done, or given up."""
        if finished:
            self._say(self._total)
        if self._bar is not None:
            self._bar.close()

    def _say(self, done: int) -> None:
        before, self._done = self._done, done
        if self._bar is not None:
            self._bar.update(done - before)
        if self._tell is None or (done == before and done):
            return
        try:
            self._tell(done, self._total)
        except Exception as failure:  # other ranks are waiting in a collective for what this one does next
            self._tell = None
            warnings.warn(f"{self._asker}: progress raised {failure!r}, and is not called again.")
