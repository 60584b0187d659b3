"""Every cell of the residency: what it leads to and what the unit must do, written out a second time by hand."""

import itertools

from state_machine.residency import RESIDENCES, Effect, Request, Residency, ResidencyState
from tests.state_machine_tests.cells import cells_of, written

CELLS = """
    SHARDED PREFETCH -> UNSHARDING: ALL_GATHER
    SHARDED UNSHARD -> UNSHARDED: ALL_GATHER, WAIT_ALL_GATHER, USE_UNSHARDED
    SHARDED CACHE -> SHARDED:
    SHARDED RESHARD -> SHARDED: FREE_UNSHARDED
    SHARDED PASS_ENDS -> SHARDED:
    SHARDED PASS_FAILS -> SHARDED:
    UNSHARDING PREFETCH -> UNSHARDING:
    UNSHARDING UNSHARD -> UNSHARDED: WAIT_ALL_GATHER, USE_UNSHARDED
    UNSHARDING CACHE -> CACHED: WAIT_ALL_GATHER
    UNSHARDING RESHARD -> SHARDED: WAIT_ALL_GATHER, FREE_UNSHARDED
    UNSHARDING PASS_ENDS -> SHARDED: WAIT_ALL_GATHER, FREE_UNSHARDED
    UNSHARDING PASS_FAILS -> SHARDED: WAIT_ALL_GATHER, FREE_UNSHARDED
    UNSHARDED PREFETCH -> UNSHARDED:
    UNSHARDED UNSHARD -> UNSHARDED:
    UNSHARDED CACHE -> CACHED: USE_SHARDED
    UNSHARDED RESHARD -> SHARDED: USE_SHARDED, FREE_UNSHARDED
    UNSHARDED PASS_ENDS -> UNSHARDED:
    UNSHARDED PASS_FAILS -> UNSHARDED:
    CACHED PREFETCH -> CACHED:
    CACHED UNSHARD -> UNSHARDED: USE_UNSHARDED
    CACHED CACHE -> CACHED:
    CACHED RESHARD -> SHARDED: FREE_UNSHARDED
    CACHED PASS_ENDS -> CACHED:
    CACHED PASS_FAILS -> SHARDED: FREE_UNSHARDED
"""


def test_the_cells_above_are_the_table() -> None:
    assert cells_of(RESIDENCES) == written(CELLS)
    assert {(state, ask) for state, row in RESIDENCES.items() for ask in row} == {*itertools.product(ResidencyState, Request)}


def check_memory(asks: tuple[Request, ...]) -> None:
    """Follow the memory through the effects alone, without reading the state."""
    home = Residency("layers.3")
    in_memory = in_flight = shown = False
    for ask in asks:
        before, was_shown = in_memory, shown
        for effect in home.on(ask):
            match effect:
                case Effect.ALL_GATHER:
                    assert not in_memory, "gathered twice"
                    in_memory = in_flight = True
                case Effect.WAIT_ALL_GATHER:
                    assert in_flight
                    in_flight = False
                case Effect.USE_UNSHARDED:
                    assert in_memory and not in_flight and not shown
                    shown = True
                case Effect.USE_SHARDED:
                    assert shown
                    shown = False
                case Effect.FREE_UNSHARDED:
                    assert not in_flight and not shown
                    in_memory = False
        assert shown == (
            was_shown if ask in (Request.PREFETCH, Request.PASS_ENDS, Request.PASS_FAILS) else ask is Request.UNSHARD
        )
        if ask in (Request.PASS_ENDS, Request.PASS_FAILS):
            assert not in_flight
            assert in_memory in (before, False) and in_memory >= was_shown
        else:
            assert in_memory or ask is Request.RESHARD or (ask is Request.CACHE and not before)


def test_no_sequence_of_asks_releases_memory_in_use_or_gathers_twice() -> None:
    for length in range(6):
        for asks in itertools.product(Request, repeat=length):
            check_memory(asks)
