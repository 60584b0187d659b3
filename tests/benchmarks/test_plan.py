"""The benchmark of plans compares estimates with steps over the same wire."""

from collections.abc import Callable
from typing import Any

import plan
import pytest

from fsdp.commands.planning import measure


def test_it_writes_an_estimate_beside_every_step(report_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "processor_time", lambda: 1.0)
    monkeypatch.setattr(measure, "SIDE", 128)
    tiny = ("--blocks", "2", "--width", "128", "--milliseconds", "4", "--repeats", "2", "--loads", "0.25")
    report = report_of(plan, *tiny)
    assert [line["case"] for line in report["lines"]] == [*plan.CASES]
    # a step computes for 24 ms, which the estimate has from the plain model alone
    assert all(0.02 < line["estimated"] < 1.0 and len(line["steps"]) == 2 for line in report["lines"])


def test_the_order_of_strategies_is_judged_where_they_differ() -> None:
    def line(case: str, estimated: float, measured: float) -> dict[str, object]:
        return {"load": 1.0, "case": case, "estimated": estimated, "steps": [measured]}

    lines = [line("A", 1.0, 1.0), line("B", 1.3, 1.05), line("C", 1.1, 1.5)]
    bars = {bar.measure: bar.value for bar in plan.judge(lines, 1.0)}
    assert bars["plan: pairs in the wrong order"] == 0.5, "of A and C, and B and C; A and B are alike"
    assert bars["plan: error of an estimated step"] == pytest.approx(1 - 1.1 / 1.5)
