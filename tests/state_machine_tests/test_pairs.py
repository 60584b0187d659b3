"""Every pair of state and event, in both tables: the walker moves exactly as the row says, or refuses and stays.

These tests read the tables, so they say nothing about whether a row is right; the stories do.
"""

import pytest

from state_machine.lifecycle import OUR_BUG, REMEDIES, STORY_LENGTH, IllegalTransition, Lifecycle
from state_machine.table import TABLES, ReshardPolicy
from state_machine.vocabulary import Action, Event, State

# how to get there by events alone
ROUTES = {
    State.IDLE: (),
    State.FORWARD: (Event.PRE_FORWARD,),
    State.BACKWARD_PRE: (Event.PRE_FORWARD, Event.POST_FORWARD, Event.PRE_BACKWARD),
    State.BACKWARD_POST: (Event.PRE_FORWARD, Event.POST_FORWARD, Event.PRE_BACKWARD, Event.POST_BACKWARD),
    State.SUMMONED: (Event.SUMMON,),
}
PAIRS = [(strategy, state, event) for strategy in ReshardPolicy for state in State for event in Event]


def unit_in(strategy: ReshardPolicy, state: State) -> Lifecycle:
    """A unit brought to that state by events."""
    unit = Lifecycle("layers.3", strategy)
    for event in ROUTES[state]:
        unit.on(event)
    assert unit.state is state
    return unit


@pytest.mark.parametrize("strategy", ReshardPolicy)
def test_the_table_has_a_row_set_for_every_state_and_knows_no_other_word(strategy: ReshardPolicy) -> None:
    assert set(TABLES[strategy]) == set(State)
    for row in TABLES[strategy].values():
        for event, step in row.items():
            assert isinstance(event, Event)
            assert isinstance(step.to, State)
            assert all(isinstance(action, Action) for action in step.actions)
            assert len(set(step.actions)) == len(step.actions), "an action twice in one row"


@pytest.mark.parametrize(("strategy", "state", "event"), PAIRS)
def test_every_pair_moves_as_its_row_says_or_is_refused_and_stays(strategy: ReshardPolicy, state: State, event: Event) -> None:
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


def test_the_complete_text_of_a_refusal_that_a_user_can_cause() -> None:
    unit = Lifecycle("layers.3", ReshardPolicy.AFTER_FORWARD)
    unit.on(Event.SUMMON)
    with pytest.raises(IllegalTransition) as refused:
        unit.on(Event.SUMMON)
    assert str(refused.value) == (
        "unit 'layers.3': SUMMON is not allowed in SUMMONED "
        "(allowed here: UNSUMMON_WRITEBACK, UNSUMMON_DISCARD, PRE_FORWARD, POST_FORWARD_NO_GRAD, FORWARD_FAILED, "
        "INPUT_GRADS_DONE, FINAL_CALLBACK, FINAL_CALLBACK_NO_SYNC, BACKWARD_FAILED, STEP_ABANDONED). "
        "Events so far: SUMMON. "
        "The full parameters are summoned already; leave the first summon_full_params before entering another."
    )


def test_a_refusal_that_only_we_can_cause_asks_for_a_report() -> None:
    with pytest.raises(IllegalTransition, match=r"Events so far: none\. No use of .* this is a bug in fsdp, please report it"):
        Lifecycle("", ReshardPolicy.AFTER_FORWARD).on(Event.POST_BACKWARD)


def test_a_remedy_is_offered_only_for_what_is_refused() -> None:
    for (state, event), remedy in REMEDIES.items():
        assert remedy != OUR_BUG
        for table in TABLES.values():
            assert event not in table[state], f"{event.name} is allowed in {state.name}, its remedy can never be read"


@pytest.mark.parametrize("state", [state for state in State if state is not State.IDLE])
def test_a_user_who_summons_at_the_wrong_moment_reads_what_to_do(state: State) -> None:
    with pytest.raises(IllegalTransition, match="summon_full_params"):
        unit_in(ReshardPolicy.AFTER_FORWARD, state).on(Event.SUMMON)


def test_the_story_keeps_the_last_events_only() -> None:
    unit = Lifecycle("root", ReshardPolicy.AFTER_FORWARD)
    for _ in range(STORY_LENGTH):
        unit.on(Event.PRE_FORWARD)
        unit.on(Event.POST_FORWARD_NO_GRAD)
    unit.on(Event.SUMMON)
    assert len(unit.story) == STORY_LENGTH
    assert unit.story[-2:] == (Event.POST_FORWARD_NO_GRAD, Event.SUMMON)
    assert unit.story[0] is Event.POST_FORWARD_NO_GRAD


def test_keeping_after_the_forward_differs_in_one_row_only() -> None:
    free, keep = TABLES[ReshardPolicy.AFTER_FORWARD], TABLES[ReshardPolicy.AFTER_BACKWARD]
    different = [(state, event) for state in State for event in Event if free[state].get(event) != keep[state].get(event)]
    assert different == [(State.FORWARD, Event.POST_FORWARD)]


def test_never_resharding_frees_only_what_fails_is_abandoned_or_gathered_in_full() -> None:
    frees = {
        event for row in TABLES[ReshardPolicy.NEVER].values() for event, step in row.items() if Action.RESHARD in step.actions
    }
    assert frees == {Event.BACKWARD_FAILED, Event.FORWARD_FAILED, Event.SUMMON, Event.STEP_ABANDONED}
