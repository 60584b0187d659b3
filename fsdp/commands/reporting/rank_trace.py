"""Reads and checks the trace files of ranks.

A file that was changed, by hand or by another program, gets a sentence and not a traceback.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple

from fsdp.errors import ShardingError, name_ranks
from fsdp.file_errors import file_errors

VERSION: Final = 1
_MARK: Final = "fsdp"
_SAVE: Final = "Save traces with `trace.save` of `fsdp.trace`."
_NUMBER: Final = (int, float)
_INFO: Final = {"rank": int, "world_size": int, "host": str, "began_at": _NUMBER, "unit_bytes": list, "options": dict}
_OPTIONS: Final = {"prefetch": int, "reshard": str, "ranks": str, "device": str}
_EVENT: Final = {"ph": str, "pid": int, "tid": int, "name": str}
_TIMED: Final = {"ts": _NUMBER, "args": dict}
_SLICE: Final = {"dur": _NUMBER}
_ARGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "step": {"step": int, "abandoned": bool},
    "compute": {"unit": str, "kind": str},
    "engine": {"unit": str, "phase": str},
    "collective": {"unit": str, "collective": str, "comm": str, "ranks": int, "number": int, "received": int},
}
"""By category of an event, the arguments that it must have."""
_TOGETHER: Final = (("wait_began", "waited"), ("end_after", "end_before"))
"""Arguments of collectives that are numbers, each with the other one of its pair or not at all."""


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
        raise ShardingError(f"the traces are of jobs with {' and '.join(map(str, sorted(sizes)))} ranks; give those of one job.")
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
    steps, computing, engine, collectives = map(slices, ("step", "compute", "engine", "collective"))
    return RankTrace(info["rank"], info["world_size"], info, steps, computing, engine, collectives, memory, events)


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
        _check_infos(parts)
        _check_events(content["traceEvents"])
    except ShardingError as reason:
        raise ShardingError(f"{path}: {reason}; the file was changed. {_SAVE}") from None
    for part in parts:
        yield trace_of(part, [one for one in content["traceEvents"] if one["pid"] == part["rank"]])


def _check_infos(infos: Any) -> None:
    """Check what a file says of its ranks.

    Raises:
        ShardingError: a field is missing, or is of another kind.
    """
    if not isinstance(infos, list):
        raise ShardingError("'ranks' is no list")
    for info in infos:
        _check("the part 'fsdp'", info, _INFO)
        _check("the part 'options'", info["options"], _OPTIONS)
        if not 0 <= info["rank"] < info["world_size"]:
            raise ShardingError(f"the part 'fsdp' is of rank {info['rank']} of {info['world_size']}")
        if not all(_is(size, int) for size in info["unit_bytes"]):
            raise ShardingError("the part 'fsdp' has something else than numbers in 'unit_bytes'")


def _check_events(events: Sequence[Any]) -> None:
    """Check the events of a file.

    Raises:
        ShardingError: a field of one is missing, or is of another kind.
    """
    for place, event in enumerate(events):
        where = f"event {place}"
        _check(where, event, _EVENT)
        if event["ph"] == "M":
            continue
        _check(where, event, _TIMED if event["ph"] != "X" else {**_TIMED, **_SLICE})
        args, category = event["args"], event.get("cat")
        _check(f"{where}, args", args, _ARGS.get(str(category), {}))
        if category == "step" and args.get("backward_began", "") is not None:
            _check(f"{where}, args", args, {"backward_began": _NUMBER})
        elif category == "memory":
            _check(f"{where}, args", args, dict.fromkeys(args, int))
        elif category == "collective":
            pairs = [pair for pair in _TOGETHER if args.keys() & {*pair}]
            _check(f"{where}, args", args, {name: _NUMBER for pair in pairs for name in pair})


def _check(where: str, found: Any, fields: Mapping[str, Any]) -> None:
    if not isinstance(found, dict):
        raise ShardingError(f"{where} is no object")
    for name, kind in fields.items():
        if name not in found:
            raise ShardingError(f"{where} has no field {name!r}")
        if not _is(found[name], kind):
            raise ShardingError(f"{where} has {found[name]!r} in its field {name!r}")


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, kind) and not (isinstance(value, float) and not isfinite(value))
