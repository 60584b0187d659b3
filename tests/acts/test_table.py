"""Every act at every moment does what docs/reference/patterns.md says: it is right, refused, or raised by plain torch too."""

import pytest

from tests.acts.page import PAGE, play, printed, shown
from tests.acts.table import DIFFERS, MOMENTS, REFUSED, Pair, outcome, sample
from tests.acts.vocabulary import ACTS
from tests.support.everything import EVERYTHING

AGAIN = "run: python -m tests.acts.page"


def test_the_page_has_every_pair() -> None:
    outcomes = shown()
    assert set(outcomes) == {(act, moment) for act in ACTS for moment in MOMENTS}, AGAIN
    assert printed(outcomes) in PAGE.read_text(encoding="utf-8"), AGAIN
    assert {key for key, said in outcomes.items() if said & set(DIFFERS.values())} == {key[:2] for key in DIFFERS}, AGAIN


@pytest.mark.parametrize("pair", [] if EVERYTHING else sample(), ids=lambda pair: ", ".join(map(str, pair)))
def test_a_pair_does_what_the_page_says(pair: Pair) -> None:
    said, verdict = outcome(pair)
    key = pair.act, pair.moment
    if said == "fault":
        assert (*key, pair.door) in DIFFERS, verdict.fault
    else:
        assert said in shown()[key], f"{verdict}: {AGAIN}"
        assert verdict.refusals or pair not in REFUSED


@pytest.mark.parametrize("act", ACTS if EVERYTHING else ())
def test_every_pair_does_what_the_page_says_in_its_worlds(act: str) -> None:
    for moment in MOMENTS:
        assert play((act, moment)) == (shown()[act, moment], []), f"{act}, {moment}: {AGAIN}"
