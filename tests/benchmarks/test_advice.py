"""Advice holds what it promises: each piece is followed over a simulated wire, in virtual time."""

import pytest
from advice import CASES, NEAR, Settings, follow, run, virtual_time

EXPECTED = {
    ("nothing ahead", 1.0): {"prefetch", "sharding_strategy"},
    ("nothing ahead, every unit twice", 2.0): {"prefetch", "sharding_strategy"},
    ("defaults", 1.0): {"sharding_strategy"},
    ("gathered once", 0.5): set(),
}


@pytest.mark.parametrize(("case", "load"), EXPECTED, ids=[f"{case}, load {load}" for case, load in EXPECTED])
def test_following_advice_brings_what_it_says(case: str, load: float) -> None:
    rows = follow(case, Settings(load, blocks=4))
    assert {row["advice"].partition("=")[0] for row in rows} == EXPECTED[case, load]
    for row in rows:
        assert abs(row["expected_gain_ms"] - row["gain_ms"]) <= NEAR * row["before_ms"], row


def test_virtual_time_is_exact() -> None:
    settings = Settings(0.5, blocks=2)
    with virtual_time() as clock:
        before = clock.now
        clock.sleep(0.25)
        assert clock.nanoseconds() == round(1e9 * (before + 0.25))
    assert run(CASES["defaults"], settings) == run(CASES["defaults"], settings)
