"""The order of gathers of one root whose ranks may go different ways (`uneven_paths`). It has no side effects.

Rule 1: every rank launches the same sequence of collectives. What comes next is a function of what all ranks know: the common
        path, and the results of meetings. What a rank alone knows goes into messages, and decides nothing by itself.
Rule 2: a rank that wants a call of the common path makes all calls before it, *passively*: it gives its shard and keeps nothing.
Rule 3: a rank that wants any other call makes the rest of the common path passively, and then meets the others.
Rule 4: in a meeting every rank says which call it wants, or that it is at the end. If any call is wanted, one rule chooses one of
        them, and all ranks make it. If none is wanted, the step is over for all ranks together.
Rule 5: the common path of the next step contains the path of every rank in this one. A call of it that no rank has wanted in
        PATIENCE steps is dropped.
Rule 6: a rank that gathers passively does so at a moment of its own. So weights change before the first gather of a step. If a
        rank has changed some later, all ranks must have taken one path and changed weights at the same places in it. Otherwise
        the end of the step is an error.

So a rank whose path lies in the common path meets nobody before the end of its step.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from difflib import SequenceMatcher
from enum import auto
from typing import Any, Final, NamedTuple

from state_machine.vocabulary import MachineEnum

PATIENCE: Final = 8
"""The number of steps after which a call of the common path that no rank has wanted is dropped."""
LONGEST: Final = 4096
"""The most calls in a common path. What is longer is agreed on in meetings."""


class Phase(MachineEnum):
    """The part of a step in which a call is made."""

    FORWARD = auto()
    """In a forward that records a graph."""
    EVALUATION = auto()
    """In a forward that records no graph."""
    BACKWARD = auto()
    """In a backward."""


class Place(MachineEnum):
    """A place in which a rank wants no call, and waits until no rank wants one."""

    END_OF_BACKWARD = auto()
    """At the end of a backward that reduces its gradients."""
    MEETING = auto()
    """Between two steps."""
    STEP = auto()
    """Between two steps, and the optimizer steps next: also on ranks that have no data left."""
    NO_DATA = auto()
    """This rank has no data left. It ends whatever the other ranks end, and needs no backward."""


class Call(NamedTuple):
    """A gather that a rank wants: what is gathered, by number, and when."""

    target: int
    phase: Phase


END_OF_FORWARD: Final = Call(-1, Phase.FORWARD)
"""No gather: a forward of the root is over. What other ranks gather in the rest of theirs is made before the user's code runs."""
Path = tuple[Call, ...]


class Gather(NamedTuple):
    """Gather a target passively."""

    target: int


class Meet(NamedTuple):
    """Combine the messages of all ranks by the maximum, and send the result."""

    message: Sequence[int]


class Exchange(NamedTuple):
    """Exchange the paths of all ranks, and send those of all, by rank."""

    path: Path
    changes: Mapping[int, Sequence[int]]
    """For each target of which this rank holds weights: after how many calls of its path it noticed that they had changed."""


Places = frozenset[Place]
"""The places in which ranks are."""
Tasks = Generator[Gather | Meet | Exchange, Any, Places]
"""What a rank must do, in order: its collectives. It is sent the result of each Meet and Exchange.

It returns the places in which ranks were at the end of the step; none if the step goes on.
"""


