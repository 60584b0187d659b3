"""Answers `python -m fsdp who`: writes where this rank is into a folder that all ranks share, whenever that is asked for.

With FSDP_RUN_DIR in the environment, a thread looks twice a second for the question, which is a file with a number. It answers in
a file of its own with the same number. So a rank answers while its main thread waits inside a collective, on any host that shares
the folder, and a rank that is stopped or dead does not.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from fsdp.debug.error_notes import EngineSnapshot

RUN_DIR: Final = "FSDP_RUN_DIR"
"""The environment variable with the folder. It is read when the first model is wrapped."""
QUESTION: Final = "question"
ANSWER: Final = "rank-{}.json"
PAUSE: Final = 0.5
"""Seconds between two looks for a question."""
FRAMES: Final = 12
"""The number of innermost frames of the main thread that are printed."""


def answer_questions(snapshots: Callable[[], Iterable[EngineSnapshot]]) -> None:
    """Begin to answer in the folder of FSDP_RUN_DIR, if that is set. A second call in a process does nothing.

    `snapshots`: of all models of the process. There is one already.
    """
    folder = os.environ.get(RUN_DIR)
    if not folder or _answering:
        return
    _answering.append(folder)
    now = next(iter(snapshots()))
    answers = RankAnswers(Path(folder), now.rank, now.world_size, snapshots)
    answers.write("")
    threading.Thread(target=answers.run, name="fsdp who", daemon=True).start()


_answering: Final[list[str]] = []


class RankAnswers:
    """The answers of one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int, snapshots: Callable[[], Iterable[EngineSnapshot]]) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._snapshots = snapshots
        self._answered = ""

    def run(self) -> None:
        """Answer questions for ever."""
        while True:
            self.look()
            time.sleep(PAUSE)

    def look(self) -> None:
        """Answer the question, if there is a new one."""
        try:
            asked = (self._folder / QUESTION).read_text(encoding="utf-8")
        except OSError:
            return  # nobody has asked
        if asked != self._answered:
            self.write(asked)

    def write(self, asked: str) -> None:
        """Write where this rank is. A folder that cannot be written to costs the answer, and never the training."""
        self._answered = asked
        try:
            text = json.dumps(self.describe(asked))
            self._folder.mkdir(parents=True, exist_ok=True)
            target = self._folder / ANSWER.format(self._rank)
            temporary = target.with_suffix(f".{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        except (OSError, RuntimeError) as failure:  # the engines change while they are read
            print(f"fsdp: {RUN_DIR}={self._folder}: rank {self._rank} could not answer: {failure}", file=sys.stderr)
            self._answered = ""

    def describe(self, asked: str) -> dict[str, Any]:
        """Where this rank is, as plain data."""
        return {
            "asked": asked,
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "models": [_describe(one) for one in self._snapshots()],
            "stack": main_stack(),
        }


def main_stack() -> list[str]:
    """The innermost lines of the stack of the main thread, innermost last; none if that has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-FRAMES:]).splitlines() if frame is not None else []


def _describe(snapshot: EngineSnapshot) -> dict[str, Any]:
    busy = [unit for unit in snapshot.units if unit.state.name != "IDLE"]
    # the innermost unit comes last
    unit = busy[-1] if busy else snapshot.units[0]
    return {
        "unit": unit.name if busy else "between two passes",
        "state": unit.state.name if busy else f"backward {snapshot.backward.name}",
        "last": next((calls[-1] for calls in snapshot.collectives.values() if calls), "no collective"),
        "waits": [{"where": wait.pending.where, "seconds": wait.seconds, "absent": list(wait.absent)} for wait in snapshot.waits],
    }
