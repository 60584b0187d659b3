"""Starts a script on several ranks with torchrun, and says in one sentence how it ended.

python -m tools.launch --nproc-per-node=2 examples/train.py    the same arguments as torchrun
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

STOPPED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun; return the exit status of the first rank that failed, or 0."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # other loggers of torchrun read it when it is imported
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        print(
            f"rank {rank} {ending(failure.exitcode)}, and the others were stopped; what went wrong is said above", file=sys.stderr
        )
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (KeyboardInterrupt, SignalException):
        print("all ranks were stopped, because this program was", file=sys.stderr)
        return STOPPED
    return 0


def ending(exitcode: int) -> str:
    """How a process ended, by its exit status: below zero it is a signal."""
    if exitcode >= 0:
        return f"ended with exit status {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (as by the system, when memory is short)" if name == "SIGKILL" else "")


if __name__ == "__main__":
    sys.exit(main())
