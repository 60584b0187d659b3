"""Made-up traces with round numbers, in milliseconds."""

import json
from pathlib import Path
from typing import Any

Times = tuple[float, float]


def made_up(rank: int = 0, world_size: int = 1, clock: float = 0.0, slow: float = 0.0, **options: Any) -> dict[str, Any]:
    """A trace of one step of 100 ms on one rank.

    The root computes 20 to 40 and, `slow` later, 60 to 90. The gather of `a` is launched at 10 and waited for from 10 to 20, and
    the reduction of `a` is launched at 70 and waited for from 90 to 95. The engine works from 10 to 21, the waits included.
    `clock`: by how much the clock of the rank is ahead.
    """
    events: list[dict[str, Any]] = []

    def add(thread: int, name: str, category: str, times: Times, **args: Any) -> None:
        began, ended = ((time + clock) * 1e3 for time in times)
        event = {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, "ts": began, "dur": ended - began}
        events.append({**event, "args": args})

    add(0, "step 0", "step", (0, 100), step=0, abandoned=False, backward_began=(55 + clock) * 1e3)
    add(1, "forward a", "compute", (21, 40), unit="a", kind="forward")
    add(1, "backward a", "compute", (60, 90), unit="a", kind="backward")
    add(2, "unshard a", "engine", (10, 21), unit="a", phase="unshard")

    def collective(number: int, kind: str, comm: str, times: Times, wait: Times) -> None:
        began, ended = ((time + clock) * 1e3 for time in wait)
        args = {
            "unit": "a",
            "collective": kind,
            "comm": comm,
            "ranks": world_size,
            "number": number,
            "received": 1000 * (1 + number),
        }
        waited = {"wait_began": began, "waited": ended - began, "end_after": began, "end_before": ended}
        add(100 + number, f"{kind} a", "collective", times, **args, **waited)

    collective(0, "all_gather", "shard", (10 - slow, 20), (10, 20))
    collective(0, "reduce_scatter", "reduce", (70 + slow, 95), (90, 95))
    for time, held in ((0, {"shards": 100}), (10, {"shards": 100, "whole": 400}), (95, {"shards": 100, "whole": 0})):
        event = {"ph": "C", "pid": rank, "tid": 0, "name": "bytes held", "cat": "memory", "ts": (time + clock) * 1e3}
        events.append({**event, "args": held})
    info = {
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "host": "host",
        "began_at": 1000.0,
        "length": 100e3,
        "units": ["a"],
        "unit_bytes": [400],
        "options": {"prefetch": 1, "reshard": "AFTER_FORWARD", "ranks": "SHARD", "device": "cpu", **options},
    }
    return {"displayTimeUnit": "ms", "fsdp": info, "traceEvents": events}


def written(folder: Path, *documents: dict[str, Any]) -> list[Path]:
    """The documents as files."""
    paths = []
    for number, document in enumerate(documents):
        path = folder / f"trace-{number}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        paths.append(path)
    return paths
