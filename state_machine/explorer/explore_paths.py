"""Runs small programs of two or three ranks that go different ways, in every interleaving, and reports the first broken rule.

A rank is a program of calls for each step. It uses `state_machine.paths` as the engine does: it takes part in the gathers that it
does not need, waits for its own, and gathers one unit ahead. What a rank does depends on its program and on results of
collectives alone. So a joint state is how far each rank has come, and every such state that can be reached is visited.

The rules: ranks launch the same collective under one number; every rank comes to the end of its program; a rank computes only
with what it has gathered; all ranks know the same common path after a step; and ranks whose paths lie in the common path meet
once in a step, at its end.
"""

import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, NamedTuple

from state_machine.explorer.garbage import collector_off
from state_machine.paths import END_OF_FORWARD, PATIENCE, Call, Exchange, Gather, Meet, Mixed, Path, Paths, Phase, Place, Tasks

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
    """What this rank sends."""


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


Action = Launch | Wait | UserWait | Ended
Program = Sequence[Path]
"""The calls of each step."""
MakePaths = Callable[[int], Paths]


class Rank:
    """One rank: its actions as far as they are known."""

    def __init__(self, program: Program, make: MakePaths) -> None:
        self.actions: list[Action] = []
        self.launches: list[Launch] = []
        self.launched = [0]
        """The number of collectives that it launches in its first actions, by the number of actions."""
        self.over = False
        self.user = 0
        """The number of collectives of the user's own."""
        self._results: dict[int, object] = {}
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

    def tell(self, number: int, result: object) -> None:
        """The result of a collective is here."""
        self._results[number] = result

    def _launch(self, kind: str, detail: int, given: object = None) -> Generator[Action, None, int]:
        self.launches.append(Launch(kind, detail, given))
        yield self.launches[-1]
        return len(self.launches) - 1

    def _do(self, tasks: Tasks) -> Generator[Action, None, None]:
        result: object = None
        passive: int | None = None
        while True:
            try:
                task = tasks.send(result)
            except StopIteration:
                return
            result = None
            if isinstance(task, Gather):
                if passive is not None:
                    yield Wait(passive)
                passive = yield from self._launch("gather", task.target)
                continue
            if isinstance(task, Meet):
                self._meetings += 1
                number = yield from self._launch("meet", len(task.message), tuple(task.message))
            else:
                assert isinstance(task, Exchange)
                self._meetings += 1
                number = yield from self._launch("exchange", 0, task.path)
            yield Wait(number)
            result = self._results[number]

    def _steps(self, program: Program) -> Iterator[Action]:
        paths = self._paths
        for own in program:
            self._meetings, first, gathered = 0, len(self.launches), dict[int, int]()
            for call in own:
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
                    gathered[call.target] = yield from self._launch("gather", call.target)
                number = gathered.pop(call.target)
                yield Wait(number)
                if self.launches[number][:2] != ("gather", call.target):
                    raise Broken(f"a rank computes with unit {call.target}, which it has not gathered")
                paths.wanted(call)
                for target in paths.ahead(call.phase, AHEAD):
                    if target not in gathered:
                        yield from self._do(paths.want(Call(target, call.phase)))
                        gathered[target] = yield from self._launch("gather", target)
            path = paths.own
            yield from self._do(paths.finish(Place.END_OF_BACKWARD))
            gathers = sum(one.kind == "gather" for one in self.launches[first:])
            yield Ended(paths.common, tuple(paths.idle), self._meetings, gathers, path)


def _gathers(targets: Sequence[int]) -> Tasks:
    for target in targets:
        yield Gather(target)


