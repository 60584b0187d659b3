"""Writes the records of a trace in Chrome's trace format, which Perfetto and chrome://tracing open.

A rank is a process there, and a lane is a thread. Times are microseconds since the trace began.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fsdp.debug.tracing.lanes import computing, steps, sublanes
from fsdp.debug.tracing.recorder import Collective, Recorder

VERSION: Final = 1
STEPS, COMPUTING, ENGINE, EVENTS = 0, 1, 2, 3
LANES: Final = {STEPS: "steps", COMPUTING: "computing", ENGINE: "engine", EVENTS: "events"}
COLLECTIVE_LANES: Final = {"all_gather": (100, "gathers"), "reduce_scatter": (200, "reductions")}
"""By kind of collective: the first thread and the name of its lane. More threads follow if collectives overlap."""
OTHER_LANE: Final = (300, "other collectives")
MEMORY_KINDS: Final = {
    "whole": "unsharded parameters",
    "bucket": "buckets of gradients",
    "reduced": "reduced gradients",
    "kept": "gradients kept under no_sync",
    "lent": "full parameters",
    "scratch": "scratch of reductions",
}
"""What kinds of memory are called in a trace, if not by their own name."""


class TraceInfo(NamedTuple):
    """What a trace file says beside its events."""

    rank: int
    world_size: int
    units: Sequence[str]
    roots: Sequence[int]
    """The numbers of the units that are roots."""
    began: int
    """When the trace began: `time.perf_counter_ns`."""
    ended: int
    began_at: float
    """The same moment: `time.time`."""
    host: str
    unit_bytes: Sequence[int]
    """Bytes of one all-gather of each unit."""
    options: dict[str, Any]

    def time(self, moment: int) -> float:
        """The microseconds of the trace until a moment."""
        return (moment - self.began) / 1e3


def document(recorder: Recorder, info: TraceInfo) -> dict[str, Any]:
    """The whole file, as JSON can hold it."""
    found = [*_lane_names(info), *_slices(recorder, info)]
    found.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0), -event.get("dur", 0.0)))
    # the part of the file that Perfetto ignores and the report reads
    about = {name: value for name, value in info._asdict().items() if name not in ("roots", "began", "ended")}
    metadata = {"version": VERSION, "length": info.time(info.ended), **about}
    return {"displayTimeUnit": "ms", "fsdp": metadata, "traceEvents": found}


def _lane_names(info: TraceInfo) -> Iterator[dict[str, Any]]:
    yield _name(info, "process_name", 0, f"rank {info.rank}")
    yield {"ph": "M", "pid": info.rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": info.rank}}
    for thread, name in LANES.items():
        yield _name(info, "thread_name", thread, name)


def _name(info: TraceInfo, what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": info.rank, "tid": thread, "name": what, "args": {"name": name}}


def _slice(info: TraceInfo, thread: int, name: str, category: str, began: int, ended: int, **args: Any) -> dict[str, Any]:
    lane = {"ph": "X", "pid": info.rank, "tid": thread}
    return {**lane, "name": name, "cat": category, "ts": info.time(began), "dur": max(0, ended - began) / 1e3, "args": args}


def _slices(recorder: Recorder, info: TraceInfo) -> Iterator[dict[str, Any]]:
    rank, time = info.rank, info.time
    for number, span in enumerate(steps(recorder.events, info.roots, info.ended)):
        backward = time(span.backward_began) if span.backward_began else None
        what = {"step": number, "abandoned": span.abandoned, "backward_began": backward}
        yield _slice(info, STEPS, f"step {number}", "step", span.began, span.ended, **what)
    for began, ended, unit, kind in computing(recorder.events, recorder.phases):
        yield _slice(info, COMPUTING, f"{kind} {info.units[unit]}", "compute", began, ended, unit=info.units[unit], kind=kind)
    for began, ended, phase, unit in recorder.phases:
        yield _slice(info, ENGINE, f"{phase} {info.units[unit]}", "engine", began, ended, unit=info.units[unit], phase=phase)
    for moment, unit, event in recorder.events:
        args = {"unit": info.units[unit], "event": event.name}
        name = f"{event.name} {info.units[unit]}"
        yield {"ph": "i", "s": "t", "pid": rank, "tid": EVENTS, "name": name, "cat": "event", "ts": time(moment), "args": args}
    held: dict[tuple[int, str], int] = {}
    for moment, root, kind, count in recorder.memory:
        held[root, kind] = count
        by_kind = Counter[str]()
        for (_, one), size in held.items():
            by_kind[MEMORY_KINDS.get(one, one)] += size
        yield {"ph": "C", "pid": rank, "tid": 0, "name": "bytes held", "cat": "memory", "ts": time(moment), "args": by_kind}
    lanes: dict[tuple[int, str], list[Collective]] = {}
    for collective in recorder.collectives:
        lanes.setdefault(COLLECTIVE_LANES.get(collective.kind, OTHER_LANE), []).append(collective)
    for lane, collectives in lanes.items():
        yield from _collective_slices(lane, collectives, info)


def _collective_slices(lane: tuple[int, str], collectives: Sequence[Collective], info: TraceInfo) -> Iterator[dict[str, Any]]:
    (first, name), time = lane, info.time
    numbers: dict[str, int] = {}
    lanes = sublanes(collectives, info.ended)
    for sublane in sorted(set(lanes)):
        yield _name(info, "thread_name", first + sublane, name if not sublane else f"{name}, beside")
    for one, sublane in zip(collectives, lanes, strict=True):
        number = numbers[one.comm] = numbers.get(one.comm, -1) + 1
        args: dict[str, Any] = {
            "unit": one.label,
            "collective": one.kind,
            "comm": one.comm,
            "ranks": one.size,
            "number": number,
            "received": one.received,
            "host": (one.returned - one.launched) / 1e3,
        }
        if one.wait_ended:
            args |= {"wait_began": time(one.wait_began), "waited": (one.wait_ended - one.wait_began) / 1e3}
        if one.ended:
            # it was in flight at the first of these moments, and had ended at the second
            args |= {"end_after": time(one.pending_at or one.launched), "end_before": time(one.ended)}
        else:
            args["unfinished"] = True
        yield _slice(
            info, first + sublane, f"{one.kind} {one.label}", "collective", one.launched, one.ended or info.ended, **args
        )
