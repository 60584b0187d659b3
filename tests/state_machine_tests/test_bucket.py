"""Buckets: every cell written out a second time by hand, every reachable joint state, and bugs that must be noticed."""

from collections.abc import Mapping

import pytest

from state_machine.bucket import (
    BUCKETS,
    UNITS,
    BucketAction,
    BucketEvent,
    BucketKind,
    BucketState,
    UnitEvent,
    UnitState,
)
from state_machine.bucket_queue import BucketQueue
from state_machine.explorer.explore_buckets import SCENES, explore_buckets
from state_machine.machine import Step

A, E, K, S = BucketAction, BucketEvent, BucketKind, BucketState

CELLS = """
    EMPTY POST_BACKWARD -> READY: MARK, OFFER
    EMPTY TAKE_STOCK -> EMPTY: COUNT
    EMPTY FLUSH_GRADS -> ASKING: OFFER
    EMPTY ACCUMULATE -> EMPTY: ACCUMULATE_UNSHARDED
    EMPTY DRAINED -> EMPTY:
    EMPTY DROP_GRADS -> EMPTY: FORGET
    READY TURN -> REDUCING: LAUNCH_REDUCTION
    READY TURN_FROZEN -> PASSED: PASS_BY
    READY TAKE_STOCK -> READY: COUNT
    READY FLUSH_GRADS -> READY:
    READY DRAINED -> READY:
    READY DROP_GRADS -> EMPTY: FORGET
    ASKING TURN -> ASKING: ASK
    ASKING SOME_RANK_HAS -> REDUCING: MARK, LAUNCH_REDUCTION
    ASKING NO_RANK_HAS -> PASSED: MARK
    ASKING TURN_FROZEN -> PASSED: MARK, PASS_BY
    ASKING DRAINED -> ASKING:
    ASKING DROP_GRADS -> EMPTY: FORGET
    REDUCING MAKE_ROOM -> REDUCING: WAIT
    REDUCING LANDED -> REDUCED:
    REDUCING TAKE_STOCK -> REDUCING: COUNT_REMAINDER
    REDUCING FLUSH_GRADS -> REDUCING:
    REDUCING REMAINDER_TURN -> REDUCING: LOOK_HERE
    REDUCING REMAINDER_TURN_CHECKED -> REDUCING: LOOK_EVERYWHERE
    REDUCING SOME_RANK_HAS -> REDUCING: WAIT
    REDUCING DRAINED -> BROKEN_OFF:
    REDUCED TAKE_STOCK -> REDUCED: COUNT_REMAINDER
    REDUCED FLUSH_GRADS -> REDUCED:
    REDUCED REMAINDER_TURN -> REDUCED: LOOK_HERE
    REDUCED REMAINDER_TURN_CHECKED -> REDUCED: LOOK_EVERYWHERE
    REDUCED SOME_RANK_HAS -> REDUCING_REMAINDER: LAUNCH_REMAINDER
    REDUCED COMMIT -> EMPTY: PUT
    REDUCED DRAINED -> REDUCED:
    REDUCED DROP_GRADS -> EMPTY: FORGET
    REDUCING_REMAINDER MAKE_ROOM -> REDUCING_REMAINDER: WAIT
    REDUCING_REMAINDER LANDED -> REDUCED:
    REDUCING_REMAINDER DRAINED -> BROKEN_OFF:
    PASSED TAKE_STOCK -> PASSED: COUNT_REMAINDER
    PASSED FLUSH_GRADS -> PASSED:
    PASSED REMAINDER_TURN -> PASSED:
    PASSED REMAINDER_TURN_CHECKED -> PASSED:
    PASSED COMMIT -> EMPTY:
    PASSED DRAINED -> PASSED:
    PASSED DROP_GRADS -> EMPTY: FORGET
    BROKEN_OFF DRAINED -> BROKEN_OFF:
    BROKEN_OFF DROP_GRADS -> EMPTY: FORGET
"""
READERS = """
    REDUCING REMAINDER_TURN -> REDUCING: LOOK_EVERYWHERE
    REDUCED REMAINDER_TURN -> REDUCED: LOOK_EVERYWHERE
"""
# how the cells of other kinds differ; a line without an arrow says what cannot happen there
DIFFERENT = {
    K.ORDINARY: "",
    K.BEHIND_EARLY: READERS,
    K.EARLY: f"""{READERS}
        EMPTY GRADS_COMPLETE -> READY_EARLY: MARK, OFFER
        READY_EARLY TURN -> REDUCING_EARLY: LAUNCH_REDUCTION
        READY_EARLY POST_BACKWARD -> READY:
        READY_EARLY TAKE_STOCK -> READY_EARLY: COUNT
        READY_EARLY FLUSH_GRADS -> READY:
        READY_EARLY DRAINED -> READY_EARLY:
        READY_EARLY DROP_GRADS -> EMPTY: FORGET
        READY GRADS_COMPLETE -> READY:
        REDUCING_EARLY MAKE_ROOM -> REDUCING_EARLY:
        REDUCING_EARLY LANDED -> REDUCED:
        REDUCING_EARLY POST_BACKWARD -> REDUCING:
        REDUCING_EARLY TAKE_STOCK -> REDUCING_EARLY: COUNT_REMAINDER
        REDUCING_EARLY FLUSH_GRADS -> REDUCING:
        REDUCING_EARLY DRAINED -> BROKEN_OFF:
        REDUCING GRADS_COMPLETE -> REDUCING:
        REDUCED GRADS_COMPLETE -> REDUCED:
        REDUCED POST_BACKWARD -> REDUCED:
    """,
    K.FIND_UNUSED: f"""{READERS}
        EMPTY GRADS_COMPLETE -> READY: MARK, OFFER
        EMPTY UNUSED -> READY: OFFER
        EMPTY LAUNCH_ANYWAY -> READY: MARK, OFFER
        EMPTY TAKE_STOCK
        EMPTY FLUSH_GRADS
        READY GRADS_COMPLETE -> READY:
        READY POST_BACKWARD -> READY:
        READY LAUNCH_ANYWAY -> READY:
        READY TAKE_STOCK
        READY FLUSH_GRADS
        ASKING TURN
        ASKING SOME_RANK_HAS
        ASKING NO_RANK_HAS
        ASKING TURN_FROZEN
        ASKING DRAINED
        ASKING DROP_GRADS
        REDUCING GRADS_COMPLETE -> REDUCING:
        REDUCING POST_BACKWARD -> REDUCING:
        REDUCING LAUNCH_ANYWAY -> REDUCING:
        REDUCED GRADS_COMPLETE -> REDUCED:
        REDUCED POST_BACKWARD -> REDUCED:
        REDUCED LAUNCH_ANYWAY -> REDUCED:
        PASSED POST_BACKWARD -> PASSED:
        PASSED LAUNCH_ANYWAY -> PASSED:
    """,
    K.AT_END: """
        EMPTY POST_BACKWARD -> HELD: MARK
        EMPTY GRADS_COMPLETE -> EMPTY:
        EMPTY UNUSED -> EMPTY:
        EMPTY LAUNCH_ANYWAY -> READY: MARK, OFFER
        HELD GRADS_COMPLETE -> HELD:
        HELD LAUNCH_ANYWAY -> READY: OFFER
        HELD TAKE_STOCK -> HELD: COUNT
        HELD FLUSH_GRADS -> READY: OFFER
        HELD DRAINED -> HELD:
        HELD DROP_GRADS -> EMPTY: FORGET
        READY TAKE_STOCK
        READY FLUSH_GRADS
        REDUCING REMAINDER_TURN -> REDUCING:
        REDUCING REMAINDER_TURN_CHECKED -> REDUCING:
        REDUCING SOME_RANK_HAS
        REDUCED REMAINDER_TURN -> REDUCED:
        REDUCED REMAINDER_TURN_CHECKED -> REDUCED:
        REDUCED SOME_RANK_HAS
        REDUCING_REMAINDER MAKE_ROOM
        REDUCING_REMAINDER LANDED
        REDUCING_REMAINDER DRAINED
    """,
}
# floors, not exact counts: a model that permits less than it did must not pass unseen
STATES = {
    "ordinary": 20_000,
    "ordinary-shared": 3_000,
    "ordinary-kept": 2_000,
    "early": 5_000,
    "early-shared": 50_000,
    "early-kept": 8_000,
    "early-at-once": 60_000,
    "find-unused": 60_000,
    "find-unused-hooked": 80_000,
    "at-end": 40_000,
    "alone": 6_000,
    "alone-behind": 1_500,
    "alone-early": 10_000,
    "alone-early-frozen": 150,
    "alone-unused": 15_000,
    "alone-unused-frozen": 1_000,
    "alone-at-end": 1_000,
    "alone-unused-at-end": 2_000,
}
BY_NAME = {scene.name: scene for scene in SCENES}


