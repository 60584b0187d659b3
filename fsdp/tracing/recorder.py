"""Records events, phases, collectives and bytes while steps run. Appends to lists; everything else is done after the steps.

[Note: how a trace listens]
Nothing in a step asks whether a trace is made. The recorder puts its own containers and handlers where the engine writes
anyway: each lifecycle appends its events to a story, the memory tracker writes its counts to a dict, the engine calls handlers
from tables. Communicators alone compare one attribute with None.

[Note: when a collective ends]
A collective over gloo runs on threads of its own, and announces no end. The recorder asks each one in flight after a
wait and at events, at most every LOOK_EVERY there. So an end that nobody waits for is known to lie between two of these moments.
The end of a collective that the host waits for is the end of the wait. When a collective starts to move bytes is known only if
nothing was before it on its communicator: then it is the launch.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from fsdp.comm.work import Work
from fsdp.debug.phases import Record
from state_machine import Event

LOOK_EVERY: Final = 500_000
"""Nanoseconds between two looks at what is in flight. A look costs some microseconds for each collective."""
NO_WAIT: Final = 20_000
"""Nanoseconds that a wait takes, at the most, for a collective that has ended."""


@dataclass(slots=True)
class Collective:
    """One collective of this rank. Times are `time.perf_counter_ns`; 0 means not known."""

    comm: str
    size: int
    """The number of ranks of the communicator."""
    kind: str
    label: str
    received: int
    """Bytes that reached this rank."""
    launched: int
    returned: int = 0
    """When the launch returned."""
    pending_at: int = 0
    """When it was last seen in flight."""
    ended: int = 0
    """When it was first seen to have ended."""
    wait_began: int = 0
    wait_ended: int = 0

    def seen(self, now: int, completed: bool) -> None:
        """It was looked at: it had ended, or not."""
        if not completed:
            self.pending_at = now
        elif not self.ended:
            self.ended = now

    def waited(self, began: int, ended: int) -> None:
        """The host has waited for it."""
        self.wait_began, self.wait_ended = began, ended
        if not self.ended:
            # a wait as short as that waits for nothing: it had ended before
            self.ended = ended if ended - began > NO_WAIT else began

    def launch_returned(self, now: int) -> None:
        self.returned = self.pending_at = now


class UnitEvent(NamedTuple):
    """An event of the lifecycle of a unit."""

    time: int
    unit: int
    event: Event


class Phase(NamedTuple):
    """The execution of one action or effect of the engine for one unit."""

    began: int
    ended: int
    name: str
    unit: int


class Bytes(NamedTuple):
    """The bytes of one kind of memory, from this moment on."""

    time: int
    root: int
    kind: str
    held: int


class Recorder:
    """The records of one trace."""

    def __init__(self) -> None:
        # plain tuples: a named one takes as long as all the rest of a record
        self._events: list[tuple[int, int, Event]] = []
        self._phases: list[Record] = []
        self._memory: list[tuple[int, int, str, int]] = []
        self.collectives: list[Collective] = []
        self.add_event, self.add_phase, self.add_bytes = self._events.append, self._phases.append, self._memory.append
        self._looked = 0
        """When the collectives in flight were looked at."""
        self._in_flight: list[tuple[Collective, Callable[[], bool]]] = []

    @property
    def events(self) -> list[UnitEvent]:
        """Every event, in order."""
        return [UnitEvent(*one) for one in self._events]

    @property
    def phases(self) -> list[Phase]:
        """Every phase, in the order of their ends."""
        return [Phase(*one) for one in self._phases]

    @property
    def memory(self) -> list[Bytes]:
        """Every change of the bytes held, in order."""
        return [Bytes(*one) for one in self._memory]

    def look_now_and_then(self, now: int) -> None:
        """Look, unless that was done a short time ago."""
        if self._in_flight and now - self._looked > LOOK_EVERY:
            self.look(now)

    def look(self, now: int) -> None:
        """Ask the collectives in flight whether they have ended. See [Note: when a collective ends]."""
        self._looked = now
        left = []
        for collective, is_completed in self._in_flight:
            if not collective.ended:
                completed = is_completed()
                collective.seen(now, completed)
                if not completed:
                    left.append((collective, is_completed))
        self._in_flight = left

    def follow(self, collective: Collective, is_completed: Callable[[], bool]) -> None:
        """Look at a collective until it ends."""
        self._in_flight.append((collective, is_completed))


class RecordedStory(deque[Event]):
    """The story of one unit, which also records when each event was added."""

    def __init__(self, story: deque[Event], recorder: Recorder, unit: int) -> None:
        super().__init__(story, story.maxlen)
        self._recorder = recorder
        self._add_event = recorder.add_event
        self._unit = unit

    def append(self, event: Event) -> None:
        super().append(event)
        now = perf_counter_ns()
        self._add_event((now, self._unit, event))
        self._recorder.look_now_and_then(now)


class RecordedBytes(dict[str, int]):
    """The bytes held by kind, which also records when each count changed."""

    def __init__(self, held: Mapping[str, int], recorder: Recorder, root: int) -> None:
        super().__init__(held)
        self._add_bytes = recorder.add_bytes
        self._root = root
        for kind, count in held.items():
            self._add_bytes((perf_counter_ns(), root, kind, count))

    def __setitem__(self, kind: str, count: int) -> None:
        super().__setitem__(kind, count)
        self._add_bytes((perf_counter_ns(), self._root, kind, count))


class CommRecorder:
    """Records the collectives of one communicator."""

    def __init__(self, recorder: Recorder, comm: str, size: int) -> None:
        self._recorder = recorder
        self._comm = comm
        self._size = size

    def launch(self, kind: str, label: str, received: int, launch: Callable[[], Work]) -> Work:
        """Launch a collective, and return a work that records its end."""
        collective = Collective(self._comm, self._size, kind, label, received, perf_counter_ns())
        self._recorder.collectives.append(collective)
        work = launch()
        collective.launch_returned(perf_counter_ns())
        is_completed = getattr(work, "is_completed", None)
        if is_completed is not None:
            self._recorder.follow(collective, is_completed)
        return RecordedWork(work, collective, self._recorder)


class RecordedWork:
    """A collective in flight whose wait is recorded."""

    __slots__ = ("_collective", "_recorder", "_work")

    def __init__(self, work: Any, collective: Collective, recorder: Recorder) -> None:
        self._work = work
        self._collective = collective
        self._recorder = recorder

    def wait(self) -> None:
        began = perf_counter_ns()
        self._work.wait()
        ended = perf_counter_ns()
        self._collective.waited(began, ended)
        if ended - began > NO_WAIT:
            self._recorder.look(ended)
