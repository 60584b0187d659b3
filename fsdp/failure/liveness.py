"""Which process is this, and does another one on this host still live?"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def this_process() -> tuple[str, int, str]:
    """The host (or container) as its processes count, this process, and when it began; nothing where Linux is not."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        return host, os.getpid(), _state_and_begin(os.getpid())[1]
    except OSError:
        return "", os.getpid(), ""


def is_dead(process: Sequence[Any]) -> bool:
    """Whether a process that said so of itself was on this host and is no more."""
    host, pid, begin = process
    if not host or host != this_process()[0]:
        return False
    try:
        state, began = _state_and_begin(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # nobody can say: this process may have too many files open
    return state in "ZX" or began != begin


def _state_and_begin(pid: int) -> tuple[str, str]:
    # the name of the process, in parentheses, may contain anything
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
