"""The units of a root together: one callback per backward, the order of a close, refusals that move nothing."""

import pytest

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.root import CLOSINGS, Instruction, Root
from state_machine.table import BACKWARD, BackwardEvent, BackwardState, Strategy
from state_machine.vocabulary import Action, Event, State

ORDER = (2, 0, 1)


def root_of_three() -> Root:
    """A root whose own unit keeps, and two units below it."""
    strategies = (Strategy.KEEP_AFTER_FORWARD, Strategy.FREE_AFTER_FORWARD, Strategy.FREE_AFTER_FORWARD)
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
    assert root_of_three().hear(1, Event.FORWARD_BEGINS) == (Instruction(1, Action.REFRESH), Instruction(1, Action.NEED))


def test_a_root_is_not_at_rest_while_a_unit_is_away_or_a_backward_runs() -> None:
    root = root_of_three()
    root.hear(1, Event.SUMMONED)
    assert not root.at_rest
    root.hear(1, Event.DISCARDED)
    assert root.at_rest
    root.hear(0, Event.FORWARD_BEGINS)
    root.hear(0, Event.GRADIENT_ARRIVES)
    root.hear(0, Event.FORWARD_FAILS)
    assert set(states(root)) == {State.IDLE}
    assert not root.at_rest, "a backward runs, though every unit is idle"


@pytest.mark.parametrize("closing", CLOSINGS)
def test_only_the_first_unit_to_join_queues_the_callback_and_the_next_backward_queues_its_own(closing: Event) -> None:
    root = root_of_three()
    for _ in range(3):
        assert actions(root.hear(2, Event.BACKWARD_REACHES)) == [Action.JOIN_BACKWARD, Action.NEED]
        assert root.backward is BackwardState.RUNNING
        assert actions(root.hear(1, Event.GRADIENT_ARRIVES)) == [Action.NEED]
        assert actions(root.hear(0, Event.REPLAY_BEGINS)) == [Action.NEED]
        assert root.backward is BackwardState.RUNNING
        root.close(closing, ORDER)
        assert root.backward is BackwardState.RESTING
        assert root.at_rest


def test_no_row_but_the_first_join_asks_for_a_callback() -> None:
    asking = [(state, event) for state, row in BACKWARD.items() for event, step in row.items() if step.queue_callback]
    assert asking == [(BackwardState.RESTING, BackwardEvent.UNIT_JOINS)]


def test_an_abandoned_backward_makes_way_for_a_new_callback() -> None:
    root = root_of_three()
    assert Action.JOIN_BACKWARD in actions(root.hear(2, Event.BACKWARD_REACHES))
    root.abandon(ORDER)
    assert root.backward is BackwardState.RESTING
    assert Action.JOIN_BACKWARD in actions(root.hear(2, Event.BACKWARD_REACHES))


def test_a_synchronising_backward_ends_in_the_agreed_order_and_every_commit_comes_last() -> None:
    root = root_of_three()
    root.hear(0, Event.BACKWARD_REACHES)
    root.hear(1, Event.BACKWARD_REACHES)
    root.hear(1, Event.GRADIENTS_READY)
    assert root.close(Event.BACKWARD_ENDS, ORDER) == (
        Instruction(2, Action.FREE),
        Instruction(2, Action.FLUSH),
        Instruction(0, Action.FREE),
        Instruction(0, Action.FLUSH),
        Instruction(1, Action.FREE),
        Instruction(1, Action.FLUSH),
        Instruction(2, Action.COMMIT),
        Instruction(0, Action.COMMIT),
        Instruction(1, Action.COMMIT),
    )
    assert root.at_rest


def test_a_backward_under_no_sync_commits_nothing() -> None:
    root = root_of_three()
    root.hear(0, Event.BACKWARD_REACHES)
    told = root.close(Event.BACKWARD_ENDS_UNSYNCED, ORDER)
    assert told == (
        Instruction(2, Action.FREE),
        Instruction(0, Action.FREE),
        Instruction(1, Action.FREE),
        Instruction(0, Action.STASH),
    )
    assert root.at_rest


def test_a_failed_backward_commits_nothing_and_tells_every_unit() -> None:
    root = root_of_three()
    root.hear(0, Event.BACKWARD_REACHES)
    root.hear(0, Event.GRADIENTS_READY)
    told = root.close(Event.BACKWARD_FAILS, ORDER)
    assert told == tuple(Instruction(unit, action) for unit in ORDER for action in (Action.DRAIN, Action.FREE, Action.DROP))
    assert root.at_rest


def test_a_backward_inside_a_forward_leaves_that_forward_running() -> None:
    root = root_of_three()
    root.hear(0, Event.FORWARD_BEGINS)
    root.hear(1, Event.BACKWARD_REACHES)
    told = root.close(Event.BACKWARD_ENDS, ORDER)
    assert Instruction(0, Action.FREE) not in told
    assert states(root) == [State.FORWARD, State.IDLE, State.IDLE]


def test_abandon_is_legal_at_any_moment_and_leaves_the_root_at_rest() -> None:
    done = (Event.BACKWARD_REACHES, Event.GRADIENTS_READY)
    for events in ((), (Event.FORWARD_BEGINS,), (Event.BACKWARD_REACHES,), done, (Event.SUMMONED,)):
        root = root_of_three()
        for event in events:
            root.hear(1, event)
        told = root.abandon(ORDER)
        assert root.at_rest
        assert [one.unit for one in told if one.action is Action.DROP] == list(ORDER)


@pytest.mark.parametrize("event", [event for event in Event if event not in CLOSINGS])
def test_nothing_else_closes_a_backward(event: Event) -> None:
    root = root_of_three()
    root.hear(1, Event.BACKWARD_REACHES)
    with pytest.raises(RuntimeError, match=f"{event.name} does not close a backward; this is a bug in fsdp"):
        root.close(event, ORDER)
    assert root.backward is BackwardState.RUNNING
    assert states(root) == [State.IDLE, State.BACKWARD_PRE, State.IDLE]


@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_backward_that_does_not_run_cannot_end(closing: Event) -> None:
    root = root_of_three()
    root.hear(0, Event.FORWARD_BEGINS)
    with pytest.raises(RuntimeError, match=f"{closing.name} while no backward is running; this is a bug in fsdp"):
        root.close(closing, ORDER)
    assert states(root) == [State.FORWARD, State.IDLE, State.IDLE]
    assert root.lifecycles[0].story == (Event.FORWARD_BEGINS,)


def test_a_refused_event_starts_no_backward() -> None:
    root = root_of_three()
    root.hear(1, Event.SUMMONED)
    with pytest.raises(IllegalTransition, match="unit 'left': BACKWARD_REACHES is not allowed in SUMMONED"):
        root.hear(1, Event.BACKWARD_REACHES)
    assert root.backward is BackwardState.RESTING
    assert states(root) == [State.IDLE, State.SUMMONED, State.IDLE]
