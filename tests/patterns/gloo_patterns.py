"""Patterns on one rank of a real group, over one start. Run as a script, it is one rank.

python -m tests.patterns.gloo_patterns RANK WORLD_SIZE FOLDER PATTERN ...

A program that fails is recorded with what it raised. Its group is given up at once, so that peers that wait for it fail too,
and a new one is made for the next program. What each program left is written before the next one begins.
"""

import faulthandler
import gc
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from tests.patterns.every import PATTERNS
from tests.patterns.harness import attempt

LIMIT: Final = 30
"""Seconds until a rank that is stuck in one pattern prints its stacks and dies."""
STALL_SECONDS: Final = timedelta(seconds=8)
"""How long a rank waits for its peers."""


class Group:
    """The process group, and what the ranks tell each other beside it."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self._rank, self._size, self._folder = rank, size, folder
        self._made = 0
        self._beside = dist.FileStore(str(folder / "beside"), size)
        self._beside.set_timeout(timedelta(seconds=LIMIT))

    def open(self) -> None:
        if not dist.is_initialized():
            self._made += 1
            store = dist.FileStore(str(self._folder / f"store{self._made}"), self._size)
            dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._size, timeout=STALL_SECONDS)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def agree(self, number: int, well: bool) -> None:
        """All ranks have ended a program; if one did not end well, none keeps the group."""
        self._beside.set(f"{number} of {self._rank}", "well" if well else "badly")
        said = [self._beside.get(f"{number} of {rank}") for rank in range(self._size)]
        if any(one != b"well" for one in said):
            self.close()


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    """These patterns in turn; the outcomes go to a file, one after the other."""
    torch.set_num_threads(1)
    gc.freeze()  # a collection need not search all of torch each time
    group = Group(rank, size, folder)
    with open(folder / f"{rank}.pickle", "wb") as outcomes:
        for number, name in enumerate(names):
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            group.open()
            outcome = attempt(PATTERNS[name], rank, size)
            if outcome.raised:
                group.close()
            pickle.dump(outcome, outcomes)
            outcomes.flush()
            group.agree(number, not outcome.raised)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
