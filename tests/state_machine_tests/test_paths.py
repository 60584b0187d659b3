"""Ranks that go different ways launch the same collectives in every interleaving, and every changed rule is noticed."""

from collections.abc import Collection, Iterator, Sequence

import pytest

from state_machine.__main__ import main
from state_machine.explorer.explore_paths import Broken, explore_paths
from state_machine.explorer.path_scenes import B0, B1, CHANGE, F0, F1, N0, changing_scenes, scenes
from state_machine.paths import (
    END_OF_FORWARD,
    LONGEST,
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
from tests.support.everything import EVERYTHING

FULL: Path = (F0, F1, END_OF_FORWARD, B1, B0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_interleaving_keeps_the_rules(ranks: int) -> None:
    programs = list(scenes(ranks))
    programs = programs if EVERYTHING or ranks == 3 else [*programs[::7], *programs[-2:]]
    states = sum(map(explore_paths, programs))
    assert len(programs) >= 55 and states > 30_000


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_of_different_ages_are_an_error_in_every_interleaving(ranks: int) -> None:
    programs = list(changing_scenes(ranks))
    programs = programs if EVERYTHING else programs[::3]
    states = sum(map(explore_paths, programs))
    assert len(programs) >= 60 and states > 10_000


class SkipsWhatItDoesNotWant(Paths):
    def follow(self, call: Call) -> tuple[Sequence[int], bool]:
        return (), super().follow(call)[1]


class MeetsAtOnce(Paths):
    def follow(self, call: Call) -> tuple[Sequence[int], bool]:
        position = self.position
        passive, found = super().follow(call)
        if not found:
            self.position, passive = position, ()
        return passive, found


class StaysWhereItIs(Paths):
    def follow(self, call: Call) -> tuple[Sequence[int], bool]:
        position = self.position
        passive, found = super().follow(call)
        if found and passive:
            self.position = position + len(passive)
        return passive, found


class MatchesUnitsOnly(Paths):
    def follow(self, call: Call) -> tuple[Sequence[int], bool]:
        return super().follow(next((one for one in self.common[self.position :] if one.target == call.target), call))


class LeavesTheRest(Paths):
    def run_out(self) -> Sequence[int]:
        self.position = len(self.common)
        return ()


class GathersItsOwn(Paths):
    def want(self, call: Call) -> Tasks:
        passive, found = self.follow(call)
        for target in passive:
            yield Gather(target)
        if not found:
            self.choose((yield Meet(self.ask(call))))


class LeavesEarly(Paths):
    def finish(self, place: Place, held: Collection[int] = ()) -> Tasks:
        for target in self.run_out():
            yield Gather(target)
        combined = yield Meet(self.wait(place, bool(self._changes)))
        self.choose(combined)
        self.end(combined, ())


class ChoosesTheLastForward(Paths):
    def choose(self, combined: Sequence[int]) -> int | None:
        chosen = super().choose(combined)
        forwards = [target for target, value in enumerate(combined[: self.targets]) if value == 1]
        return max(forwards) if forwards else chosen


class ChoosesTheFirstBackward(Paths):
    def choose(self, combined: Sequence[int]) -> int | None:
        chosen = super().choose(combined)
        values = combined[: self.targets]
        return values.index(2) if chosen is not None and 2 in values and 1 not in values else chosen


class ChoosesBackwardsFirst(Paths):
    def choose(self, combined: Sequence[int]) -> int | None:
        chosen = super().choose(combined)
        backwards = [target for target, value in enumerate(combined[: self.targets]) if value == 2]
        return max(backwards) if backwards else chosen


class AsksForNothing(Paths):
    def ask(self, call: Call) -> list[int]:
        super().ask(call)
        return [0] * self.message_size


class ExchangesIfItAsked(Paths):
    def choose(self, combined: Sequence[int]) -> int | None:
        met = self.met
        chosen = super().choose(combined)
        self.met = met
        return chosen


class LearnsItsOwn(Paths):
    def _learn(self, paths: Sequence[Path]) -> None:
        super()._learn([self.own])


class LearnsTheFirst(Paths):
    def _learn(self, paths: Sequence[Path]) -> None:
        super()._learn(paths[:1])


class LearnsNothing(Paths):
    def _learn(self, paths: Sequence[Path]) -> None:
        return


class ForgetsWhatItKnew(Paths):
    def _learn(self, paths: Sequence[Path]) -> None:
        self.common, self.idle = (), []
        super()._learn(paths)


class LearnsEvaluationsAtOnce(Paths):
    def _learn(self, paths: Sequence[Path]) -> None:
        self._evaluated = True
        super()._learn(paths)


class NeverLearnsEvaluations(Paths):
    def _learn(self, paths: Sequence[Path]) -> None:
        self._evaluated = False
        super()._learn(paths)


class RemembersEvaluations(Paths):
    def end(self, combined: Sequence[int], paths: Sequence[Path]) -> None:
        evaluated = self._evaluated
        super().end(combined, paths)
        self._evaluated = self._evaluated or evaluated


class DropsWhatItDoesNotUse(Paths):
    def end(self, combined: Sequence[int], paths: Sequence[Path]) -> None:
        head = len(combined) - len(self.common)
        super().end([*combined[:head], *(position in self._used for position in range(len(self.common)))], paths)


class NeverDrops(Paths):
    def end(self, combined: Sequence[int], paths: Sequence[Path]) -> None:
        head = len(combined) - len(self.common)
        super().end([*combined[:head], *([1] * len(self.common))], paths)


class UsesNothing(Paths):
    def wait(self, place: Place, changed: bool) -> list[int]:
        message = super().wait(place, changed)
        return [*message[: self._head], *([0] * len(self.common))]


class ComputesOnAfterAForward(Paths):
    def forward_ends(self) -> Sequence[int]:
        self._own.append(END_OF_FORWARD)
        return ()


class KeepsItsPosition(Paths):
    def _begin(self) -> None:
        position = getattr(self, "position", 0)
        super()._begin()
        self.position = position


class KeepsItsPath(Paths):
    def _begin(self) -> None:
        own = getattr(self, "_own", [])
        super()._begin()
        self._own = own


class KeepsThatItMet(Paths):
    def _begin(self) -> None:
        met = getattr(self, "met", False)
        super()._begin()
        self.met = met


class HidesThatItChanged(Paths):
    def wait(self, place: Place, changed: bool) -> list[int]:
        return super().wait(place, False)


class SaysThatItChanged(Paths):
    def wait(self, place: Place, changed: bool) -> list[int]:
        return super().wait(place, True)


class AcceptsEveryChange(Paths):
    def check(self, found: Sequence[Exchange]) -> None:
        return


class RefusesEveryChange(Paths):
    def check(self, found: Sequence[Exchange]) -> None:
        if any(any(one.changes.values()) for one in found):
            raise ChangedWeights([])


class RefusesDifferentPaths(Paths):
    def check(self, found: Sequence[Exchange]) -> None:
        if len({one.path for one in found}) > 1:
            raise ChangedWeights([])


class LooksAtPathsAlone(Paths):
    def check(self, found: Sequence[Exchange]) -> None:
        changed = [{target: places for target, places in one.changes.items() if places} for one in found]
        super().check(
            [one._replace(changes={target: [0] for target in targets}) for one, targets in zip(found, changed, strict=True)]
        )


class LooksAtTheNumberOfChanges(Paths):
    def check(self, found: Sequence[Exchange]) -> None:
        changes = [{target: [0] * len(places) for target, places in one.changes.items()} for one in found]
        super().check([one._replace(changes=of_rank) for one, of_rank in zip(found, changes, strict=True)])


class LooksAtRanksThatChangedAlone(Paths):
    def finish(self, place: Place, held: Collection[int] = ()) -> Tasks:
        return super().finish(place)


class LooksAtItsOwnChanges(Paths):
    def check(self, found: Sequence[Exchange]) -> None:
        super().check([one for one in found if one.path == self.own])


class DoesNotMixWithRanksWithoutData(Paths):
    def choose(self, combined: Sequence[int]) -> int | None:
        chosen = super().choose(combined)
        if chosen is None and len(self.places(combined)) > 1:
            raise Mixed(self.places(combined))
        return chosen


class LeavesWhileOthersTrain(Paths):
    def places(self, combined: Sequence[int]) -> Places:
        return super().places(combined) - {Place.END_OF_BACKWARD}


class NeverLeaves(Paths):
    def places(self, combined: Sequence[int]) -> Places:
        return super().places(combined) | {Place.END_OF_BACKWARD}


def mutants() -> Iterator[type[Paths]]:
    yield from (one for one in Paths.__subclasses__() if one.__module__ == __name__)


FIRST: Sequence[tuple[Sequence[Path], ...]] = (
    *scenes(3),
    ((FULL, FULL), ((F0, END_OF_FORWARD, B0), (F0, END_OF_FORWARD, B0))),
    # a rank in its forward is waited for by one in its backward
    (((F1, END_OF_FORWARD, B1, B0), ()), ((F0, F1, F1, END_OF_FORWARD, B1, B0), ())),
    (((F0, F1, END_OF_FORWARD, B1, B0),), ((F1, END_OF_FORWARD, B1),)),
    # the first paths are known when the second are learned
    ((FULL, (F1, F0, F1), FULL), (FULL, (F1, F0, F1), FULL)),
    # evaluations with a step without one between them
    (((N0, *FULL), FULL, (N0, *FULL), FULL),) * 2,
    ((FULL, (F0, B0), FULL), (FULL, FULL, FULL)),
    # a rank has no data left
    ((FULL, FULL), (FULL,)),
    # weights change in the middle of a step, and all ranks take one path, or one leaves out a unit
    (((F0, CHANGE, F1, B1, B0),),) * 2,
    # they take one path, and change weights at different places, or one of them changes none
    (((F0, CHANGE, F1, B1, B0),), ((F0, F1, CHANGE, B1, B0),)),
    (((F0, CHANGE, F1, B1, B0),), ((F0, F1, B1, B0),)),
    # they take one path, but have not done so before
    (((F0, CHANGE, B0), (F0, F1, CHANGE, B1, B0)), ((F0, CHANGE, B0), (F0, F1, CHANGE, B1, B0))),
    ((FULL, (F0, CHANGE, F1, B1, B0)), (FULL, (CHANGE, F1, B1))),
    ((FULL, (CHANGE, F0, F1, B1, B0)), (FULL, (CHANGE, F1, B1))),
)
"""The scenes in which a changed rule is noticed."""


def test_the_scenes_of_the_mutants_keep_the_rules() -> None:
    assert sum(map(explore_paths, FIRST)) > 30_000


@pytest.mark.parametrize("mutant", [*mutants()], ids=lambda mutant: mutant.__name__)
def test_a_changed_rule_is_noticed(mutant: type[Paths]) -> None:
    for programs in FIRST:
        try:
            explore_paths(programs, mutant)
        except (Broken, ValueError, IndexError):
            return
    pytest.fail(f"nothing notices {mutant.__name__}")


def run(paths: Paths, tasks: Tasks, *results: object) -> list[object]:
    """The tasks of one rank that is told these results."""
    left = list(results)
    found: list[object] = []
    result: object = None
    while True:
        try:
            found.append(tasks.send(result))
        except StopIteration:
            return found
        result = None if isinstance(found[-1], Gather) else left.pop(0)


def test_a_rank_that_waits_between_steps_while_another_ends_a_backward_is_refused() -> None:
    paths = Paths(2)
    with pytest.raises(Mixed):
        run(paths, paths.finish(Place.MEETING), [0, 0, 1, 1, 0, 0, 0])


def test_a_common_path_that_would_be_too_long_is_not_learned() -> None:
    paths = Paths(1)
    long = (F0,) * (LONGEST + 1)
    for _ in long[:2]:
        run(paths, paths.want(F0), [1, *([0] * 5)])
        paths.wanted(F0)
    run(paths, paths.finish(Place.END_OF_BACKWARD), [0, 1, *([0] * 4)], [Exchange(long, {}), Exchange((), {})])
    assert paths.common == ()


def test_an_abandoned_step_is_forgotten_with_all_that_was_learned() -> None:
    paths = Paths(2)
    run(paths, paths.want(F0), [1, *([0] * 6)])
    paths.wanted(F0)
    run(paths, paths.finish(Place.END_OF_BACKWARD), [0, 0, 1, *([0] * 4)], [Exchange((F0,), {})])
    assert paths.common == (F0,) and paths.idle == [0]
    run(paths, paths.want(F0))
    paths.wanted(F0)
    paths.forget()
    assert (paths.common, paths.idle, paths.position, paths.own, paths.met) == ((), [], 0, (), False)


def test_what_comes_next_ends_with_its_phase() -> None:
    paths = Paths(2)
    paths.common, paths.idle = FULL, [0] * len(FULL)
    assert paths.ahead(Phase.FORWARD, 1) == [0]
    assert paths.ahead(Phase.FORWARD, 9) == [0, 1]
    assert paths.ahead(Phase.BACKWARD, 9) == []
    paths.follow(END_OF_FORWARD)
    assert paths.ahead(Phase.BACKWARD, 9) == [1, 0]
    assert paths.position == 3 and B1 in paths.common and N0 not in paths.common and PATIENCE == 8


def test_the_command_explores_all_scenes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("CHOICES", "CHANGES"):
        monkeypatch.setattr(f"state_machine.explorer.path_scenes.{name}", ((F0,), ()))
    assert main(["paths"]) == 0
    assert "2 ranks" in capsys.readouterr().out
