"""Every reachable joint state of small unit trees keeps the promises, and the explorer would notice if one did not."""

from collections.abc import Mapping

import pytest

from state_machine.explorer.explore import TREES, explore, run
from state_machine.explorer.model import Tree
from state_machine.residency import RESIDENCES, Effect, Request, ResidencyState
from state_machine.table import BACKWARD, TABLES, BackwardEvent, BackwardState, BackwardStep, ReshardPolicy, Step
from state_machine.vocabulary import Action, Event, State
from tests.support.everything import EVERYTHING

BY_NAME = {tree.name: tree for tree in TREES}
# floors, not exact counts: a model that permits less than it did must not pass unseen
STATES = {
    "alone": 100,
    "alone-frozen": 30,
    "pair": 7_000,
    "pair-frozen": 2_000,
    "pair-kept": 8_000,
    "alone-always": 100,
    "pair-always": 1_000,
    "pair-stepping": 1_000,
    "pair-kept-stepping": 1_000,
    "chain": 10_000,
    "chain-summoned": 6_000,
    "chain-frozen": 1_000,
    "tree": 6_000,
}


LARGE = ("pair", "pair-frozen", "chain", "chain-summoned", "pair-kept", "tree")
"""Three minutes of one core together. `make test-all` explores them, and so does `python -m state_machine explore`."""


def test_the_large_trees_exist() -> None:
    assert set(LARGE) < set(BY_NAME)


@pytest.mark.parametrize("tree", [tree for tree in TREES if EVERYTHING or tree.name not in LARGE], ids=lambda tree: tree.name)
def test_no_reachable_state_violates_an_invariant(tree: Tree) -> None:
    found = explore(tree)
    assert found.violations == 0, "\n".join(found.story)
    assert found.states >= STATES[tree.name]
    assert found.refusals > 0, "nothing illegal was tried"


def test_the_trees_cover_depth_width_frozen_units_and_every_strategy() -> None:
    assert set(STATES) == set(BY_NAME)
    assert {len(tree.units) for tree in TREES} == {1, 2, 3, 4}
    assert any(unit.frozen for tree in TREES for unit in tree.units if len(tree.units) == 4)
    assert {unit.reshard_policy for unit in BY_NAME["chain"].units} == {AFTER_FORWARD, AFTER_BACKWARD}
    assert {unit.reshard_policy for unit in BY_NAME["pair-always"].units} == {ReshardPolicy.NEVER}
    for bound in ("nested", "no_sync", "autograd_grad", "stepping", "summoning", "again", "breakage"):
        assert any(getattr(tree.scope, bound) for tree in TREES if len(tree.units) > 1), f"nobody explores {bound}"


def test_two_explorations_find_the_same() -> None:
    first, second = (explore(BY_NAME["alone"]) for _ in range(2))
    assert first._replace(seconds=0) == second._replace(seconds=0)


def plant(monkeypatch: pytest.MonkeyPatch, strategy: ReshardPolicy, state: State, changed: Mapping[Event, Step | None]) -> None:
    """Change rows of one table for the time of a test; None deletes."""
    table = TABLES[strategy]
    row = {event: step for event, step in {**table[state], **changed}.items() if step is not None}
    monkeypatch.setitem(TABLES, strategy, {**table, state: row})  # type: ignore[arg-type]


