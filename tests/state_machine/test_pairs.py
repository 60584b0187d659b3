"""Every pair of state and event, in both tables: the walker moves exactly as the row says, or refuses and stays.

These tests read the tables, so they say nothing about whether a row is right; the stories do.
"""

import pytest

from state_machine.lifecycle import OUR_BUG, REMEDIES, STORY_LENGTH, IllegalTransition, Lifecycle
from state_machine.table import TABLES, Strategy
from state_machine.vocabulary import Action, Event, State

# how to get there by events alone
ROUTES = {
    State.IDLE: (),
    State.FORWARD: (Event.FORWARD_BEGINS,),
    State.BACKWARD_PRE: (Event.FORWARD_BEGINS, Event.FORWARD_ENDS, Event.BACKWARD_REACHES),
    State.BACKWARD_POST: (Event.FORWARD_BEGINS, Event.FORWARD_ENDS, Event.BACKWARD_REACHES, Event.GRADIENTS_READY),
    State.SUMMONED: (Event.SUMMONED,),
}
PAIRS = [(strategy, state, event) for strategy in Strategy for state in State for event in Event]


def unit_in(strategy: Strategy, state: State) -> Lifecycle:
    """A unit brought to that state by events."""
    unit = Lifecycle("layers.3", strategy)
    for event in ROUTES[state]:
        unit.on(event)
    assert unit.state is state
    return unit


@pytest.mark.parametrize("strategy", Strategy)
def test_the_table_has_a_row_set_for_every_state_and_knows_no_other_word(strategy: Strategy) -> None:
    assert set(TABLES[strategy]) == set(State)
    for row in TABLES[strategy].values():
        for event, step in row.items():
            assert isinstance(event, Event)
            assert isinstance(step.to, State)
            assert all(isinstance(action, Action) for action in step.actions)
            assert len(set(step.actions)) == len(step.actions), "an action twice in one row"


@pytest.mark.parametrize(("strategy", "state", "event"), PAIRS)
def test_every_pair_moves_as_its_row_says_or_is_refused_and_stays(strategy: Strategy, state: State, event: Event) -> None:
    unit = unit_in(strategy, state)
    step = TABLES[strategy][state].get(event)
    if step is not None:
        assert unit.on(event) == step.actions
        assert unit.state is step.to
        assert unit.story == (*ROUTES[state], event)
        return
    with pytest.raises(IllegalTransition) as refused:
        unit.on(event)
    assert unit.state is state
    assert unit.story == ROUTES[state]
    error = refused.value
    assert (error.unit, error.state, error.event, error.story) == ("layers.3", state, event, ROUTES[state])
    assert set(error.legal) == set(TABLES[strategy][state])
    assert f"unit 'layers.3': {event.name} is not allowed in {state.name} " in str(error)
    assert f"(allowed here: {', '.join(e.name for e in TABLES[strategy][state])})." in str(error)
    assert f"Events so far: {', '.join(e.name for e in ROUTES[state]) or 'none'}." in str(error)
    assert str(error).endswith(REMEDIES.get((state, event), OUR_BUG))


def test_the_whole_text_of_a_refusal_that_a_user_can_cause() -> None:
    unit = Lifecycle("layers.3", Strategy.FREE_AFTER_FORWARD)
    unit.on(Event.SUMMONED)
    with pytest.raises(IllegalTransition) as refused:
        unit.on(Event.SUMMONED)
    assert str(refused.value) == (
        "unit 'layers.3': SUMMONED is not allowed in SUMMONED "
        "(allowed here: RETURNED, DISCARDED, FORWARD_BEGINS, INFERENCE_ENDS, FORWARD_FAILS, "
        "BACKWARD_LEFT, BACKWARD_ENDS, BACKWARD_ENDS_UNSYNCED, BACKWARD_FAILS, STEP_ABANDONED). "
        "Events so far: SUMMONED. "
        "The full parameters are lent already; leave the first summon_full_params before entering another."
    )


def test_a_refusal_that_only_we_can_cause_asks_for_a_report() -> None:
    with pytest.raises(IllegalTransition, match=r"Events so far: none\. No use of .* this is a bug in fsdp, please report it"):
        Lifecycle("", Strategy.FREE_AFTER_FORWARD).on(Event.GRADIENTS_READY)


def test_a_remedy_is_offered_only_for_what_is_refused() -> None:
    for (state, event), remedy in REMEDIES.items():
        assert remedy != OUR_BUG
        for table in TABLES.values():
            assert event not in table[state], f"{event.name} is allowed in {state.name}, its remedy can never be read"


@pytest.mark.parametrize("state", [state for state in State if state is not State.IDLE])
def test_a_user_who_summons_at_the_wrong_moment_reads_what_to_do(state: State) -> None:
    with pytest.raises(IllegalTransition, match="summon_full_params"):
        unit_in(Strategy.FREE_AFTER_FORWARD, state).on(Event.SUMMONED)


def test_the_story_keeps_the_last_events_only() -> None:
    unit = Lifecycle("root", Strategy.FREE_AFTER_FORWARD)
    for _ in range(STORY_LENGTH):
        unit.on(Event.FORWARD_BEGINS)
        unit.on(Event.INFERENCE_ENDS)
    unit.on(Event.SUMMONED)
    assert len(unit.story) == STORY_LENGTH
    assert unit.story[-2:] == (Event.INFERENCE_ENDS, Event.SUMMONED)
    assert unit.story[0] is Event.INFERENCE_ENDS


def test_keeping_after_the_forward_differs_in_one_row_only() -> None:
    free, keep = TABLES[Strategy.FREE_AFTER_FORWARD], TABLES[Strategy.KEEP_AFTER_FORWARD]
    different = [(state, event) for state in State for event in Event if free[state].get(event) != keep[state].get(event)]
    assert different == [(State.FORWARD, Event.FORWARD_ENDS)]


def test_keeping_always_frees_only_what_fails_is_abandoned_or_lent() -> None:
    frees = {event for row in TABLES[Strategy.KEEP_ALWAYS].values() for event, step in row.items() if Action.FREE in step.actions}
    assert frees == {Event.BACKWARD_FAILS, Event.FORWARD_FAILS, Event.SUMMONED, Event.STEP_ABANDONED}
