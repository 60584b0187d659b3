"""The units of a root together: one callback per backward, the order of a close, refusals that move nothing."""

import pytest

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.root import Instruction, Root
from state_machine.table import BACKWARD, BackwardState, ReshardPolicy
from state_machine.table import BackwardEvent as B
from state_machine.vocabulary import Action, Event, State

ORDER = (2, 0, 1)
KINDS = (B.SYNC_BEGINS, B.NO_SYNC_BEGINS, B.GRAD_ONLY_BEGINS)
ENDS = (B.CALLBACK_RUNS, B.CALLBACK_RUNS_INSIDE, B.FAILS, B.FAILS_INSIDE, B.PASS_BEGINS)
"""How a backward that runs ends, but for being abandoned."""
CELLS = """
    RESTING UNIT_JOINS -> BEGINNING: callback
    RESTING PASS_BEGINS -> RESTING:
    RESTING STEP_ABANDONED -> RESTING: STEP_ABANDONED
    RESTING_INSIDE UNIT_JOINS -> BEGINNING: callback
    RESTING_INSIDE PASS_BEGINS -> RESTING:
    RESTING_INSIDE STEP_ABANDONED -> RESTING: STEP_ABANDONED
    BEGINNING SYNC_BEGINS -> RUNNING_SYNC:
    BEGINNING NO_SYNC_BEGINS -> RUNNING_NO_SYNC:
    BEGINNING GRAD_ONLY_BEGINS -> RUNNING_NO_GRADS:
    BEGINNING GRAD_ACCUMULATED -> BEGINNING:
    BEGINNING STEP_ABANDONED -> RESTING: STEP_ABANDONED
    RUNNING_SYNC UNIT_JOINS -> RUNNING_SYNC:
    RUNNING_SYNC GRAD_ACCUMULATED -> RUNNING_SYNC:
    RUNNING_SYNC UNIT_COMPLETE -> RUNNING_SYNC: POST_BACKWARD
    RUNNING_SYNC CALLBACK_RUNS -> RESTING: FINAL_CALLBACK
    RUNNING_SYNC CALLBACK_RUNS_INSIDE -> RESTING_INSIDE: FINAL_CALLBACK
    RUNNING_SYNC FAILS -> RESTING: BACKWARD_FAILED
    RUNNING_SYNC FAILS_INSIDE -> RESTING_INSIDE: BACKWARD_FAILED
    RUNNING_SYNC PASS_BEGINS -> RESTING: BACKWARD_FAILED
    RUNNING_SYNC STEP_ABANDONED -> RESTING: STEP_ABANDONED
    RUNNING_NO_SYNC UNIT_JOINS -> RUNNING_NO_SYNC:
    RUNNING_NO_SYNC GRAD_ACCUMULATED -> RUNNING_NO_SYNC:
    RUNNING_NO_SYNC UNIT_COMPLETE -> RUNNING_NO_SYNC: POST_BACKWARD_NO_SYNC
    RUNNING_NO_SYNC CALLBACK_RUNS -> RESTING: FINAL_CALLBACK_NO_SYNC
    RUNNING_NO_SYNC CALLBACK_RUNS_INSIDE -> RESTING_INSIDE: FINAL_CALLBACK_NO_SYNC
    RUNNING_NO_SYNC FAILS -> RESTING: BACKWARD_FAILED
    RUNNING_NO_SYNC FAILS_INSIDE -> RESTING_INSIDE: BACKWARD_FAILED
    RUNNING_NO_SYNC PASS_BEGINS -> RESTING: BACKWARD_FAILED
    RUNNING_NO_SYNC STEP_ABANDONED -> RESTING: STEP_ABANDONED
    RUNNING_NO_GRADS UNIT_JOINS -> RUNNING_NO_GRADS:
    RUNNING_NO_GRADS GRAD_ACCUMULATED -> RUNNING_SYNC:
    RUNNING_NO_GRADS UNIT_COMPLETE -> RUNNING_NO_GRADS: POST_BACKWARD_NO_SYNC
    RUNNING_NO_GRADS CALLBACK_RUNS -> RESTING: FINAL_CALLBACK_NO_SYNC
    RUNNING_NO_GRADS CALLBACK_RUNS_INSIDE -> RESTING_INSIDE: FINAL_CALLBACK_NO_SYNC
    RUNNING_NO_GRADS FAILS -> RESTING: BACKWARD_FAILED
    RUNNING_NO_GRADS FAILS_INSIDE -> RESTING_INSIDE: BACKWARD_FAILED
    RUNNING_NO_GRADS PASS_BEGINS -> RESTING: BACKWARD_FAILED
    RUNNING_NO_GRADS STEP_ABANDONED -> RESTING: STEP_ABANDONED
"""
"""Every cell, written out a second time by hand; every other pair is refused."""


