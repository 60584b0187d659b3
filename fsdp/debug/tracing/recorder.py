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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from fsdp.comm.work import Work
from fsdp.debug.phases import AddRecord
from state_machine import Event

LOOK_EVERY: Final = 500_000
"""Nanoseconds between two looks at what is in flight. A look costs some microseconds for each collective."""
NO_WAIT: Final = 20_000
"""Nanoseconds of a wait, at the most, after which the other collectives are not looked at: hardly any time has passed."""


@dataclass(slots=True, eq=False)
class Collective:
    """One collective of this rank. Times are `time.perf_counter_ns`; 0 means not known."""

    comm: str
    size: int
    """The number of ranks of the communicator."""
    kind: str
    label: str
    received: int
    """Bytes that reached this rank."""
    launched: int = 0
    returned: int = 0
    """When the launch returned."""
    pending_at: int = 0
    """When it was last seen in flight."""
    ended: int = 0
    """When it was first seen to have ended."""
    wait_began: int = 0
    wait_ended: int = 0


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


class Recorder:
    """The records of one trace.

    The fields of records follow each other in flat lists. A step of 12 units has some 400 records: an object for each would take
    as long as all the rest.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._phases: list[Any] = []
        self._memory: list[Any] = []
        self.collectives: list[Collective] = []
        """Every collective, in the order of their launches."""
        self.in_flight: dict[Collective, Work] = {}
        # these take the fields of one record, or of several
        self.add_event: Callable[[tuple[int, int, Event]], None] = self._events.extend
        self.add_phase: AddRecord = self._phases.extend
        self.add_bytes: Callable[[tuple[int, int, str, int]], None] = self._memory.extend
        self.next_look = LOOK_EVERY
        """When the collectives in flight are to be looked at again."""

    @property
    def events(self) -> list[UnitEvent]:
        """Every event, in order."""
        return [UnitEvent(*one) for one in _records(self._events, 3)]

    @property
    def phases(self) -> list[Phase]:
        """Every phase, in the order of their ends."""
        return [Phase(*one) for one in _records(self._phases, 4)]

    @property
    def memory(self) -> Iterator[tuple[int, int, str, int]]:
        """Every change of the bytes held, in order: the time, the root, the kind of memory, its bytes from this moment on."""
        return _records(self._memory, 4)

    def look(self, now: int) -> None:
        """Ask the collectives in flight whether they have ended. See [Note: when a collective ends]."""
        self.next_look = now + LOOK_EVERY
        for one, work in list(self.in_flight.items()):
            is_completed = getattr(work, "is_completed", None)
            if is_completed is not None and not is_completed():
                one.pending_at = now
                continue
            if is_completed is not None:
                # after the answer, because the system may have stopped this process since `now`
                one.ended = perf_counter_ns()
            del self.in_flight[one]

    def launch(self, comm: str, size: int, kind: str, label: str, received: int, launch: Callable[[], Work]) -> Work:
        """Launch a collective of the communicator `comm` of `size` ranks, and look at it until it ends.

        Returns a work that records its end. `received`: bytes that reach this rank.
        """
        one = Collective(comm, size, kind, label, received)
        self.collectives.append(one)
        one.launched = perf_counter_ns()
        work = self.in_flight[one] = launch()
        one.returned = one.pending_at = perf_counter_ns()
        return RecordedWork(work, one, self)


def _records(fields: Sequence[Any], count: int) -> Iterator[tuple[Any, ...]]:
    return zip(*[iter(fields)] * count, strict=True)


class RecordedStory(deque[Event]):
    """The story of one unit, which also records when each event was added."""

    __slots__ = ("append",)

    def __init__(self, story: deque[Event], recorder: Recorder, unit: int) -> None:
        super().__init__(story, story.maxlen)
        keep, add_event = super().append, recorder.add_event

        def append(event: Event) -> None:
            keep(event)
            now = perf_counter_ns()
            add_event((now, unit, event))
            if now > recorder.next_look:
                recorder.look(now)

        # a function of its own, which finds what it needs in half the time of a method
        self.append = append  # type: ignore[method-assign]


class RecordedBytes(dict[str, int]):
    """The bytes held by kind, which also records when each count changed."""

    __slots__ = ("_add_bytes", "_root")

    def __init__(self, held: Mapping[str, int], recorder: Recorder, root: int) -> None:
        super().__init__(held)
        self._add_bytes = recorder.add_bytes
        self._root = root
        for kind, count in held.items():
            self._add_bytes((perf_counter_ns(), root, kind, count))

    def __setitem__(self, kind: str, count: int) -> None:
        dict.__setitem__(self, kind, count)
        self._add_bytes((perf_counter_ns(), self._root, kind, count))


class RecordedWork:
    """A collective in flight whose wait is recorded."""

    __slots__ = ("_collective", "_recorder", "_work")

    def __init__(self, work: Work, collective: Collective, recorder: Recorder) -> None:
        self._work = work
        self._collective = collective
        self._recorder = recorder

    def wait(self) -> None:
        one, began = self._collective, perf_counter_ns()
        self._work.wait()
        one.wait_began, one.wait_ended = began, perf_counter_ns()
        one.ended = one.ended or one.wait_ended
        self._recorder.in_flight.pop(one, None)
        if one.wait_ended - began > NO_WAIT:
            self._recorder.look(one.wait_ended)
