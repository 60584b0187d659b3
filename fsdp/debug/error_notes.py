"""What an error is told on its way to the user: the unit, where it was, and how it got there. Costs nothing until then.

An error keeps its type and its object, and gets one note. What the user's code raised gets a line; what the engine raised, or
met in its own actions, the story too.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final, Protocol

from fsdp.autograd.frames import running_backward
from fsdp.comm.context import Channels
from fsdp.device.storage import Ledger
from fsdp.errors import IllegalTransition, ShardingError, WorldError
from fsdp.params.unit import Unit
from state_machine import ResidencyState, Root, State

MARK: Final = "fsdp: in unit"
ROWS: Final = 8
"""Units in the story of an error; all of them in the full one."""
EVENTS: Final = 6
"""Of each of these."""
_FREED: Final = (("setStorage", "storage of size 0"), ("is not allocated yet",))
"""Words of torch's errors about memory that was given back."""


class Told(Protocol):
    """What can be told of: an engine."""

    @property
    def units(self) -> Sequence[Unit]: ...
    @property
    def channels(self) -> Channels: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def root(self) -> Root: ...
    @property
    def residency(self) -> Sequence[ResidencyState]: ...


def is_noted(error: BaseException) -> bool:
    """Whether it has its note already."""
    return any(note.startswith(MARK) for note in getattr(error, "__notes__", ()))


def add_note(error: BaseException, engine: Told, index: int, ours: bool = False) -> None:
    """Say where `error` came from, unless that was said further inside. `ours`: it arose in an action of the engine."""
    if not is_noted(error):
        with_story = ours or isinstance(error, ShardingError | IllegalTransition | WorldError)
        error.add_note(_note_of(engine, index, with_story) + _reason(error))


def add_note_to_what_ends_the_backward(engine: Told, index: int, then: Callable[[BaseException], None]) -> bool:
    """The same for the exception that is just leaving the backward that runs, which torch shows to nobody before the caller.

    `then` is called with it. Returns whether it will be found.
    """
    short, long = _note_of(engine, index, False), _note_of(engine, index, True)

    def add(error: BaseException) -> None:
        if not is_noted(error):
            told = long if isinstance(error, ShardingError | IllegalTransition | WorldError) else short
            error.add_note(told + _reason(error))
        then(error)

    frame = running_backward()
    if frame is not None:
        _when_it_raises(frame, add)
    return frame is not None


def lines_of(engine: Told) -> Iterator[str]:
    """The full story: the root and its channels, then a line for each unit."""
    yield from _head(engine)
    yield from _table(engine, range(len(engine.units)), None)


def _note_of(engine: Told, index: int, with_story: bool) -> str:
    state, residency = engine.root.lifecycles[index].state, engine.residency[index]
    everyone = engine.channels.everyone
    note = (
        f"{MARK} {engine.units[index].name!r}, {state.name}, whole parameters {residency.name}, "
        f"on rank {everyone.rank} of {everyone.size}"
    )
    if not with_story:
        return note
    resting = [
        one.state is State.IDLE and where is ResidencyState.SHARDED
        for one, where in zip(engine.root.lifecycles, engine.residency, strict=True)
    ]
    others = sorted((one for one in range(len(resting)) if one != index), key=lambda one: resting[one])
    shown = [index, *others[: ROWS - 1]]
    left = len(resting) - len(shown)
    tail = [f"  and {left} more units"] if left else []
    return "\n".join([note, *_head(engine), *_table(engine, shown, EVENTS), *tail])


def _reason(error: BaseException) -> str:
    """What torch's own errors about memory that was given back mean."""
    if not isinstance(error, RuntimeError) or not any(all(word in str(error) for word in words) for words in _FREED):
        return ""
    return (
        "\nIt has read whole parameters whose memory was given back: a tensor has left some unit by a way that no hook has seen "
        "(a closure, a global, or a parameter that was kept). guard=True, or FSDP_GUARD=1 in the environment, names the unit."
    )


def _head(engine: Told) -> Iterator[str]:
    channels = engine.channels
    held = ", ".join(f"{count:,} {kind}" for kind, count in sorted(engine.ledger.held.items()) if count)
    yield (
        f"root {engine.units[0].name!r}, rank {channels.everyone.rank} of {channels.everyone.size}, backward "
        f"{engine.root.backward.name}; bytes held: {held or 'none'}"
    )
    for name, channel in channels.each().items():
        if channel.size > 1:
            yield f"  {name}: {', '.join(channel.recent()) or 'nothing called yet'}"


def _table(engine: Told, shown: Sequence[int], events: int | None) -> Iterator[str]:
    rows = []
    for index in shown:
        lifecycle = engine.root.lifecycles[index]
        last = lifecycle.story if events is None else lifecycle.story[-events:]
        told = " ".join(event.name for event in last) or "nothing yet"
        rows.append((engine.units[index].name, lifecycle.state.name, engine.residency[index].name, told))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])


def _when_it_raises(frame: FrameType, hear: Any) -> None:
    """Call `hear` with the exception that is about to come out of what `frame` has called, by its trace function."""
    before, outer = frame.f_trace, sys.gettrace()

    def trace(where: FrameType, event: str, told: Any) -> Any:
        if event != "exception":
            return trace if before is None else before(where, event, told) and trace
        # not `frame`: a cycle through it would keep the graph, until two collections of garbage later
        where.f_trace = before
        if outer is None:
            sys.settrace(None)
        if isinstance(told[1], BaseException):
            hear(told[1])
        return before if before is None else before(where, event, told)

    frame.f_trace = trace
    if outer is None:
        # Python looks at the trace function of a frame only while tracing is on at all
        sys.settrace(_pass_by)


def _pass_by(frame: FrameType, event: str, told: Any) -> None:
    return None
