"""Computes from a record of the pretend accelerator when everything would have run, and what the computing stream waited for.

Rule 1: no clock is read. A kernel takes as long as its bytes or its products of matrices at given speeds, a collective as long as
        the bytes that a rank receives. The host takes no time, but it waits.
Rule 2: the collectives of one communicator run one after another, in the order of its stream, as NCCL's do. Communicators that
        are active at the same time share the link of their rank in equal parts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

COMPUTES: Final = 0
"""The number of the stream that computes: the default one of its device."""
COLLECTIVES: Final = ("gathers", "reductions", "reductions", "reductions", "broadcasts")
"""What the kinds of `collectives.h` are counted as."""

Place = tuple[int, int]
"""A device and a stream of it."""


class Speeds(NamedTuple):
    """What a device does in a second."""

    operations: float
    """Multiplications and additions in products of matrices."""
    bytes: float
    """Bytes that kernels read and write."""
    link: float
    """Bytes that a rank receives from others."""


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work on a stream: a kernel, a wait for another stream, or the part of a rank in a collective."""

    device: int
    stream: int
    gate: int
    """How many waits of the host came before its launch."""
    seconds: float = 0.0
    """How long a kernel takes."""
    target: tuple[Place, int] | None = None
    """A wait: the stream that is waited for, and how far."""
    collective: "Collective | None" = None
    begin: float = -1.0
    """A part of a collective: when its stream has come to it."""
    end: float = -1.0
    cause: "Work | None" = None
    """The work that ended when this one could begin, or that a wait waited for; None: nothing held it up."""


@dataclass(slots=True, eq=False)
class Collective:
    """A collective of several ranks. It begins when the streams of all of them have come to it."""

    kind: str
    members: int
    received: float
    """The bytes that a rank receives."""
    seconds: float
    """How long it takes if it has the link for itself."""
    parts: list[Work] = field(default_factory=list)
    begin: float = 0.0
    last: Work | None = None
    """The part that came last."""

    @property
    def end(self) -> float:
        return self.parts[0].end


class Wait(NamedTuple):
    """A time in which the computing stream had nothing to run."""

    begin: float
    end: float
    reasons: Counter[str]
    """The seconds of what it waited for: `gathers`, `reductions`, `broadcasts`, `copies` (kernels of other streams) or `peers`
    (what another rank computed)."""


