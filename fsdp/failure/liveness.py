"""Identifies processes of this host, and finds which of them have ended."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


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
