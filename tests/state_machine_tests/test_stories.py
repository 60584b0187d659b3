"""Every story is true, and together they tell of every row."""

import pytest

from state_machine.table import TABLES, ReshardPolicy
from state_machine.vocabulary import Event, State
from tests.state_machine_tests.stories import TOLD, Story, tell


@pytest.mark.parametrize(("story", "strategy"), TOLD, ids=[f"{story.name} ({strategy.name})" for story, strategy in TOLD])
def test_story(story: Story, strategy: ReshardPolicy) -> None:
    tell(story, strategy)


@pytest.mark.parametrize("strategy", ReshardPolicy)
def test_every_row_is_in_some_story_and_every_missing_pair_is_refused_by_one(strategy: ReshardPolicy) -> None:
    told = {pair for story, one in TOLD if one is strategy for pair in tell(story, strategy)}
    missing = [
        f"{state.name} {event.name}"
        for state in State
        for event in Event
        if (state, event, event not in TABLES[strategy][state]) not in told
    ]
    assert missing == [], "no story tells of these pairs"