@collector_off()
def explore_paths(programs: Sequence[Program], make: MakePaths = Paths) -> int:
    """Run the programs in every interleaving; return the number of joint states.

    Raises:
        Broken: a rule is broken.
    """
    ranks = [Rank(program, make) for program in programs]
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
    if isinstance(action, Wait):
        if min(launched) <= action.number:
            return False
        same = [other.launches[action.number] for other in ranks]
        if same[0].kind == "meet":
            rank.tell(action.number, [max(values) for values in zip(*(one.given for one in same), strict=True)])
        elif same[0].kind == "exchange":
            rank.tell(action.number, [one.given for one in same])
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
        if all(_contains(common, own) for own in owns) and {one.meetings for one in ended} != {1}:
            raise Broken(f"in step {number} all paths lie in the common path, and the ranks meet {ended[0].meetings} times")
        known = [own for own in (*before, *owns) if not any(call.phase is Phase.EVALUATION for call in own)]
        if not all(_contains(ended[0].common, own) for own in known):
            raise Broken(f"after step {number} the path of a rank in this step or the one before is not known")
        before = owns
        if (
            not common
            and all(map(_is_straight, owns))
            and ended[0].gathers > len({call for own in owns for call in own} - {END_OF_FORWARD})
        ):
            raise Broken(f"in step {number} ranks that skip units gather a unit twice")
        evaluated.append(any(call.phase is Phase.EVALUATION for own in owns for call in own))
        learned = any(call.phase is Phase.EVALUATION for call in ended[0].common)
        if learned != any(map(all, itertools.pairwise(evaluated))):
            raise Broken(f"after step {number} evaluations are {'' if learned else 'not '}in the common path")
        if set(owns) == {common} and ended[0].gathers != sum(call.target >= 0 for call in common):
            raise Broken(f"in step {number} all ranks take the common path, and gather more than it")
        if (
            number >= PATIENCE
            and _same_for(steps, number, PATIENCE)
            and set(ended[0].common) - {call for own in owns for call in own}
        ):
            raise Broken(f"what no rank has wanted in {PATIENCE} steps before step {number} is gathered for ever")
        common = ended[0].common


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


F0, F1, B0, B1, N0 = (
    Call(0, Phase.FORWARD),
    Call(1, Phase.FORWARD),
    Call(0, Phase.BACKWARD),
    Call(1, Phase.BACKWARD),
    Call(0, Phase.EVALUATION),
)
USER: Final = Call(-2, Phase.FORWARD)
"""A collective of the user's own."""
CHOICES: Final[tuple[Path, ...]] = (
    (F0, F1, END_OF_FORWARD, B1, B0),
    (F0, END_OF_FORWARD, B0),
    (F1, F0, END_OF_FORWARD, B0),
    (F0, F0, END_OF_FORWARD, B0, B0),
    (N0, F0, END_OF_FORWARD, B0),
    (),
)
"""The paths that a rank may take in a step: all units, one unit left out, another order, one repeated, an evaluation, nothing."""


def scenes(ranks: int) -> Iterator[tuple[Program, ...]]:
    """Programs of so many ranks: any paths in the first step, and any in the second; then the second again."""
    if ranks == 2:
        for first in itertools.product(CHOICES, repeat=2):
            for second in itertools.product(CHOICES, repeat=2):
                yield tuple((one, two, two) for one, two in zip(first, second, strict=True))
    else:
        for first in itertools.combinations_with_replacement(CHOICES, ranks):
            yield tuple((one, one) for one in first)
    # once the paths are known, ranks may call a collective of the user's own between forward and backward
    late = ((F0, END_OF_FORWARD, USER, B0), (F0, F1, END_OF_FORWARD, USER, B1, B0))
    yield tuple((tuple(call for call in path if call != USER), path, path) for path in (late * ranks)[:ranks])
    # what is not wanted any more is dropped
    yield tuple((CHOICES[0], *(CHOICES[1],) * (PATIENCE + 2)) for _ in range(ranks))


def run() -> int:
    """Explore the scenes of two and of three ranks and print what was found; return the exit status."""
    for ranks in (2, 3):
        began, states, count = time.perf_counter(), 0, 0
        for programs in scenes(ranks):
            count += 1
            try:
                states += explore_paths(programs)
            except Broken as broken:
                print(f"{ranks} ranks, {programs}: {broken}", file=sys.stderr)
                return 1
        print(f"{ranks} ranks: {count} scenes, {states} joint states, {time.perf_counter() - began:.1f} s")
    return 0
