"""Units that are chosen without a list are nearly as good as the best ones by hand, by the estimate."""

import math
from typing import Any

import pytest
import units

from tests.support.everything import EVERYTHING

LIMIT = 1.05
ALL = list(units.cases())


@pytest.mark.parametrize("cluster", units.CLUSTERS)
@pytest.mark.parametrize("name", ALL if EVERYTHING else ["mlp"])
def test_a_plan_chooses_units_that_are_nearly_the_best(name: str, cluster: str) -> None:
    lines = list(units.estimate(name, units.cases()[name], cluster))
    assert lines[0]["memory"] is None and len(lines) > 3
    for one in lines:
        assert one["plan"] is not None, f"nothing fits {one}"
        assert one["plan"] <= LIMIT * one["by_hand"], one


@pytest.mark.parametrize("name", ALL if EVERYTHING else ["mlp"])
def test_auto_is_nearly_the_best_on_processors(name: str) -> None:
    free = [one for one in units.estimate(name, units.cases()[name], "8 processors") if one["memory"] is None]
    assert all(one["auto"] <= LIMIT * one["by_hand"] for one in free), free


def test_the_worst_case_is_judged_and_what_does_not_fit_is_not_good_enough() -> None:
    def line(memory: int | None, by_hand: float, auto: float | None, plan: float | None) -> list[dict[str, Any]]:
        same = {"model": "M", "memory": memory, "by_hand": by_hand, "auto": auto, "plan": plan}
        return [{**same, "cluster": cluster} for cluster in units.CLUSTERS]

    lines = [*line(None, 1.0, 1.1, 1.0), *line(None, 2.0, 2.0, 2.08), *line(7, 1.0, None, 1.01), *line(5, 1.0, None, None)]
    bars = units.judge_estimates(lines)
    assert [bar.value for bar in bars[:3]] == [1.1, pytest.approx(1.04), math.inf]
    assert [bar.holds for bar in bars[:3]] == [False, True, False]
