"""Scripts as jobs of several ranks, with the environment of torchrun and without the start of an interpreter; and alone.

torchrun costs an interpreter for itself and one for each rank, 4 s of CPU each. A test of torchrun itself starts torchrun.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import pytest
from torch.distributed import TCPStore

from tests.support.processes import Rank, end_all, start_rank

_HOST: Final = "127.0.0.1"


class Ended(NamedTuple):
    """A job that has ended."""

    status: int
    """0 if all ranks ended with 0, otherwise that of a rank that did not: below zero if a signal ended one."""
    output: str
    """What the ranks printed to stdout."""
    errors: str
    """What they printed to stderr."""


def run_job(script: Path, *arguments: object, size: int, cwd: Path, seconds: float = 120.0, **variables: str) -> Ended:
    """Run a script on `size` ranks in the folder `cwd`, with the variables that torchrun sets.

    If a rank fails, the others are ended.

    Raises:
        pytest.fail.Exception: the ranks were not done after `seconds`.
    """
    # as torchrun's agent does, so that no rank needs a port that another program may have taken meanwhile
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": _HOST, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "test"}
    job |= {"CUDA_VISIBLE_DEVICES": "", **variables}
    with TemporaryDirectory() as folder:
        printed = {"output": Path(folder) / "output", "errors": Path(folder) / "errors"}
        start = partial(start_rank, script, *arguments, cwd=cwd, **printed, **job)
        return _end([start(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(size)], seconds, **printed)


def run_alone(script: Path, *arguments: object, cwd: Path, seconds: float = 120.0, **variables: str) -> Ended:
    """Run a script in one process that no launcher started."""
    with TemporaryDirectory() as folder:
        printed = {"output": Path(folder) / "output", "errors": Path(folder) / "errors"}
        ranks = [start_rank(script, *arguments, cwd=cwd, CUDA_VISIBLE_DEVICES="", **printed, **variables)]
        return _end(ranks, seconds, **printed)


def _end(ranks: Sequence[Rank], seconds: float, output: Path, errors: Path) -> Ended:
    """Wait until all have ended or one has failed, and end the others."""
    until = time.monotonic() + seconds
    try:
        while not any(one.poll() for one in ranks) and any(one.poll() is None for one in ranks):
            if time.monotonic() > until:
                pytest.fail(f"not done after {seconds} s:\n{_read(output)}{_read(errors)}")
            time.sleep(0.02)
        failed = [status for one in ranks if (status := one.poll())]
    finally:
        end_all(ranks)
    return Ended(min(failed, default=0), _read(output), _read(errors))


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