def root_of_three() -> Root:
    """A root whose own unit keeps, and two units below it."""
    strategies = (ReshardPolicy.AFTER_BACKWARD, ReshardPolicy.AFTER_FORWARD, ReshardPolicy.AFTER_FORWARD)
    return Root([Lifecycle(name, strategy) for name, strategy in zip(("root", "left", "right"), strategies, strict=True)])


def begun(unit: int, kind: B = B.SYNC_BEGINS) -> Root:
    """The same, with a backward that has come to one unit."""
    root = root_of_three()
    root.on_event(unit, Event.PRE_BACKWARD)
    root.begin(kind)
    return root


def closed(root: Root, event: B) -> tuple[Instruction, ...]:
    """What must be done when the backward ends so."""
    instructions = root.end_backward(event, ORDER)
    assert instructions is not None
    return instructions


def actions(instructions: tuple[Instruction, ...]) -> list[Action]:
    """Without the units."""
    return [one.action for one in instructions]


def states(root: Root) -> list[State]:
    """Where the units are."""
    return [one.state for one in root.lifecycles]


def test_on_event_names_the_unit_in_every_instruction() -> None:
    assert root_of_three().on_event(1, Event.PRE_FORWARD) == (Instruction(1, Action.DROP_STALE), Instruction(1, Action.UNSHARD))


def test_a_root_is_not_at_rest_while_a_unit_is_away_or_a_backward_runs() -> None:
    root = root_of_three()
    root.on_event(1, Event.SUMMON)
    assert not root.at_rest
    root.on_event(1, Event.UNSUMMON_DISCARD)
    assert root.at_rest
    root.on_event(0, Event.PRE_FORWARD)
    root.on_event(0, Event.GRAD_ACCUMULATED)
    root.begin(B.SYNC_BEGINS)
    root.on_event(0, Event.FORWARD_FAILED)
    assert set(states(root)) == {State.IDLE}
    assert not root.at_rest, "a backward runs, though every unit is idle"


def test_the_cells_above_are_all_there_are() -> None:
    table = {
        f"{state.name} {event.name} -> {step.to.name}: {'callback' * step.queue_callback}{step.event.name if step.event else ''}"
        for state, row in BACKWARD.items()
        for event, step in row.items()
    }
    assert {line.strip() for line in CELLS.strip().splitlines()} == {line.strip() for line in table}
    assert set(BACKWARD) == set(BackwardState)


