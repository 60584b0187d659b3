"""What steps did: `fsdp.trace`, the numbers of the last step (`fsdp.stats`), and the story of a model as text (`fsdp.story`)."""

import json
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter_ns, time

from torch import nn

from fsdp.debug.error_notes import lines_of
from fsdp.debug.tracing.chrome import TraceInfo, document
from fsdp.debug.tracing.recorder import RecordedBytes, RecordedStory, Recorder
from fsdp.errors import ShardingError
from fsdp.file_errors import file_errors
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_in, refuse_unless_resting
from state_machine.lifecycle import STORY_LENGTH


class Trace:
    """What the steps inside `fsdp.trace` did on this rank."""

    def __init__(self, engines: tuple[Engine, ...]) -> None:
        self._recorder = Recorder()
        self._engines = engines
        self._began = self._ended = 0
        self._began_at = 0.0
        self._info: TraceInfo | None = None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace of this rank in Chrome's trace format and return its path. `{rank}` in it is the rank.

        Perfetto (https://ui.perfetto.dev) and chrome://tracing open it; `python -m fsdp trace` merges and explains it.

        Raises:
            ShardingError: the trace has not ended, or the file system refuses the file.
        """
        info = self._finished("save")
        target = Path(os.fspath(path).replace("{rank}", str(info.rank)))
        with file_errors(f"trace.save: {target}", target):
            target.write_text(json.dumps(document(self._recorder, info)), encoding="utf-8")
        return target

    def document(self) -> dict[str, object]:
        """The trace of this rank as it is saved: the object of a file in Chrome's trace format.

        Raises:
            ShardingError: the trace has not ended.
        """
        return document(self._recorder, self._finished("document"))

    def begin(self) -> None:
        """Record from now on."""
        self._began, self._began_at = perf_counter_ns(), time()
        first = 0
        for root, engine in enumerate(self._engines):
            engine.phases.set_recorder(self._recorder.add_phase, first)
            for index, lifecycle in enumerate(engine.root.lifecycles):
                story = deque(lifecycle.story, STORY_LENGTH)
                lifecycle.keep_story_in(RecordedStory(story, self._recorder, first + index))
            engine.tracker.held = RecordedBytes(engine.tracker.held, self._recorder, root)
            for name, comm in engine.comms.each().items():
                comm.recorder = partial(self._recorder.launch, name, comm.size)
            first += len(engine.units)

    def end(self) -> None:
        """Record no more."""
        self._ended = perf_counter_ns()
        self._recorder.look(self._ended)
        for engine in self._engines:
            engine.phases.set_recorder(None)
            for lifecycle in engine.root.lifecycles:
                lifecycle.keep_story_in(deque(lifecycle.story, STORY_LENGTH))
            engine.tracker.held = dict(engine.tracker.held)
            for comm in engine.comms.each().values():
                comm.recorder = None
        self._info = self._describe()
        self._engines = ()

    def _describe(self) -> TraceInfo:
        first, units = self._engines[0], [unit for engine in self._engines for unit in engine.units]
        config = first.units[0].config
        rank, world_size = first.place_in_job
        return TraceInfo(
            rank=rank,
            world_size=world_size,
            units=[unit.name for unit in units],
            roots=[*accumulate([len(engine.units) for engine in self._engines[:-1]], initial=0)],
            began=self._began,
            ended=self._ended,
            began_at=self._began_at,
            host=socket.gethostname(),
            unit_bytes=[sum(unit.gather_sizes) for unit in units],
            options={
                "prefetch": config.prefetch,
                "reshard": first.units[-1].config.reshard_policy.name,
                "ranks": config.mesh_kind.name,
                "device": first.units[0].device.type,
            },
        )

    def _finished(self, method: str) -> TraceInfo:
        if self._info is None:
            raise ShardingError(f"trace.{method}: the trace still runs; call it after the `with fsdp.trace(model)` block.")
        return self._info


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what every step inside the block does on this rank: each event, collective, wait and byte count.

    Call it between two steps. It changes no number and dispatches no operation. It does not communicate, so some ranks may
    trace and others not. Times are those of the host: on CUDA they show when something was launched, and the ranges
    `fsdp::...` of a torch profile show when it ran.

        with fsdp.trace(model) as trace:
            for batch in batches:
                train_step(model, batch)
        trace.save("trace-{rank}.json")

    Raises:
        ShardingError: `model` contains no unit or is only a part of a root, a step runs, or the model is traced already.
    """
    engines = engines_in(model, "trace")
    for engine in engines:
        refuse_unless_resting("trace", engine)
        if engine.phases.add_record is not None:
            raise ShardingError("trace: this model is traced already; leave the outer `with fsdp.trace(model)` block first.")
    found = Trace(engines)
    found.begin()
    try:
        yield found
    finally:
        found.end()


def stats(model: nn.Module) -> dict[str, float]:
    """Return numbers of the last step on this rank as a flat dict, for any logger. Does not communicate.

    Seconds are host times. Before the first step that reduced its gradients all but the bytes are 0. With several roots, numbers
    of all are added.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    found: dict[str, float] = {}
    for engine in engines_in(model, "stats"):
        for name, number in engine.stats.report().items():
            found[name] = max(found.get(name, 0), number) if name in ("number", "period_s") else found.get(name, 0) + number
    return {"step": found.pop("number"), **found}


def story(model: nn.Module) -> str:
    """Return what the engine does with `model` on this rank now, as text. Does not communicate.

    Use it to look at a run that hangs or surprises. Each root has a line with the bytes it holds by kind, a line for each
    communicator with its last collectives, and a line for each unit with its state, its residency (where its unsharded
    parameters are) and its last events. Collectives and events are in order, oldest first.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    return "\n".join(line for engine in engines_in(model, "story") for line in lines_of(engine.snapshot()))


def memory_bytes(model: nn.Module, peak: bool = False) -> int:
    """Return how many bytes the engine holds for `model` on this rank; with `peak`, the most it has held at once.

    Counted are shards, unsharded and summoned parameters, buckets and the memory that reducing them takes, reduced gradients
    that are not in `.grad` yet, and gradients kept under `no_sync`. Memory of `.grad` is the user's and not counted.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    trackers = [engine.tracker for engine in engines_in(model, "memory_bytes")]
    return sum(tracker.peak if peak else tracker.now for tracker in trackers)
