"""Asks the ranks of a running job where they are, by files in the folder that FSDP_RUN_DIR names, and makes one table of it."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fsdp.commands.reporting.formats import table
from fsdp.debug.answer_who import ANSWER, QUESTION, RUN_DIR
from fsdp.errors import ShardingError, name_ranks
from fsdp.file_errors import file_errors

Answer = dict[str, Any]
_PAUSE: Final = 0.05


def run_dir_of(pid: int) -> Path:
    """The folder of a job, from the environment of one of its processes, or of a process that they have started.

    Raises:
        ShardingError: there is no such process, it belongs to another user, or none of them has a folder.
    """
    if not Path(f"/proc/{pid}").exists():
        raise ShardingError(
            f"who: there is no process {pid} on this host; give --run-dir, or the id of a process that runs here."
        )
    for process in (pid, *_descendants(pid)):
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError as reason:
            raise ShardingError(
                f"who: the environment of process {process} cannot be read: {reason.strerror}; give --run-dir."
            ) from None
        for entry in environment:
            if entry.startswith(f"{RUN_DIR}=".encode()):
                return Path(os.fsdecode(entry.partition(b"=")[2]))
    raise ShardingError(
        f"who: process {pid} and those that it started have no {RUN_DIR} in their environment; set it to a folder that all hosts "
        "share when the job begins. A job without it answers SIGUSR1, see dump_on_signal."
    )


def answers_in(folder: Path) -> dict[int, Answer]:
    """What each rank has written last, by rank.

    Raises:
        ShardingError: the folder does not exist, or no rank has written there.
    """
    with file_errors(f"who: {folder}", folder):
        if not folder.is_dir():
            raise ShardingError(f"who: {folder} is no folder; give the one that {RUN_DIR} named when the job began.")
        found = [_read(path) for path in sorted(folder.glob(ANSWER.format("*")))]
    answers = {int(one["rank"]): one for one in found if one is not None}
    if not answers:
        raise ShardingError(f"who: no rank has written into {folder}; set {RUN_DIR} to it before the first model is wrapped.")
    return answers


def ask(folder: Path, timeout: float) -> tuple[dict[int, Answer], dict[int, Answer]]:
    """Ask all ranks. Returns what each had written before, and what has come when all have answered or the time is over."""
    known = answers_in(folder)
    asked = f"{time.time_ns()}"
    with file_errors(f"who: {folder}", folder):
        temporary = folder / f"{QUESTION}.{os.getpid()}"
        temporary.write_text(asked, encoding="utf-8")
        temporary.replace(folder / QUESTION)
    ranks = max(one["world_size"] for one in known.values())
    end = time.monotonic() + timeout
    while True:
        found = {rank: one for rank, one in answers_in(folder).items() if one["asked"] == asked}
        if len(found) >= ranks or time.monotonic() > end:
            return known, found
        time.sleep(_PAUSE)


def table_of(known: Mapping[int, Answer], answers: Mapping[int, Answer], stacks: bool) -> list[str]:
    """The lines about all ranks: those that have answered, and those that have not. `known`: what each had written before."""
    size = max(one["world_size"] for one in known.values())
    rows, lines = [], []
    for rank in range(size):
        answer = answers.get(rank)
        if answer is None:
            rows.append([str(rank), _why_silent(known.get(rank)), "", "", "", ""])
            continue
        for model in answer["models"] or [{"unit": "no model", "state": "", "waits": [], "last": ""}]:
            waits = model["waits"] or [{"where": "", "seconds": None, "absent": []}]
            for wait in waits:
                since = "" if wait["seconds"] is None else f"{wait['seconds']:.0f} s"
                absent = name_ranks(wait["absent"]) if wait["absent"] else ""
                rows.append([str(rank), model["unit"], model["state"], wait["where"] or f"after {model['last']}", since, absent])
        if stacks:
            lines += [f"rank {rank}, main thread, innermost call last:", *answer["stack"]]
    header = ("rank", "unit", "state", "waits for", "since", "who is not there")
    return [*table(header, rows), *_summary(answers, size), *lines]


def _summary(answers: Mapping[int, Answer], size: int) -> list[str]:
    silent = sorted({*range(size)} - {*answers})
    waits = [wait for one in answers.values() for model in one["models"] for wait in model["waits"]]
    absent = sorted({rank for wait in waits for rank in wait["absent"]})
    found = []
    if silent:
        found.append(f"No answer from {name_ranks(silent)} of {size}.")
    if absent:
        found.append(f"Others wait for {name_ranks(absent)}: look at the unit and the stack there (--stacks).")
    return found


def _why_silent(before: Answer | None) -> str:
    if before is None:
        return "never began"
    here = before["host"] == socket.gethostname()
    place = f"process {before['pid']} on {before['host']}"
    if here and not Path(f"/proc/{before['pid']}").exists():
        return f"ended: {place}"
    return f"no answer: {place}"


def _read(path: Path) -> Answer | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError):
        return None  # it is being replaced
    return content if isinstance(content, dict) and "asked" in content else None


def _descendants(pid: int) -> Sequence[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, open_ = [], [pid]
    while open_:
        open_ = [child for one in open_ for child in children.get(one, ())]
        found += open_
    return found