def written(kind: BucketKind) -> dict[tuple[str, str], str]:
    """The cells of a kind, as they are written above."""
    cells: dict[tuple[str, str], str] = {}
    for line in (CELLS + DIFFERENT[kind]).splitlines():
        cell, arrow, answer = line.partition("->")
        if not cell.strip():
            continue
        state, event = cell.split()
        if arrow:
            cells[state, event] = answer.strip()
        else:
            del cells[state, event]
    return cells


def check_cells(kind: BucketKind) -> None:
    """Put a bucket into every state, let everything happen to it, and compare."""
    cells = written(kind)
    for state in BucketState:
        for event in BucketEvent:
            queue = BucketQueue(["layers.3"], [0], [kind], 1)
            queue._states[0] = state
            if (answer := cells.get((state.name, event.name))) is None:
                with pytest.raises((RuntimeError, KeyError)):
                    queue.on(0, event)
                assert queue._states[0] is state, "it moved while it refused"
                continue
            actions = ", ".join(action.name for action in queue.on(0, event))
            assert f"{queue._states[0].name}: {actions}".strip() == answer, (kind, state, event)


def check_units() -> None:
    """Every cell of a unit."""
    routes = {
        UnitState.OPEN: (),
        UnitState.DONE: (UnitEvent.POST_BACKWARD,),
        UnitState.REOPENED: (UnitEvent.POST_BACKWARD, UnitEvent.GATHERED),
        UnitState.OPEN_OUTSIDE: (UnitEvent.USED_OUTSIDE,),
        UnitState.DONE_OUTSIDE: (UnitEvent.POST_BACKWARD, UnitEvent.USED_OUTSIDE),
    }
    wanted = {
        (UnitState.OPEN, UnitEvent.BEGINS): (UnitState.OPEN, False),
        (UnitState.OPEN, UnitEvent.USED_OUTSIDE): (UnitState.OPEN_OUTSIDE, False),
        (UnitState.DONE, UnitEvent.BEGINS): (UnitState.OPEN, False),
        (UnitState.DONE, UnitEvent.USED_OUTSIDE): (UnitState.DONE_OUTSIDE, False),
        (UnitState.REOPENED, UnitEvent.BEGINS): (UnitState.OPEN, False),
        (UnitState.REOPENED, UnitEvent.USED_OUTSIDE): (UnitState.DONE_OUTSIDE, False),
        (UnitState.OPEN_OUTSIDE, UnitEvent.BEGINS): (UnitState.OPEN_OUTSIDE, False),
        (UnitState.OPEN_OUTSIDE, UnitEvent.GATHERED): (UnitState.OPEN_OUTSIDE, False),
        (UnitState.OPEN_OUTSIDE, UnitEvent.POST_BACKWARD): (UnitState.DONE_OUTSIDE, True),
        (UnitState.OPEN_OUTSIDE, UnitEvent.USED_OUTSIDE): (UnitState.OPEN_OUTSIDE, False),
        (UnitState.DONE_OUTSIDE, UnitEvent.BEGINS): (UnitState.OPEN_OUTSIDE, False),
        (UnitState.DONE_OUTSIDE, UnitEvent.GATHERED): (UnitState.DONE_OUTSIDE, False),
        (UnitState.DONE_OUTSIDE, UnitEvent.POST_BACKWARD): (UnitState.DONE_OUTSIDE, False),
        (UnitState.DONE_OUTSIDE, UnitEvent.USED_OUTSIDE): (UnitState.DONE_OUTSIDE, False),
        (UnitState.OPEN, UnitEvent.GATHERED): (UnitState.OPEN, False),
        (UnitState.OPEN, UnitEvent.POST_BACKWARD): (UnitState.DONE, True),
        (UnitState.DONE, UnitEvent.GATHERED): (UnitState.REOPENED, False),
        (UnitState.DONE, UnitEvent.POST_BACKWARD): (UnitState.REOPENED, False),
        (UnitState.REOPENED, UnitEvent.GATHERED): (UnitState.REOPENED, False),
        (UnitState.REOPENED, UnitEvent.POST_BACKWARD): (UnitState.REOPENED, False),
    }
    assert len(wanted) == sum(len(row) for row in UNITS.values())
    for (state, event), (to, tells) in wanted.items():
        queue = BucketQueue([], [], [], 1)
        for one in routes[state]:
            queue.on_unit(0, one)
        assert queue._unit_states[0] is state
        assert queue.on_unit(0, event) is tells
        assert queue._unit_states[0] is to