AFTER_FORWARD, AFTER_BACKWARD = ReshardPolicy.AFTER_FORWARD, ReshardPolicy.AFTER_BACKWARD
BUGS = {
    "the whole parameters are not freed after the forward": (
        ("pair", AFTER_FORWARD, State.FORWARD, {Event.POST_FORWARD: Step(State.IDLE, (Action.HOOK_OUTPUTS,))}),
        (
            "root: PRE_FORWARD",
            "child: PRE_FORWARD",
            "child: POST_FORWARD",
            "=> child: its modules use unsharded parameters and nothing computes",
        ),
    ),
    "a kept copy survives an optimizer step": (
        ("alone", AFTER_BACKWARD, State.IDLE, {Event.PRE_FORWARD: Step(State.FORWARD, (Action.UNSHARD,))}),
        ("root: prefetched", "the optimizer steps", "root: PRE_FORWARD", "=> root: computes with a stale copy"),
    ),
    "a second entry is refused": (
        ("alone", AFTER_BACKWARD, State.BACKWARD_PRE, {Event.PRE_BACKWARD: None}),
        ("root: PRE_FORWARD", "root: PRE_BACKWARD", None),
    ),
    "the gradients are reduced twice": (
        (
            "alone",
            AFTER_BACKWARD,
            State.BACKWARD_PRE,
            {Event.POST_BACKWARD: Step(State.BACKWARD_POST, (Action.RESHARD, Action.REDUCE_GRADS, Action.REDUCE_GRADS))},
        ),
        (None, None, "root: POST_BACKWARD", "=> root: reduced a gradient twice, or none"),
    ),
    "nothing is flushed": (
        ("alone", AFTER_BACKWARD, State.BACKWARD_PRE, {Event.FINAL_CALLBACK: Step(State.IDLE, (Action.RESHARD, Action.COMMIT))}),
        (None, None, "all: FINAL_CALLBACK", "=> root: committed before a gradient that arrived was reduced"),
    ),
    "a failed backward drops under a reduction in flight": (
        (
            "alone",
            AFTER_BACKWARD,
            State.BACKWARD_POST,
            {Event.BACKWARD_FAILED: Step(State.IDLE, (Action.RESHARD, Action.DROP_GRADS))},
        ),
        (None, None, None, "all: BACKWARD_FAILED", "=> root: dropped gradients under a reduction in flight"),
    ),
    "an abandoned step keeps the loan": (
        (
            "alone",
            AFTER_BACKWARD,
            State.SUMMONED,
            {Event.STEP_ABANDONED: Step(State.IDLE, (Action.WAIT_REDUCTIONS, Action.DROP_GRADS))},
        ),
        ("root: SUMMON", "all: STEP_ABANDONED", "=> root: abandoned and still summoned"),
    ),
    "a unit may be summoned from inside its forward": (
        ("alone", AFTER_BACKWARD, State.FORWARD, {Event.SUMMON: Step(State.SUMMONED, (Action.RESHARD, Action.GATHER_FULL))}),
        ("root: PRE_FORWARD", None, "=> root: SUMMON was not refused"),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported_with_its_shortest_story(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree, strategy, state, changed), story = BUGS[bug]
    plant(monkeypatch, strategy, state, changed)
    found = explore(BY_NAME[tree])
    assert found.violations == 1
    if story[-1] is not None:
        assert found.story[-1] == story[-1]
        assert len(found.story) == len(story), found.story
    for told, expected in zip(found.story, story, strict=False):
        assert expected is None or told.startswith(expected), found.story


def test_a_gather_freed_under_its_own_writes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**RESIDENCES[ResidencyState.UNSHARDING], Request.RESHARD: Step(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,))}
    monkeypatch.setitem(RESIDENCES, ResidencyState.UNSHARDING, row)  # type: ignore[arg-type]
    assert explore(BY_NAME["alone"]).story[-1] == "=> root: freed memory during an all-gather"


def test_a_second_callback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = BackwardState.RUNNING_SYNC
    row = {**BACKWARD[runs], BackwardEvent.UNIT_JOINS: BackwardStep(BackwardState.BEGINNING, queue_callback=True)}
    monkeypatch.setitem(BACKWARD, runs, row)  # type: ignore[arg-type]
    assert explore(BY_NAME["pair"]).story[-1].endswith("a second callback in one backward")


def test_the_command_prints_a_table_and_the_story_of_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("alone") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["tree", "units", "joint", "states", "transitions", "refused", "violations", "seconds"]
    assert line.split()[0] == "alone"
    plant(monkeypatch, AFTER_BACKWARD, State.FORWARD, {Event.POST_FORWARD_NO_GRAD: Step(State.IDLE)})
    assert run("alone") == 1
    assert (
        "    root: POST_FORWARD_NO_GRAD\n    => root: its modules use unsharded parameters and nothing computes"
        in capsys.readouterr().out
    )
    assert run("forest") == 2
    assert "no tree 'forest'; there are: all, alone, " in capsys.readouterr().out