class Mixed(Exception):
    """Ranks are in different places: some are at the end of a backward, for example, and others between two steps."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places


class ChangedWeights(Exception):
    """Weights have changed between two gathers of a step, and ranks took different paths or changed them at different places.

    A rank may have given its old shard where another one gave its new one.
    """

    def __init__(self, changed: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.changed = changed
        """The targets that each rank has changed."""


class Paths:
    """The path of one rank through one step, beside the common path.

    Invariant: `common`, `position` and `idle` are the same on all ranks after the same number of collectives.
    """

    def __init__(self, targets: int) -> None:
        self.targets = targets
        """The number of different things that can be gathered."""
        self.common: Path = ()
        self.position = 0
        """The number of calls of the common path that were made in this step."""
        self.idle: list[int] = []
        """For each call of the common path, in how many steps in a row no rank has wanted it."""
        self.met = False
        """Whether a call was chosen in a meeting in this step."""
        self._evaluated = False
        """Whether some rank has evaluated in the last step, outside the common path."""
        self._own: list[Call] = []
        self._changes: dict[int, list[int]] = {}
        """The targets whose weights this rank has changed since its first gather of the step. See `Exchange`."""
        self._used: set[int] = set()
        """The positions of the common path that this rank wanted."""
        self._launched: dict[int, int] = {}
        """The position at which each target was last launched for this rank itself."""

    def forget(self) -> None:
        """A step was abandoned, in different places on different ranks: all ranks learn the common path anew."""
        self.common, self.idle = (), []
        self._evaluated = False
        self._begin()

    # what a rank must do ------------------------------------------------------------------

    def want(self, call: Call) -> Tasks:
        """This rank wants a call. When the tasks are done, it launches the gather itself."""
        passive, found = self.follow(call)
        for target in passive:
            yield Gather(target)
        while not found:
            chosen = self.choose((yield Meet(self.ask(call))))
            found = chosen == call.target
            if not found and chosen is not None:
                yield Gather(chosen)
        return Places()

    def finish(self, place: Place, held: Collection[int] = ()) -> Tasks:
        """This rank wants no call before the end of the step. When the tasks are done, the step is over on all ranks.

        `held`: the targets of which this rank holds weights that an optimizer may change.

        Raises:
            Mixed: the ranks are in different places.
            ChangedWeights: some rank has changed weights, and the ranks took different paths or changed them at different places.
        """
        for target in self.run_out():
            yield Gather(target)
        while (chosen := self.choose(combined := (yield Meet(self.wait(place, bool(self._changes)))))) is not None:
            yield Gather(chosen)
        found: Sequence[Exchange] = ()
        if self.met or self.some_rank_changed(combined):
            found = yield Exchange(self.own, {**dict.fromkeys(held, ()), **self._changes})
        self.check(found)
        self.end(combined, [one.path for one in found])
        return self.places(combined)

    # the common path ----------------------------------------------------------------------

    def take_next(self, call: Call) -> bool:
        """Whether the call is the next one of the common path, which it then has passed. Ranks that go one path need no more."""
        position, common = self.position, self.common
        if position < len(common) and common[position] == call:
            self.position = position + 1
            self._launched[call.target] = position
            return True
        return False

    def follow(self, call: Call) -> tuple[Sequence[int], bool]:
        """Return the targets to gather passively first, and whether the call is the next one of the common path after that."""
        start = self.position
        for position in range(start, len(self.common)):
            if self.common[position] == call:
                self.position = position + 1
                self._launched[call.target] = position
                return self._passive(start, position), True
        self._launched.pop(call.target, None)
        return self.run_out(), False

    def run_out(self) -> Sequence[int]:
        """Return the targets that are left in the common path. They are gathered passively."""
        start, self.position = self.position, len(self.common)
        return self._passive(start, self.position)

    def wanted(self, call: Call) -> None:
        """This rank computes with a target, which was launched for it maybe earlier."""
        self._own.append(call)
        if call.target in self._launched:
            self._used.add(self._launched.pop(call.target))

    def weights_changed(self, targets: Collection[int]) -> None:
        """This rank notices that it has changed weights, after the first gather of the step."""
        for target in targets:
            self._changes.setdefault(target, []).append(len(self._own))

    def forward_ends(self) -> Sequence[int]:
        """A forward of the root is over. Return the targets that other ranks may still gather in theirs."""
        if END_OF_FORWARD not in self.common[self.position :]:
            self._own.append(END_OF_FORWARD)
            return ()
        passive = self.follow(END_OF_FORWARD)[0]
        self.wanted(END_OF_FORWARD)
        return passive

    def forget_launched(self) -> None:
        """What was launched ahead and not used is released."""
        self._launched.clear()

    def ahead(self, phase: Phase, depth: int) -> Sequence[int]:
        """The targets to gather ahead, nearest first: those that come next in the common path in this phase.

        At most `depth` are launched and not used yet.
        """
        position, common, found = self.position, self.common, []
        for number in range(position, min(position + depth - len(self._launched), len(common))):
            target, of_phase = common[number]
            if of_phase is not phase or target < 0:
                break
            found.append(target)
        return found

    # meetings -----------------------------------------------------------------------------

    @property
    def message_size(self) -> int:
        return self._head + len(self.common)

    @property
    def _head(self) -> int:
        """The place in a message behind the targets, the places, and whether weights were changed."""
        return self.targets + len(Place) + 1

    def ask(self, call: Call) -> list[int]:
        """The message of a rank that wants a call. Messages are combined by the maximum."""
        self.met = True
        message = [0] * self.message_size
        message[call.target] = 2 if call.phase is Phase.BACKWARD else 1
        return message

    def wait(self, place: Place, changed: bool) -> list[int]:
        """The message of a rank that wants no call. `changed`: it has changed weights since its first gather of the step."""
        used = [int(position in self._used) for position in range(len(self.common))]
        return [*([0] * self.targets), *(int(place is one) for one in Place), int(changed), *used]

    def some_rank_changed(self, combined: Sequence[int]) -> bool:
        """Whether some rank has changed weights since its first gather of the step."""
        return combined[self._head - 1] > 0

    def choose(self, combined: Sequence[int]) -> int | None:
        """Return the target that all ranks gather next; None if none is wanted.

        Forwards go first, in the order of the units, and then backwards in the opposite order: a rank that skips a unit is not
        overtaken by others, and wants the next one together with them.

        Raises:
            Mixed: none is wanted, and the ranks are in different places.
        """
        forwards = [target for target, value in enumerate(combined[: self.targets]) if value == 1]
        backwards = [target for target, value in enumerate(combined[: self.targets]) if value == 2]
        if forwards or backwards:
            self.met = True
            return min(forwards) if forwards else max(backwards)
        places = self.places(combined)
        if len(places - {Place.NO_DATA}) > 1:
            raise Mixed(places)
        return None

    def places(self, combined: Sequence[int]) -> Places:
        """The places of all ranks that want no call."""
        flags = combined[self.targets : self.targets + len(Place)]
        return Places(place for place, flag in zip(Place, flags, strict=True) if flag)

    # the end of a step --------------------------------------------------------------------

    def check(self, found: Sequence[Exchange]) -> None:
        """Raise ChangedWeights if a gather of this step can have brought old weights of some ranks and new ones of others."""
        changed = [[target for target, places in one.changes.items() if places] for one in found]
        one_path = len({one.path for one in found}) < 2
        for target in {target for targets in changed for target in targets}:
            # a rank that holds nothing of a target gives nothing to its gathers
            places = {tuple(one.changes[target]) for one in found if target in one.changes}
            if not one_path or len(places) > 1:
                raise ChangedWeights(changed)

    @property
    def own(self) -> Path:
        """The path of this rank in this step so far."""
        return tuple(self._own)

    def end(self, combined: Sequence[int], paths: Sequence[Path]) -> None:
        """The step is over. `combined`: the last message. `paths`: those of all ranks, which are needed only if `met`."""
        used = combined[self._head :]
        self.idle = [0 if value else steps + 1 for value, steps in zip(used, self.idle, strict=True)]
        kept = [position for position, steps in enumerate(self.idle) if steps < PATIENCE]
        if len(kept) < len(self.common):
            self.common, self.idle = tuple(self.common[one] for one in kept), [self.idle[one] for one in kept]
        if self.met:
            self._learn(paths)
        else:
            self._evaluated = False
        self._begin()

    def _learn(self, paths: Sequence[Path]) -> None:
        """Merge the paths of all ranks into the common one.

        Evaluations are learned if there were some in two steps in a row: they are long, and rare in most programs.
        """
        evaluates = any(call.phase is Phase.EVALUATION for path in paths for call in path)
        if not (evaluates and self._evaluated):
            paths = [tuple(call for call in path if call.phase is not Phase.EVALUATION) for path in paths]
        self._evaluated = evaluates
        common, idle = self.common, self.idle
        for path in dict.fromkeys(paths):
            common, idle = _merge(common, idle, path)
        if len(common) <= LONGEST:
            self.common, self.idle = common, idle

    def _begin(self) -> None:
        self.position, self.met = 0, False
        self._own, self._changes, self._used, self._launched = [], {}, set(), {}

    def _passive(self, start: int, end: int) -> Sequence[int]:
        return [call.target for call in self.common[start:end] if call.target >= 0]


def _merge(common: Path, idle: Sequence[int], path: Path) -> tuple[Path, list[int]]:
    """A sequence that contains both, each in its order."""
    merged: list[Call] = []
    steps: list[int] = []
    for kind, a, b, c, d in SequenceMatcher(None, common, path, autojunk=False).get_opcodes():
        merged += common[a:b]
        steps += [0] * (b - a) if kind == "equal" else idle[a:b]
        if kind != "equal":
            merged += path[c:d]
            steps += [0] * (d - c)
    return tuple(merged), steps