@pytest.mark.parametrize("kind", BucketKind)
def test_cells(kind: BucketKind) -> None:
    check_cells(kind)


def test_cells_of_units() -> None:
    check_units()


def test_a_refusal_names_the_bucket() -> None:
    queue = BucketQueue(["root", "layers.3"], [0, 1], [K.ORDINARY, K.EARLY], 2)
    with pytest.raises(RuntimeError, match=r"bucket 1 of unit 'layers.3' \(EARLY\): COMMIT while EMPTY; this is a bug in fsdp"):
        queue.on(1, E.COMMIT)


def test_a_group_has_its_turn_when_all_of_it_and_all_before_it_are_ready() -> None:
    queue = BucketQueue(["a", "b", "c"], [0, 1, 2], [K.ORDINARY] * 3, 3)
    queue.agree_on([(2, 1), (0,)])
    queue.begin()
    for number in (0, 2):
        queue.on(number, E.POST_BACKWARD)
        assert queue.next_group() is None
    queue.on(1, E.POST_BACKWARD)
    assert [queue.next_group(), queue.next_group(), queue.next_group()] == [(2, 1), (0,), None]


@pytest.fixture(scope="module")
def used() -> set[tuple[BucketKind, BucketState, BucketEvent]]:
    """The rows that the explorations took."""
    return set()


