"""Runs small programs of two or three ranks that go different ways, in every interleaving, and reports the first broken rule.

A rank is a program of calls for each step. It uses `state_machine.paths` as the engine does: it takes part in the gathers that it
does not need, waits for its own, and gathers one unit ahead. What a rank does depends on its program and on results of
collectives alone. So a joint state is how far each rank has come, and every such state that can be reached is visited.

The rules: ranks launch the same collective under one number; every rank comes to the end of its program; a rank computes only
with what it has gathered; all ranks know the same common path after a step; ranks whose paths lie in the common path meet
once in a step, at its end; and a step is an error on all ranks if one of them has computed with new weights of some ranks and old
ones of others, and never an error if weights change before the first gather alone, or all ranks take one path and change weights
at the same places in it.
"""

import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, NamedTuple

from state_machine.explorer import collector_off
from state_machine.explorer.path_scenes import CHANGE, N0, USER, Program, changing_scenes, scenes
from state_machine.paths import (
    END_OF_FORWARD,
    PATIENCE,
    Call,
    ChangedWeights,
    Exchange,
    Gather,
    Meet,
    Mixed,
    Path,
    Paths,
    Phase,
    Place,
    Places,
    Tasks,
)

UNITS: Final = 2
AHEAD: Final = 1
MOST: Final = 1000
"""More actions than any of these programs has."""


class Broken(Exception):
    """A rule is broken."""


class Launch(NamedTuple):
    """A rank launches a collective."""

    kind: str
    detail: int
    """What must be the same on all ranks: the target, or the size of the message."""
    given: object = None
    """What this rank sends: the number of its weights, its message, or its path."""


class Wait(NamedTuple):
    """A rank waits for a collective, by its number."""

    number: int


class UserWait(NamedTuple):
    """A rank waits in a collective of the user's own, until as many of the other ranks are in theirs."""

    number: int


class Ended(NamedTuple):
    """A rank has ended a step."""

    common: Path
    idle: tuple[int, ...]
    meetings: int
    """The number of meetings, and of exchanges of paths."""
    gathers: int
    own: Path
    program: Path
    """What the rank was to do in the step: its path, and where it changes weights."""
    changed: bool
    """Whether this rank has changed weights after its first gather."""
    mixed: bool
    """Whether this rank has computed with old weights of some ranks and new ones of others."""
    refused: bool
    """Whether the end of the step was an error. The program ends there."""


Action = Launch | Wait | UserWait | Ended
MakePaths = Callable[[int], Paths]


