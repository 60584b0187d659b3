"""Ranks that look sooner for the reason why they wait. What they find does not depend on when they look.

python -m tests.support.stalls MODULE ARGUMENTS...    runs a module that is one of them
"""

import runpy
import sys
from datetime import timedelta
from typing import Final

from fsdp.comm.failure import desync, job_waits, watchdog

_SECONDS: Final = 0.5


def look_soon() -> None:
    """From now on, for programs of ranks that wait for each other in vain: each of them waits a quarter as long."""
    desync.STALL_SECONDS = job_waits.STALL_SECONDS = watchdog.STALL_SECONDS = _SECONDS  # type: ignore[misc]
    desync._STALL_SECONDS = timedelta(seconds=_SECONDS)  # type: ignore[misc]


if __name__ == "__main__":
    look_soon()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
