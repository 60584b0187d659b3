"""Every cell of the residency: what it leads to and what the unit must do, written out a second time by hand."""

import itertools

import pytest

from state_machine.residency import RESIDENCES, Ask, Effect, Residency, ResidencyState

CELLS = """
    SHARDED WANT -> GATHERING: LAUNCH
    SHARDED NEED -> WHOLE: LAUNCH, AWAIT, SHOW
    SHARDED KEEP -> SHARDED:
    SHARDED FREE -> SHARDED: RELEASE
    GATHERING WANT -> GATHERING:
    GATHERING NEED -> WHOLE: AWAIT, SHOW
    GATHERING KEEP -> KEPT: AWAIT
    GATHERING FREE -> SHARDED: AWAIT, RELEASE
    WHOLE WANT -> WHOLE:
    WHOLE NEED -> WHOLE:
    WHOLE KEEP -> KEPT: HIDE
    WHOLE FREE -> SHARDED: HIDE, RELEASE
    KEPT WANT -> KEPT:
    KEPT NEED -> WHOLE: SHOW
    KEPT KEEP -> KEPT:
    KEPT FREE -> SHARDED: RELEASE
"""
ROUTES = {
    ResidencyState.SHARDED: (),
    ResidencyState.GATHERING: (Ask.WANT,),
    ResidencyState.WHOLE: (Ask.NEED,),
    ResidencyState.KEPT: (Ask.NEED, Ask.KEEP),
}
LINES = [line.strip() for line in CELLS.strip().splitlines()]


def check_cell(line: str) -> None:
    """Bring a unit to the state by asks, ask, and compare."""
    cell, _, answer = (part.strip() for part in line.partition(":"))
    asked, _, to = (part.strip() for part in cell.partition("->"))
    state_name, ask_name = asked.split()
    home = Residency("layers.3")
    for ask in ROUTES[ResidencyState[state_name]]:
        home.on(ask)
    assert home.state is ResidencyState[state_name]
    effects = ", ".join(effect.name for effect in home.on(Ask[ask_name]))
    assert (home.state.name, effects) == (to, answer)


@pytest.mark.parametrize("line", LINES)
def test_cell(line: str) -> None:
    check_cell(line)


def test_the_cells_above_are_all_there_are() -> None:
    written = {tuple(line.partition(":")[0].split()[:2]) for line in LINES}
    assert written == {(state.name, ask.name) for state in ResidencyState for ask in Ask}
    assert set(RESIDENCES) == set(ResidencyState)


def check_memory(asks: tuple[Ask, ...]) -> None:
    """Follow the memory through the effects alone, without reading the state."""
    home = Residency("layers.3")
    in_memory = in_flight = shown = False
    for ask in asks:
        before = in_memory
        for effect in home.on(ask):
            match effect:
                case Effect.LAUNCH:
                    assert not in_memory, "gathered twice"
                    in_memory = in_flight = True
                case Effect.AWAIT:
                    assert in_flight
                    in_flight = False
                case Effect.SHOW:
                    assert in_memory and not in_flight and not shown
                    shown = True
                case Effect.HIDE:
                    assert shown
                    shown = False
                case Effect.RELEASE:
                    assert not in_flight and not shown
                    in_memory = False
        assert shown == (ask is Ask.NEED or (ask is Ask.WANT and shown))
        assert in_memory or ask is Ask.FREE or (ask is Ask.KEEP and not before)


def test_no_sequence_of_asks_releases_memory_in_use_or_gathers_twice() -> None:
    for length in range(6):
        for asks in itertools.product(Ask, repeat=length):
            check_memory(asks)
