"""The units of a root together: one callback per backward, the order of a close, refusals that move nothing."""

import pytest

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.root import CLOSING_EVENTS, Instruction, Root
from state_machine.table import BACKWARD, BackwardEvent, BackwardState, ReshardPolicy
from state_machine.vocabulary import Action, Event, State

ORDER = (2, 0, 1)


def root_of_three() -> Root:
    """A root whose own unit keeps, and two units below it."""
    strategies = (ReshardPolicy.AFTER_BACKWARD, ReshardPolicy.AFTER_FORWARD, ReshardPolicy.AFTER_FORWARD)
    return Root([Lifecycle(name, strategy) for name, strategy in zip(("root", "left", "right"), strategies, strict=True)])


def actions(instructions: tuple[Instruction, ...]) -> list[Action]:
    """Without the units."""
    return [one.action for one in instructions]


def states(root: Root) -> list[State]:
    """Where the units are."""
    return [one.state for one in root.lifecycles]


def test_a_new_root_is_at_rest() -> None:
    root = root_of_three()
    assert root.at_rest
    assert root.backward is BackwardState.RESTING


def test_hear_names_the_unit_in_every_instruction() -> None:
    assert root_of_three().on_event(1, Event.PRE_FORWARD) == (Instruction(1, Action.DROP_STALE), Instruction(1, Action.UNSHARD))


def test_a_root_is_not_at_rest_while_a_unit_is_away_or_a_backward_runs() -> None:
    root = root_of_three()
    root.on_event(1, Event.SUMMON)
    assert not root.at_rest
    root.on_event(1, Event.UNSUMMON_DISCARD)
    assert root.at_rest
    root.on_event(0, Event.PRE_FORWARD)
    root.on_event(0, Event.GRAD_ACCUMULATED)
    root.on_event(0, Event.FORWARD_FAILED)
    assert set(states(root)) == {State.IDLE}
    assert not root.at_rest, "a backward runs, though every unit is idle"


@pytest.mark.parametrize("closing", CLOSING_EVENTS)
def test_only_the_first_unit_to_join_queues_the_callback_and_the_next_backward_queues_its_own(closing: Event) -> None:
    root = root_of_three()
    for _ in range(3):
        assert actions(root.on_event(2, Event.PRE_BACKWARD)) == [Action.JOIN_BACKWARD, Action.UNSHARD]
        assert root.backward is BackwardState.RUNNING
        assert actions(root.on_event(1, Event.GRAD_ACCUMULATED)) == [Action.UNSHARD]
        assert actions(root.on_event(0, Event.PRE_RECOMPUTE)) == [Action.UNSHARD]
        assert root.backward is BackwardState.RUNNING
        root.end_backward(closing, ORDER)
        assert root.backward is BackwardState.RESTING
        assert root.at_rest


def test_no_row_but_the_first_join_asks_for_a_callback() -> None:
    asking = [(state, event) for state, row in BACKWARD.items() for event, step in row.items() if step.queue_callback]
    assert asking == [(BackwardState.RESTING, BackwardEvent.UNIT_JOINS)]


def test_an_abandoned_backward_makes_way_for_a_new_callback() -> None:
    root = root_of_three()
    assert Action.JOIN_BACKWARD in actions(root.on_event(2, Event.PRE_BACKWARD))
    root.abandon_step(ORDER)
    assert root.backward is BackwardState.RESTING
    assert Action.JOIN_BACKWARD in actions(root.on_event(2, Event.PRE_BACKWARD))


def test_a_synchronising_backward_ends_in_the_agreed_order_and_every_commit_comes_last() -> None:
    root = root_of_three()
    root.on_event(0, Event.PRE_BACKWARD)
    root.on_event(1, Event.PRE_BACKWARD)
    root.on_event(1, Event.POST_BACKWARD)
    assert root.end_backward(Event.FINAL_CALLBACK, ORDER) == (
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


def test_a_backward_under_no_sync_commits_nothing() -> None:
    root = root_of_three()
    root.on_event(0, Event.PRE_BACKWARD)
    told = root.end_backward(Event.FINAL_CALLBACK_NO_SYNC, ORDER)
    assert told == (
        Instruction(2, Action.RESHARD),
        Instruction(0, Action.RESHARD),
        Instruction(1, Action.RESHARD),
        Instruction(0, Action.ACCUMULATE_UNSHARDED),
    )
    assert root.at_rest


def test_a_failed_backward_commits_nothing_and_tells_every_unit() -> None:
    root = root_of_three()
    root.on_event(0, Event.PRE_BACKWARD)
    root.on_event(0, Event.POST_BACKWARD)
    told = root.end_backward(Event.BACKWARD_FAILED, ORDER)
    assert told == tuple(
        Instruction(unit, action) for unit in ORDER for action in (Action.WAIT_REDUCTIONS, Action.RESHARD, Action.DROP_GRADS)
    )
    assert root.at_rest


def test_a_backward_inside_a_forward_leaves_that_forward_running() -> None:
    root = root_of_three()
    root.on_event(0, Event.PRE_FORWARD)
    root.on_event(1, Event.PRE_BACKWARD)
    told = root.end_backward(Event.FINAL_CALLBACK, ORDER)
    assert Instruction(0, Action.RESHARD) not in told
    assert states(root) == [State.FORWARD, State.IDLE, State.IDLE]


def test_abandon_is_legal_at_any_moment_and_leaves_the_root_at_rest() -> None:
    done = (Event.PRE_BACKWARD, Event.POST_BACKWARD)
    for events in ((), (Event.PRE_FORWARD,), (Event.PRE_BACKWARD,), done, (Event.SUMMON,)):
        root = root_of_three()
        for event in events:
            root.on_event(1, event)
        told = root.abandon_step(ORDER)
        assert root.at_rest
        assert [one.unit for one in told if one.action is Action.DROP_GRADS] == list(ORDER)


@pytest.mark.parametrize("event", [event for event in Event if event not in CLOSING_EVENTS])
def test_nothing_else_closes_a_backward(event: Event) -> None:
    root = root_of_three()
    root.on_event(1, Event.PRE_BACKWARD)
    with pytest.raises(RuntimeError, match=f"{event.name} does not close a backward; this is a bug in fsdp"):
        root.end_backward(event, ORDER)
    assert root.backward is BackwardState.RUNNING
    assert states(root) == [State.IDLE, State.BACKWARD_PRE, State.IDLE]


@pytest.mark.parametrize("closing", CLOSING_EVENTS)
def test_a_backward_that_does_not_run_cannot_end(closing: Event) -> None:
    root = root_of_three()
    root.on_event(0, Event.PRE_FORWARD)
    with pytest.raises(RuntimeError, match=f"{closing.name} while no backward is running; this is a bug in fsdp"):
        root.end_backward(closing, ORDER)
    assert states(root) == [State.FORWARD, State.IDLE, State.IDLE]
    assert root.lifecycles[0].story == (Event.PRE_FORWARD,)


def test_a_refused_event_starts_no_backward() -> None:
    root = root_of_three()
    root.on_event(1, Event.SUMMON)
    with pytest.raises(IllegalTransition, match="unit 'left': PRE_BACKWARD is not allowed in SUMMONED"):
        root.on_event(1, Event.PRE_BACKWARD)
    assert root.backward is BackwardState.RESTING
    assert states(root) == [State.IDLE, State.SUMMONED, State.IDLE]