class Rank:
    """One rank: its actions as far as they are known."""

    def __init__(self, program: Program, serves: bool, make: MakePaths) -> None:
        self.actions: list[Action] = []
        self.launches: list[Launch] = []
        self.launched = [0]
        """The number of collectives that it launches in its first actions, by the number of actions."""
        self.over = False
        self.user = 0
        """The number of collectives of the user's own."""
        self._weights = 0
        """How often this rank has changed its weights."""
        self._mixed = False
        self._serves = serves
        """Whether this rank serves the others when it has no data left."""
        self.results: dict[int, object] = {}
        """Those of the collectives that are over, by number."""
        self._paths = make(UNITS)
        self._run = self._steps(program)

    def action(self, number: int) -> Action | None:
        """The action of this number; None if the program ends before."""
        while len(self.actions) <= number and not self.over:
            if number == MOST:
                raise Broken("a rank does not come to the end of its program")
            try:
                action = next(self._run)
                self.actions.append(action)
                self.launched.append(self.launched[-1] + isinstance(action, Launch))
            except StopIteration:
                self.over = True
            except Mixed as failure:
                raise Broken("a meeting found ranks in different places") from failure
        return self.actions[number] if number < len(self.actions) else None

    def _launch(self, kind: str, detail: int, given: object = None) -> Generator[Action, None, int]:
        self.launches.append(Launch(kind, detail, given))
        yield self.launches[-1]
        return len(self.launches) - 1

    def _do(self, tasks: Tasks) -> Generator[Action, None, Places]:
        result: object = None
        passive: int | None = None
        while True:
            try:
                task = tasks.send(result)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            result = None
            if isinstance(task, Gather):
                if passive is not None:
                    yield Wait(passive)
                passive = yield from self._gather(task.target)
                continue
            self._meetings += 1
            if isinstance(task, Meet):
                number = yield from self._launch("meet", len(task.message), tuple(task.message))
            else:
                assert isinstance(task, Exchange)
                number = yield from self._launch("exchange", 0, task)
            yield Wait(number)
            result = self.results[number]

    def _gather(self, target: int) -> Generator[Action, None, int]:
        return (yield from self._launch("gather", target, self._weights))

    def _steps(self, program: Program) -> Iterator[Action]:
        paths = self._paths
        for own in program:
            self._meetings, first, gathered, self._mixed = 0, len(self.launches), dict[int, int](), False
            changed = False
            for call in own:
                if call == CHANGE:
                    self._weights += 1
                    if len(self.launches) > first:
                        changed = True
                        paths.weights_changed(range(UNITS))
                    continue
                if call == USER:
                    self.user += 1
                    yield UserWait(self.user)
                    continue
                if call == END_OF_FORWARD:
                    yield from self._do(_gathers(paths.forward_ends()))
                    continue
                if call.target not in gathered:
                    if not paths.take_next(call):
                        yield from self._do(paths.want(call))
                    gathered[call.target] = yield from self._gather(call.target)
                yield from self._compute(gathered.pop(call.target), call.target)
                paths.wanted(call)
                for target in paths.ahead(call.phase, AHEAD):
                    if target not in gathered:
                        yield from self._do(paths.want(Call(target, call.phase)))
                        gathered[target] = yield from self._gather(target)
            path, refused = paths.own, False
            try:
                yield from self._do(paths.finish(Place.END_OF_BACKWARD, range(UNITS)))
            except ChangedWeights:
                refused = True
            gathers = sum(one.kind == "gather" for one in self.launches[first:])
            yield Ended(paths.common, tuple(paths.idle), self._meetings, gathers, path, own, changed, self._mixed, refused)
            if refused:
                return
        places = Places([Place.END_OF_BACKWARD])
        while self._serves and places - {Place.NO_DATA}:
            self._meetings, first = 0, len(self.launches)
            places = yield from self._do(paths.finish(Place.NO_DATA))
            gathers = sum(one.kind == "gather" for one in self.launches[first:])
            yield Ended(paths.common, tuple(paths.idle), self._meetings, gathers, (), (), False, False, False)

    def _compute(self, number: int, target: int) -> Generator[Action, None, None]:
        yield Wait(number)
        if self.launches[number][:2] != ("gather", target):
            raise Broken(f"a rank computes with unit {target}, which it has not gathered")
        weights = self.results[number]
        assert isinstance(weights, list)
        self._mixed = self._mixed or len(set(weights)) > 1


def _gathers(targets: Sequence[int]) -> Tasks:
    for target in targets:
        yield Gather(target)
    return Places()


@collector_off()
def explore_paths(programs: Sequence[Program], make: MakePaths = Paths) -> int:
    """Run the programs in every interleaving; return the number of joint states.

    If some have fewer steps than others, every rank that has come to its end serves the others.

    Raises:
        Broken: a rule is broken.
    """
    serves = len(set(map(len, programs))) > 1
    ranks = [Rank(program, serves, make) for program in programs]
    start = (0,) * len(ranks)
    seen, frontier = {start}, [start]
    complete, alike = False, 0
    while frontier:
        here = frontier.pop()
        launched = [rank.launched[count] for rank, count in zip(ranks, here, strict=True)]
        moves = 0
        for index, rank in enumerate(ranks):
            if not _may_move(ranks, index, here, launched):
                continue
            moves += 1
            there = (*here[:index], here[index] + 1, *here[index + 1 :])
            if there not in seen:
                seen.add(there)
                frontier.append(there)
            if isinstance(rank.action(here[index]), Launch):
                alike = _check(ranks, alike)
        if not moves:
            if not all(rank.over and count == len(rank.actions) for rank, count in zip(ranks, here, strict=True)):
                raise Broken("nobody can go on")
            complete = True
    if not complete:
        raise Broken("the programs do not end")
    _check_steps(ranks)
    return len(seen)


def _may_move(ranks: Sequence[Rank], index: int, here: Sequence[int], launched: Sequence[int]) -> bool:
    """Whether a rank can make its next action: it is no wait, or all have launched what it waits for."""
    rank = ranks[index]
    action = rank.action(here[index])
    if action is None:
        return False
    if isinstance(action, UserWait):
        reached = [[*other.actions[:count], other.action(count)] for other, count in zip(ranks, here, strict=True)]
        return all(sum(isinstance(one, UserWait) for one in actions) >= action.number for actions in reached)
    if isinstance(action, Wait):
        if min(launched) <= action.number:
            return False
        given = [other.launches[action.number].given for other in ranks]
        is_meeting = rank.launches[action.number].kind == "meet"
        rank.results[action.number] = [*map(max, zip(*given, strict=True))] if is_meeting else given
    return True


