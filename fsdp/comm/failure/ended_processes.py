"""Identifies processes of this host, and finds which of them have ended."""

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fsdp.comm.failure.desync import Store


class Neighbours:
    """The ranks of a group whose processes run on this host. Each signs in when it is made."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._key = f"on/{this_process()[0]}"
        self._found: list[Any] = []
        """The rank and the process of each, in the order in which they signed in."""
        number = store.add(self._key, 1)
        store.set(f"{self._key}/{number}", json.dumps((rank, this_process())))
        if number == 1:
            store.add("hosts", 1)

    def count_hosts(self) -> int:
        """The number of hosts on which ranks have signed in: after `PeerMonitor.meet` the same on all. 1 except on Linux."""
        return self._store.add("hosts", 0)

    def dead(self) -> set[int]:
        """The ranks whose processes have ended."""
        while self._store.check([key := f"{self._key}/{len(self._found) + 1}"]):
            self._found.append(json.loads(self._store.get(key)))
        return {rank for rank, process in self._found if is_dead(process)}


@cache
def this_process() -> tuple[str, int, str]:
    """Return this host (or container, which counts its own processes), this process and its start time.

    The host and the time are empty on systems other than Linux.
    """
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        return host, os.getpid(), _state_and_start(os.getpid())[1]
    except OSError:
        return "", os.getpid(), ""


def is_dead(process: Sequence[Any]) -> bool:
    """Whether a process, identified by its `this_process()`, was on this host and has ended."""
    host, pid, start = process
    if not host or host != this_process()[0]:
        return False
    try:
        state, started = _state_and_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # unknown: this process may have too many files open
    return state in "ZX" or started != start


def _state_and_start(pid: int) -> tuple[str, str]:
    # the name of the process, in parentheses, may contain anything
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
