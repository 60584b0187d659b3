"""Reads and checks the trace files of ranks."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fsdp.errors import ShardingError, name_ranks
from fsdp.file_errors import file_errors
from fsdp.reporting.fields import check_events, check_infos

VERSION: Final = 1
_MARK: Final = "fsdp"
_SAVE: Final = "Save traces with `trace.save` of `fsdp.trace`."


class Slice(NamedTuple):
    """A stretch of a lane. Times are microseconds since the trace of its rank began, until clocks are aligned."""

    began: float
    ended: float
    name: str
    args: dict[str, Any]

    @property
    def length(self) -> float:
        return self.ended - self.began


class RankTrace(NamedTuple):
    """The trace of one rank."""

    rank: int
    world_size: int
    info: dict[str, Any]
    """What the file says beside the events: units, options, clock."""
    steps: Sequence[Slice]
    computing: Sequence[Slice]
    engine: Sequence[Slice]
    collectives: Sequence[Slice]
    memory: Sequence[tuple[float, dict[str, int]]]
    """The bytes held by kind, from each time on."""
    events: Sequence[dict[str, Any]]
    """Everything in the file, as it is there."""


def read_traces(paths: Sequence[Path]) -> list[RankTrace]:
    """The traces in some files, by rank. A merged file has several.

    Raises:
        ShardingError: a file is missing, is broken or is no trace of fsdp; a rank is there twice or is missing.
    """
    found: dict[int, RankTrace] = {}
    for path in paths:
        for trace in _read(path):
            if trace.rank in found:
                raise ShardingError(f"{path}: rank {trace.rank} is in another file too; give one trace of each rank.")
            found[trace.rank] = trace
    sizes = {trace.world_size for trace in found.values()}
    if len(sizes) != 1:
        raise ShardingError(f"the traces are of jobs with {_list(sizes)} ranks; give those of one job.")
    return [found[rank] for rank in sorted(found)]


def missing_ranks(traces: Sequence[RankTrace]) -> list[int]:
    """The ranks of the job that no trace is of."""
    return sorted({*range(traces[0].world_size)} - {trace.rank for trace in traces})


def refuse_missing(traces: Sequence[RankTrace]) -> None:
    """Raises:
    ShardingError: some rank has no trace.
    """
    missing = missing_ranks(traces)
    if missing:
        raise ShardingError(
            f"no trace of {name_ranks(missing)} of {traces[0].world_size}: give the files of all ranks, or --allow-missing for a "
            "report about those that are there."
        )


def trace_of(info: dict[str, Any], events: Sequence[dict[str, Any]]) -> RankTrace:
    """The trace of one rank from its part of a file."""

    def slices(category: str) -> list[Slice]:
        found = [one for one in events if one.get("cat") == category and one["ph"] == "X"]
        return sorted(Slice(one["ts"], one["ts"] + one["dur"], one["name"], one["args"]) for one in found)

    memory = [(one["ts"], one["args"]) for one in events if one.get("cat") == "memory"]
    return RankTrace(
        info["rank"],
        info["world_size"],
        info,
        slices("step"),
        slices("compute"),
        slices("engine"),
        slices("collective"),
        memory,
        events,
    )


def _read(path: Path) -> Iterable[RankTrace]:
    with file_errors(f"{path}", path):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
    except ValueError as reason:
        raise ShardingError(f"{path}: not a complete JSON file ({reason}); it may have been cut off. {_SAVE}") from None
    info = content.get(_MARK) if isinstance(content, dict) else None
    if not isinstance(info, dict) or not isinstance(content.get("traceEvents"), list):
        raise ShardingError(f"{path}: a JSON file, but no trace of fsdp. {_SAVE}")
    if info.get("version") != VERSION:
        raise ShardingError(
            f"{path}: a trace of version {info.get('version')!r}, and this fsdp reads {VERSION}; read it with the fsdp that "
            "wrote it."
        )
    parts = info.get("ranks", [info])
    try:
        check_infos(parts)
        check_events(content["traceEvents"])
    except ShardingError as reason:
        raise ShardingError(f"{path}: {reason}; the file was changed. {_SAVE}") from None
    for part in parts:
        yield trace_of(part, [one for one in content["traceEvents"] if one["pid"] == part["rank"]])


def _list(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
