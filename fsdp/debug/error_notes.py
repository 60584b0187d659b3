"""Adds to an error which unit it came from, where that unit was, and its last events. Costs nothing until an error is raised.

An error keeps its type and its object and gets one note. An error of the user's code gets one line. An error that the engine
raised, or that one of its own actions met, gets the story as well. What is printed is a snapshot: a picture of one engine at one
moment, as plain data.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from fsdp.autograd.frames import running_backward
from fsdp.comm.failure.pending_call import Wait
from fsdp.errors import IllegalTransition, ShardingError, WorldError
from state_machine import BackwardState, Event, ResidencyState, State


@dataclass(frozen=True, slots=True)
class UnitSnapshot:
    """One unit in a snapshot."""

    name: str
    state: State
    residency: ResidencyState
    events: tuple[Event, ...]
    """The last events of the unit, oldest first."""

    @property
    def at_rest(self) -> bool:
        """Whether the unit is IDLE and holds its shards only."""
        return self.state is State.IDLE and self.residency is ResidencyState.SHARDED


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The units, the communicators and the memory of one engine at one moment. It holds no tensor and no engine."""

    rank: int
    """Among all processes of the job, as in errors about ranks."""
    world_size: int
    backward: BackwardState
    bytes_held: Mapping[str, int]
    """Bytes by kind of memory."""
    collectives: Mapping[str, tuple[str, ...]]
    """The last collectives of each communicator of more than one rank, oldest first."""
    waits: tuple[Wait, ...]
    """The waits of this rank that are long, one for each communicator on which it waits."""
    units: tuple[UnitSnapshot, ...]
    """Every unit, outermost first."""


Snapshot = Callable[[], EngineSnapshot]
"""Takes a snapshot of the engine. It is called only if a note is written."""
MARK: Final = "fsdp: in unit"
"""How each note begins."""
ROWS: Final = 8
"""The number of units in the story of an error. The full story has all of them."""
EVENTS: Final = 6
"""The number of events of each unit in the story of an error."""
_FREED: Final = (("setStorage", "storage of size 0"), ("is not allocated yet",))
"""Words of torch's errors about released memory. All words of one tuple must be in the text."""


def is_noted(error: BaseException) -> bool:
    """Whether `error` has its note already."""
    return any(note.startswith(MARK) for note in getattr(error, "__notes__", ()))


def add_note(error: BaseException, snapshot: Snapshot, index: int, ours: bool = False) -> None:
    """Note on `error` that it came from unit `index`, unless an inner call has noted a unit already.

    `ours` says that an action of the engine raised it.
    """
    if not is_noted(error):
        with_story = ours or isinstance(error, ShardingError | IllegalTransition | WorldError)
        error.add_note(_note_of(snapshot(), index, with_story) + _reason(error))


def add_note_to_what_ends_the_backward(snapshot: Snapshot, index: int, then: Callable[[BaseException], None]) -> bool:
    """Add the note to the exception that is leaving the running backward, and call `then` with it.

    torch shows this exception to nobody before the caller of the backward. Returns whether the exception will be found.
    """
    now = snapshot()

    def add(error: BaseException) -> None:
        add_note(error, lambda: now, index)
        then(error)

    frame = running_backward()
    if frame is not None:
        _when_it_raises(frame, add)
    return frame is not None


def lines_of(snapshot: EngineSnapshot) -> Iterator[str]:
    """The full story: one line for the root, one for each wait, one for each communicator, one for each unit."""
    yield from _head(snapshot)
    yield from _table(snapshot.units, None)


def _note_of(snapshot: EngineSnapshot, index: int, with_story: bool) -> str:
    unit = snapshot.units[index]
    note = (
        f"{MARK} {unit.name!r}, {unit.state.name}, parameters {unit.residency.name}, "
        f"on rank {snapshot.rank} of {snapshot.world_size}"
    )
    if not with_story:
        return note
    others = sorted((one for one in snapshot.units if one is not unit), key=lambda one: one.at_rest)
    shown = [unit, *others[: ROWS - 1]]
    left = len(snapshot.units) - len(shown)
    return "\n".join([note, *_head(snapshot), *_table(shown, EVENTS), *([f"  and {left} more units"] if left else [])])


def _reason(error: BaseException) -> str:
    """The explanation of torch's own errors about released memory; empty for every other error."""
    if not isinstance(error, RuntimeError) or not any(all(word in str(error) for word in words) for words in _FREED):
        return ""
    return (
        "\nIt has read unsharded parameters whose memory was released: a tensor has left some unit by a path that no hook sees "
        "(a closure, a global, or a parameter that was kept). guard=True, or FSDP_GUARD=1 in the environment, names the unit."
    )


def _head(snapshot: EngineSnapshot) -> Iterator[str]:
    held = ", ".join(f"{count:,} {kind}" for kind, count in sorted(snapshot.bytes_held.items()) if count)
    yield (
        f"root {snapshot.units[0].name!r}, rank {snapshot.rank} of {snapshot.world_size}, backward "
        f"{snapshot.backward.name}; bytes held: {held or 'none'}"
    )
    yield from communicator_lines(snapshot)


def communicator_lines(snapshot: EngineSnapshot) -> Iterator[str]:
    """For each communicator, what this rank waits for there, and its last collectives."""
    yield from (f"  {wait.describe()}" for wait in snapshot.waits)
    for name, calls in snapshot.collectives.items():
        yield f"  {name}: {', '.join(calls) or 'nothing called yet'}"


def _table(units: Sequence[UnitSnapshot], events: int | None) -> Iterator[str]:
    rows = []
    for unit in units:
        last = unit.events if events is None else unit.events[-events:]
        story = " ".join(event.name for event in last) or "nothing yet"
        rows.append((unit.name, unit.state.name, unit.residency.name, story))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])


def _when_it_raises(frame: FrameType, on_error: Callable[[BaseException], None]) -> None:
    """Call `on_error` with the exception that is about to leave a function called by `frame`, by the frame's trace function."""
    before, outer = frame.f_trace, sys.gettrace()

    def trace(where: FrameType, event: str, arg: Any) -> Any:
        if event != "exception":
            return trace if before is None else before(where, event, arg) and trace
        # not `frame`: a cycle through it would keep the graph until the second garbage collection after this
        where.f_trace = before
        if outer is None:
            sys.settrace(None)
        if isinstance(arg[1], BaseException):
            on_error(arg[1])
        return before if before is None else before(where, event, arg)

    frame.f_trace = trace
    if outer is None:
        # Python reads the trace function of a frame only while tracing is on
        sys.settrace(lambda *_: None)