def _check(ranks: Sequence[Rank], alike: int) -> int:
    """Check that ranks have launched the same collectives, as far as they have come; return the number of those.

    The first `alike` of them are checked before.
    """
    known = min(len(rank.launches) for rank in ranks)
    for number in range(alike, known):
        found = [rank.launches[number][:2] for rank in ranks]
        if len(set(found)) > 1:
            raise Broken(f"ranks launch {found} under number {number}")
    return known


def _check_steps(ranks: Sequence[Rank]) -> None:
    if len({len(rank.launches) for rank in ranks}) > 1:
        raise Broken("some ranks have launched more than others")
    steps = [[action for action in rank.actions if isinstance(action, Ended)] for rank in ranks]
    common: Path = ()
    evaluated: list[bool] = []
    before: list[Path] = []
    for number, ended in enumerate(zip(*steps, strict=True)):
        if len({one[:2] for one in ended}) > 1:
            raise Broken(f"after step {number} the ranks know different common paths")
        owns = [one.own for one in ended]
        _check_weights(number, ended)
        if ended[0].refused:
            return
        known = all(_contains(common, own) for own in owns) and not any(one.changed for one in ended)
        if known and {one.meetings for one in ended} != {1}:
            raise Broken(f"in step {number} all paths lie in the common path, and the ranks meet {ended[0].meetings} times")
        learned = [own for own in (*before, *owns) if not any(call.phase is Phase.EVALUATION for call in own)]
        if not all(_contains(ended[0].common, own) for own in learned):
            raise Broken(f"after step {number} the path of a rank in this step or the one before is not known")
        before = owns
        if (
            not common
            and all(map(_is_straight, owns))
            and ended[0].gathers > len({call for own in owns for call in own} - {END_OF_FORWARD})
        ):
            raise Broken(f"in step {number} ranks that skip units gather a unit twice")
        evaluated.append(any(call.phase is Phase.EVALUATION for own in owns for call in own))
        evaluates = any(call.phase is Phase.EVALUATION for call in ended[0].common)
        if evaluates != any(map(all, itertools.pairwise(evaluated))):
            raise Broken(f"after step {number} evaluations are {'' if evaluates else 'not '}in the common path")
        if set(owns) == {common} and ended[0].gathers != sum(call.target >= 0 for call in common):
            raise Broken(f"in step {number} all ranks take the common path, and gather more than it")
        if (
            number >= PATIENCE
            and _same_for(steps, number, PATIENCE)
            and set(ended[0].common) - {call for own in owns for call in own}
        ):
            raise Broken(f"what no rank has wanted in {PATIENCE} steps before step {number} is gathered for ever")
        common = ended[0].common


def _check_weights(number: int, ended: Sequence[Ended]) -> None:
    """Check that a step is an error if a rank has computed with weights of different ages, and no error for nothing."""
    refused = ended[0].refused
    if any(one.refused != refused for one in ended):
        raise Broken(f"the end of step {number} is an error on some ranks only")
    if any(one.mixed for one in ended) and not refused:
        raise Broken(f"in step {number} a rank computes with old weights of some ranks and new ones of others")
    if refused and (len({one.program for one in ended}) == 1 or not any(one.changed for one in ended)):
        raise Broken(f"step {number} is an error, though all ranks did the same, or weights changed before it alone")


def _same_for(steps: Sequence[Sequence[Ended]], number: int, count: int) -> bool:
    """Whether every rank has taken the same path in the last `count` steps and in this one."""
    return all(len({one.own for one in of_rank[number - count : number + 1]}) == 1 for of_rank in steps)


def _is_straight(path: Path) -> bool:
    """Whether each unit is gathered once in the forward, in order, and once in the backward, in the opposite order."""
    forward, backward = ([call.target for call in path if call.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    forward = [target for target in forward if target >= 0]
    return forward == sorted(set(forward)) and backward == sorted(set(backward), reverse=True) and N0 not in path


def _contains(path: Path, part: Path) -> bool:
    rest = iter(path)
    return all(call in rest for call in part)


def run() -> int:
    """Explore the scenes of two and of three ranks and print what was found; return the exit status."""
    for ranks in (2, 3):
        began, states, count = time.perf_counter(), 0, 0
        for programs in itertools.chain(scenes(ranks), changing_scenes(ranks)):
            count += 1
            try:
                states += explore_paths(programs)
            except Broken as broken:
                print(f"{ranks} ranks, {programs}: {broken}", file=sys.stderr)
                return 1
        print(f"{ranks} ranks: {count} scenes, {states} joint states, {time.perf_counter() - began:.1f} s")
    return 0