@pytest.mark.parametrize("closing", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_unit_to_join_queues_the_callback_and_the_next_backward_queues_its_own(kind: B, closing: B) -> None:
    root = root_of_three()
    for number in range(1, 4):
        assert root.number == number
        assert actions(root.on_event(2, Event.PRE_BACKWARD)) == [Action.JOIN_BACKWARD, Action.UNSHARD]
        assert root.backward is BackwardState.BEGINNING
        root.begin(kind)
        assert root.synchronises is (kind is B.SYNC_BEGINS)
        assert actions(root.on_event(1, Event.GRAD_ACCUMULATED)) == [Action.UNSHARD]
        assert actions(root.on_event(0, Event.PRE_RECOMPUTE)) == [Action.UNSHARD]
        assert root.synchronises is (kind is not B.NO_SYNC_BEGINS), "a gradient has come"
        assert root.end_backward(closing, ORDER)
        inside = closing in (B.CALLBACK_RUNS_INSIDE, B.FAILS_INSIDE)
        assert root.backward is (BackwardState.RESTING_INSIDE if inside else BackwardState.RESTING)
        assert root.at_rest


def test_a_gradient_that_is_the_first_of_a_backward_does_not_say_its_kind() -> None:
    for kind in KINDS:
        root = root_of_three()
        root.on_event(0, Event.GRAD_ACCUMULATED)
        root.begin(kind)
        assert root.synchronises is (kind is B.SYNC_BEGINS)


def test_an_abandoned_backward_leaves_room_for_a_new_callback() -> None:
    root = root_of_three()
    for kind in (None, *KINDS):
        assert Action.JOIN_BACKWARD in actions(root.on_event(2, Event.PRE_BACKWARD))
        if kind is not None:
            root.begin(kind)
        number = root.number
        root.end_backward(B.STEP_ABANDONED, ORDER)
        assert root.backward is BackwardState.RESTING
        assert root.number == number + 1, "its callback is out of date"
    assert Action.JOIN_BACKWARD in actions(root.on_event(2, Event.PRE_BACKWARD))


def test_a_synchronising_backward_ends_in_the_agreed_order_and_every_commit_comes_last() -> None:
    root = begun(0)
    root.on_event(1, Event.PRE_BACKWARD)
    root.on_event(1, Event.POST_BACKWARD)
    assert root.end_backward(B.CALLBACK_RUNS, ORDER) == (
        Instruction(2, Action.RESHARD),
        Instruction(2, Action.FLUSH_GRADS),
        Instruction(0, Action.RESHARD),
        Instruction(0, Action.FLUSH_GRADS),
        Instruction(1, Action.RESHARD),
        Instruction(1, Action.FLUSH_GRADS),
        Instruction(2, Action.COMMIT),
        Instruction(0, Action.COMMIT),
        Instruction(1, Action.COMMIT),
    )
    assert root.at_rest


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_backward_that_reduces_nothing_commits_nothing(kind: B) -> None:
    root = begun(0, kind)
    assert closed(root, B.CALLBACK_RUNS) == (
        Instruction(2, Action.RESHARD),
        Instruction(0, Action.RESHARD),
        Instruction(1, Action.RESHARD),
        Instruction(0, Action.ACCUMULATE_UNSHARDED),
    )
    assert root.at_rest


@pytest.mark.parametrize("fails", [B.FAILS, B.FAILS_INSIDE, B.PASS_BEGINS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_backward_commits_nothing_and_reaches_every_unit(kind: B, fails: B) -> None:
    root = begun(0, kind)
    root.on_event(0, root.post_backward_event())
    assert closed(root, fails) == tuple(
        Instruction(unit, action) for unit in ORDER for action in (Action.WAIT_REDUCTIONS, Action.RESHARD, Action.DROP_GRADS)
    )
    assert root.at_rest


def test_a_pass_that_begins_at_rest_ends_nothing() -> None:
    root = root_of_three()
    assert root.end_backward(B.PASS_BEGINS, ORDER) is None
    assert root.at_rest
    assert root.number == 1
    assert root.lifecycles[0].story == ()


def test_a_backward_inside_a_forward_leaves_that_forward_running() -> None:
    root = root_of_three()
    root.on_event(0, Event.PRE_FORWARD)
    root.on_event(1, Event.PRE_BACKWARD)
    root.begin(B.SYNC_BEGINS)
    told = closed(root, B.CALLBACK_RUNS_INSIDE)
    assert Instruction(0, Action.RESHARD) not in told
    assert states(root) == [State.FORWARD, State.IDLE, State.IDLE]


def test_abandon_is_legal_at_any_moment_and_leaves_the_root_at_rest() -> None:
    for events in ((), (Event.PRE_FORWARD,), (Event.PRE_BACKWARD,), (Event.SUMMON,)):
        root = root_of_three()
        for event in events:
            root.on_event(1, event)
        told = closed(root, B.STEP_ABANDONED)
        assert root.at_rest
        assert [one.unit for one in told if one.action is Action.DROP_GRADS] == list(ORDER)


def root_in(state: BackwardState) -> Root:
    """A root whose backward was brought to that state, with a unit in its forward."""
    root = root_of_three()
    root.on_event(1, Event.PRE_FORWARD)
    if state is BackwardState.RESTING:
        return root
    root.on_event(0, Event.PRE_BACKWARD)
    if state is not BackwardState.BEGINNING:
        running = (BackwardState.RUNNING_SYNC, BackwardState.RUNNING_NO_SYNC, BackwardState.RUNNING_NO_GRADS)
        root.begin(dict(zip(running, KINDS, strict=True)).get(state, B.SYNC_BEGINS))
    if state is BackwardState.RESTING_INSIDE:
        closed(root, B.CALLBACK_RUNS_INSIDE)
    return root


@pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state in BackwardState for event in B if event not in BACKWARD[state]]
)
def test_every_other_pair_is_refused_and_changes_nothing(state: BackwardState, event: B) -> None:
    root = root_in(state)
    before = states(root), [one.story for one in root.lifecycles], root.number
    text = f"the backward: {event.name} is not allowed in {state.name}; this is a bug in fsdp"
    with pytest.raises(RuntimeError, match=text):
        root.end_backward(event, ORDER)
    assert root.backward is state
    assert (states(root), [one.story for one in root.lifecycles], root.number) == before


def test_a_refused_event_starts_no_backward() -> None:
    root = root_of_three()
    root.on_event(1, Event.SUMMON)
    with pytest.raises(IllegalTransition, match="unit 'left': PRE_BACKWARD is not allowed in SUMMONED"):
        root.on_event(1, Event.PRE_BACKWARD)
    assert root.backward is BackwardState.RESTING
    assert states(root) == [State.IDLE, State.SUMMONED, State.IDLE]