@pytest.mark.parametrize("name", BY_NAME)
def test_no_reachable_state_violates_an_invariant(name: str, used: set[tuple[BucketKind, BucketState, BucketEvent]]) -> None:
    found = explore_buckets(BY_NAME[name], used)
    assert found.violations == 0, "\n".join(found.story)
    assert found.states >= STATES[name]


def test_every_row_was_taken(used: set[tuple[BucketKind, BucketState, BucketEvent]]) -> None:
    if {kind for kind, _, _ in used} != set(BucketKind):
        for scene in SCENES:
            explore_buckets(scene, used)
    rows = {(kind, state, event) for kind, table in BUCKETS.items() for state, row in table.items() for event in row}
    assert used == rows


BUGS: Mapping[str, tuple[str, BucketKind, BucketState, BucketEvent, Step[BucketState, BucketAction], str]] = {
    "an early bucket is waited for": (
        "early", K.EARLY, S.REDUCING_EARLY, E.MAKE_ROOM, Step(S.REDUCING, (A.WAIT,)),
        "a deadlock: rank 0 in land, rank 1 in gather",
    ),
    "nobody looks behind an early bucket": (
        "early-at-once", K.BEHIND_EARLY, S.REDUCED, E.REMAINDER_TURN, Step(S.REDUCED, (A.LOOK_HERE,)),
        "the ranks launched different reductions",
    ),
    "nobody looks at what was reopened": (
        "ordinary", K.ORDINARY, S.REDUCED, E.REMAINDER_TURN_CHECKED, Step(S.REDUCED, (A.LOOK_HERE,)),
        "a deadlock",
    ),
    "a remainder is filled under the first reduction": (
        "alone-early", K.EARLY, S.REDUCING, E.SOME_RANK_HAS, Step(S.REDUCING_REMAINDER, (A.LAUNCH_REMAINDER,)),
        "a bucket is filled under the reduction that reads it",
    ),
    "a remainder is taken for a first reduction": (
        "ordinary-kept", K.ORDINARY, S.REDUCED, E.SOME_RANK_HAS, Step(S.REDUCING, (A.LAUNCH_REDUCTION,)),
        "a gradient that came was not reduced",
    ),
    "what some rank has is passed by": (
        "ordinary-kept", K.ORDINARY, S.ASKING, E.SOME_RANK_HAS, Step(S.PASSED, (A.MARK,)),
        "what no_sync kept was not reduced",
    ),
    "a bucket is dropped in flight": (
        "alone", K.ORDINARY, S.REDUCING, E.DRAINED, Step(S.REDUCING), "a legal move was refused",
    ),
    "the result is forgotten": (
        "alone-at-end", K.AT_END, S.REDUCED, E.COMMIT, Step(S.EMPTY), "a result is not put into .grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, kind, state, event, step, told = BUGS[bug]
    table = BUCKETS[kind]
    monkeypatch.setitem(BUCKETS, kind, {**table, state: {**table[state], event: step}})  # type: ignore[arg-type]
    found = explore_buckets(BY_NAME[scene])
    assert found.violations == 1
    assert told in found.story[-1], found.story


UNIT_BUGS = {
    "it is never reopened": (UnitState.DONE, UnitEvent.GATHERED, UnitState.DONE),
    "a use outside is forgotten": (UnitState.OPEN_OUTSIDE, UnitEvent.BEGINS, UnitState.OPEN),
    "a use outside is ignored before it is done": (UnitState.OPEN, UnitEvent.USED_OUTSIDE, UnitState.OPEN),
    "a use outside is ignored when it is done": (UnitState.DONE, UnitEvent.USED_OUTSIDE, UnitState.DONE),
    "a use outside is ignored when it is reopened": (UnitState.REOPENED, UnitEvent.USED_OUTSIDE, UnitState.REOPENED),
}


@pytest.mark.parametrize(("state", "event", "to"), UNIT_BUGS.values(), ids=UNIT_BUGS)
def test_a_planted_bug_of_a_unit_is_noticed(
    state: UnitState, event: UnitEvent, to: UnitState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(UNITS, state, {**UNITS[state], event: Step(to)})  # type: ignore[arg-type]
    assert explore_buckets(BY_NAME["ordinary-kept"]).violations == 1


def test_a_commit_is_checked_for_all_buckets_before_the_first() -> None:
    queue = BucketQueue(("a", "b"), (0, 1), (BucketKind.ORDINARY, BucketKind.ORDINARY), 2)
    with pytest.raises(RuntimeError, match=r"bucket 0 of unit 'a' .*: COMMIT while EMPTY; this is a bug in fsdp"):
        queue.check(BucketEvent.COMMIT)
    for event in (BucketEvent.POST_BACKWARD, BucketEvent.TURN, BucketEvent.LANDED):
        queue.on(0, event)
    with pytest.raises(RuntimeError, match=r"bucket 1 of unit 'b' .*: COMMIT while EMPTY"):
        queue.check(BucketEvent.COMMIT)
    for event in (BucketEvent.POST_BACKWARD, BucketEvent.TURN, BucketEvent.LANDED):
        queue.on(1, event)
    queue.check(BucketEvent.COMMIT)