class Stretch(NamedTuple):
    """What a device did between two marks, in seconds. `computing` and the waits together are the time from begin to end."""

    device: int
    begin: float
    end: float
    computing: float
    """The kernels of the computing stream."""
    waits: list[Wait]
    """Those of the computing stream; the last one is that of the host."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def reasons(self) -> Counter[str]:
        """The seconds of all waits, by reason."""
        return sum([wait.reasons for wait in self.waits], Counter[str]())


class Timeline:
    """When everything in a record would have run."""

    def __init__(self, record: str, speeds: Speeds, shares_link: bool = True) -> None:
        """`record`: see `device.recording`. `shares_link`: False gives each communicator a link of its own."""
        self._shares_link = shares_link
        self._streams: defaultdict[Place, list[Work]] = defaultdict(list)
        self._first: dict[Place, int] = {}
        """The position in each stream of its first work in the record."""
        self._gates: defaultdict[int, list[tuple[Place, int]]] = defaultdict(list)
        """For each device, what its host has waited for: a stream, and how far."""
        self._marks: dict[tuple[int, int], tuple[int, int]] = {}
        """For each device and number of a mark, how many waits of the host and works of the computing stream came before."""
        self._collectives: dict[int, Collective] = {}
        for line in record.splitlines():
            self._read(line.split(), speeds)
        self._done: dict[Place, int] = dict.fromkeys(self._streams, 0)
        self._open: defaultdict[int, list[tuple[float, Work | None]]] = defaultdict(lambda: [(0.0, None)])
        """For each device, when its host has come to its start and behind each of its waits, and the work that decided it."""
        self._ready: list[Collective] = []
        """Collectives to which all their ranks have come, and which have not begun."""
        self._run()

    @property
    def devices(self) -> list[int]:
        """The devices of the record."""
        return sorted({device for device, _ in self._streams})

    def between(self, device: int, first: int, last: int) -> Stretch:
        """What a device did between two marks, before each of which its host has waited for all of its streams."""
        (gate, begun), (last_gate, over) = self._marks[device, first], self._marks[device, last]
        (begin, _), (end, decided) = self._open[device][gate], self._open[device][last_gate]
        works, waits, now = self._streams[device, COMPUTES][begun:over], [], begin
        for work in works:
            waited_for = work if work.target is not None else work.cause
            if waited_for is not None and waited_for.end > now:
                waits.append(self._wait(now, waited_for))
            now = max(now, work.end)
        if decided is not None and end > now:
            waits.append(self._wait(now, decided))
        return Stretch(device, begin, end, sum(work.seconds for work in works), waits)

    def collectives(self, device: int) -> Iterator[tuple[Collective, float]]:
        """The collectives of a device in the order of their launches, each with the time when its stream had come to it."""
        for collective in self._collectives.values():
            yield from [(collective, part.begin) for part in collective.parts if part.device == device]

    def _wait(self, since: float, waited_for: Work) -> Wait:
        """What ran from `since` to the end of `waited_for` and held that up, step by step back."""
        reasons: Counter[str] = Counter()
        work: Work | None = waited_for
        while work is not None and work.end > since:
            if (collective := work.collective) is not None:
                reasons[collective.kind] += work.end - max(collective.begin, since)
                work = collective.last
                assert work is not None
            elif work.target is None:
                reasons["peers" if work.stream == COMPUTES else "copies"] += work.end - max(work.begin, since)
            work = work.cause
        return Wait(since, waited_for.end, reasons)

    # reading ------------------------------------------------------------------------------

    def _read(self, parts: list[str], speeds: Speeds) -> None:
        kind, device = parts[0], int(parts[1])
        gate = len(self._gates[device])
        if kind == "mark":
            self._marks[device, int(parts[2])] = gate, len(self._streams[device, COMPUTES])
            return
        stream, position = int(parts[2]), int(parts[3])
        if kind == "host":
            self._gates[device].append(((device, stream), position))
            return
        work = Work(device, stream, gate)
        if kind == "kernel":
            work.seconds = max(float(parts[5]) / speeds.operations, float(parts[6]) / speeds.bytes)
        elif kind == "wait":
            work.target = (int(parts[4]), int(parts[5])), int(parts[6])
        else:
            key, members, number, received = int(parts[4]), int(parts[5]), int(parts[6]), float(parts[7])
            if key not in self._collectives:
                self._collectives[key] = Collective(COLLECTIVES[number], members, received, received / speeds.link)
            work.collective = self._collectives[key]
            work.collective.parts.append(work)
        first = self._first.setdefault((device, stream), position)
        assert position == first + len(self._streams[device, stream]), "the record does not have all work of a stream"
        self._streams[device, stream].append(work)

    # running ------------------------------------------------------------------------------

    def _run(self) -> None:
        now, left = 0.0, dict[Collective, float]()
        while True:
            while self._advance():
                pass
            if not self._ready and not left:
                break
            speeds = {one: self._speed(one, left) for one in left}
            over = min(left, key=lambda one: left[one] / speeds[one], default=None)
            end = float("inf") if over is None else now + left[over] / speeds[over]
            begin = min((one.begin for one in self._ready), default=float("inf"))
            passed, now = min(begin, end) - now, min(begin, end)
            for one in left:
                left[one] -= passed * speeds[one]
            if over is not None and end <= begin:
                del left[over]
                self._finish(over, end)
            else:
                left |= {one: one.seconds for one in self._ready if one.begin <= now}
                self._ready = [one for one in self._ready if one not in left]
        waiting = [place for place, works in self._streams.items() if self._done[place] < len(works)]
        assert not waiting, f"these streams wait for ever: {waiting}"

    def _speed(self, collective: Collective, active: dict[Collective, float]) -> float:
        """The share of the link that a collective has."""
        if not self._shares_link:
            return 1.0
        devices = [part.device for other in active for part in other.parts]
        return 1.0 / max(devices.count(part.device) for part in collective.parts)

    def _finish(self, collective: Collective, end: float) -> None:
        for part in collective.parts:
            part.end = end
            self._done[part.device, part.stream] += 1

    def _advance(self) -> bool:
        """Run all that does not wait for the link. Return whether there was any."""
        moved = False
        for device, gates in self._gates.items():
            opened = self._open[device]
            while len(opened) <= len(gates) and (over := self._over(*gates[len(opened) - 1])):
                opened.append(max(opened[-1], over[0], key=lambda one: one[0]))
                moved = True
        for place, works in self._streams.items():
            while self._done[place] < len(works) and self._begin(place, works[self._done[place]]):
                moved = True
        return moved

    def _over(self, place: Place, position: int) -> list[tuple[float, Work | None]]:
        """When the stream had come to `position`, and its work there; nothing if it is not there yet."""
        index = position - self._first.get(place, position + 1)
        if index < 0:  # before the record
            return [(0.0, None)]
        work = self._streams[place][index]
        return [(work.end, work)] if work.end >= 0 else []

    def _begin(self, place: Place, work: Work) -> bool:
        """Begin the next work of a stream if nothing holds it up. Return whether that changed anything."""
        opened = self._open[place[0]]
        if work.begin >= 0 or work.gate >= len(opened):
            return False
        starts: list[tuple[float, Work | None]] = [opened[work.gate]]
        if self._done[place]:
            before = self._streams[place][self._done[place] - 1]
            starts.append((before.end, before))
        if work.target is not None:
            if not (over := self._over(*work.target)):
                return False
            starts += over
        work.begin, work.cause = max(starts, key=lambda one: one[0])
        if work.collective is not None:
            self._arrive(work.collective, work)
            return True
        work.end = work.begin + work.seconds
        self._done[place] += 1
        return True

    def _arrive(self, collective: Collective, part: Work) -> None:
        if collective.last is None or part.begin > collective.begin:
            collective.begin, collective.last = part.begin, part
        if sum(one.begin >= 0 for one in collective.parts) == collective.members:
            self._ready.append(collective)
