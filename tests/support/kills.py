"""Ranks that are killed while they save: a whole simulated world, or processes over gloo. Run as a script, it does so.

python -m tests.support.kills FOLDER    for each case a folder all/N or one/N: checkpoints of step 1 and perhaps 2, and
                                        what a rank was told

One process imports torch; each case is a fork of it, or two.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

import fsdp
from fsdp.checkpoint import dcp
from tests.support.faults import STAGES, die, die_at, make_model, save, step_name

LIMIT: Final = 200
"""Seconds until a rank that waits in vain gives up. The test ends before."""


class Kill(NamedTuple):
    """Which of two processes is killed, and when."""

    victim: int | None
    """None: both, by ending without a word."""
    stage: str
    in_background: bool
    appears: bool
    """Whether the new checkpoint is there in the end."""

    def __str__(self) -> str:
        where = "in a save in the background, " if self.in_background else ""
        who = "both of two processes end" if self.victim is None else f"rank {self.victim} of two processes is killed"
        return f"{where}{who} {self.stage}"


_OF_RANK_0: Final = (
    "before the metadata is written",
    "before the manifest is written",
    "when half the manifest is written",
    "before the folder gets its name",
)
WRITTEN: Final = "when it has written its parts"
LAST: Final = "when all files but the manifest are written"
UNDER_WAY: Final = "without a word"

KILLS: Final = (
    *(Kill(rank, stage, False, False) for rank in (0, 1) for stage in ("before anything is written", WRITTEN)),
    *(Kill(0, stage, False, False) for stage in _OF_RANK_0),
    Kill(0, "when the folder has its name", False, True),
    Kill(1, LAST, False, True),
    *(Kill(rank, WRITTEN, True, False) for rank in (0, 1)),
    Kill(0, "before the folder gets its name", True, False),
    Kill(None, UNDER_WAY, True, False),
)


def patch(stage: str) -> None:
    """Let this process, or its thread, die at `stage`."""

    def then_die(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            real(*arguments)
            die()

        return call

    if stage == WRITTEN:
        dcp.FileSystemWriter.write_data = then_die(dcp.FileSystemWriter.write_data)  # type: ignore[method-assign]
    elif stage == LAST:
        dcp.WritePlan.write = then_die(dcp.WritePlan.write)  # type: ignore[method-assign]
    elif stage == UNDER_WAY:
        dcp.FileSystemWriter.write_data = lambda *_: threading.Event().wait()  # type: ignore[assignment, method-assign]
    else:
        die_at(stage)


def rank_main(rank: int, kill: Kill, folder: Path) -> None:
    """One rank: save step 2, and say what came of it."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT))
    model = make_model(2.0)
    if kill.victim in (None, rank):
        patch(kill.stage)
    told = "nothing"
    try:
        saving = fsdp.save(folder / step_name(2), model, extra={"step": 2}, async_=kill.in_background)
        if kill.victim is None:
            os._exit(0)
        with torch.no_grad():  # training goes on
            for p in model.parameters():
                p.fill_(99)
        saving.wait()
    except Exception as failure:
        told = f"{type(failure).__name__}: {failure}"
    (folder / "told.json").write_text(json.dumps({"told": told}))
    os._exit(0)  # the group cannot be destroyed any more


def kill_all(base: Path) -> None:
    """Both ranks of a simulated world at once, at each stage."""
    for number, stage in enumerate(STAGES):
        folder = base / str(number)
        shutil.copytree(base / "before", folder)
        child = os.fork()
        if child == 0:
            try:
                die_at(stage)
                save(folder, 2)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"it was not killed {stage}"


def kill_one(base: Path) -> None:
    """One of two processes, or both."""
    for number, kill in enumerate(KILLS):
        folder = base / str(number)
        shutil.copytree(base / "before", folder)
        ranks = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                try:
                    rank_main(rank, kill, folder)
                finally:
                    os._exit(1)
            ranks.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in ranks]
        wanted = [signal.SIGKILL if rank == kill.victim else 0 for rank in range(2)]
        assert statuses == wanted, f"{kill}: {statuses}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, run in (("all", kill_all), ("one", kill_one)):
        save(Path(sys.argv[1]) / name / "before", 1)
        run(Path(sys.argv[1]) / name)
