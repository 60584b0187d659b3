"""Reports are stored compactly, and nothing that a page needs is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import result_file

STORED = sorted(result_file.RESULTS.glob("*.json"))


def test_a_case_is_a_line(tmp_path: Path) -> None:
    cases = [{"settings": {"ranks": ranks}, "seconds": [0.5, 0.25]} for ranks in (2, 4)]
    path = tmp_path / "made" / "step.json"
    result_file.write(
        path, {"benchmark": "step", "loads": (1.0, 2.0), "cases": cases, "steps": {"0.5": {"ours": [1]}}, "bars": []}
    )
    assert path.read_text().splitlines() == [
        "{",
        '"benchmark": "step",',
        '"loads": [1.0,2.0],',
        '"cases": [',
        '{"settings":{"ranks":2},"seconds":[0.5,0.25]},',
        '{"settings":{"ranks":4},"seconds":[0.5,0.25]}',
        "],",
        '"steps": {',
        '"0.5": {"ours":[1]}',
        "},",
        '"bars": []',
        "}",
    ]
    read = result_file.read(path)
    assert read["cases"] == cases and read["steps"] == {"0.5": {"ours": [1]}}


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.0010455609999997506, 0.001045561),
        (-5.744934558868408, -5.7449346),
        (61025919545.875, 61025919546.0),
        (12345678901, 12345678901),
        (float("inf"), float("inf")),
        (0.0, 0.0),
        (True, True),
        ("0.123456789012", "0.123456789012"),
    ],
)
def test_fractions_are_rounded_and_nothing_else(value: Any, stored: Any) -> None:
    (back,) = json.loads(result_file.as_text({"value": [value]}))["value"]
    assert back == stored and type(back) is type(value)


def test_all_stored_results_are_compact() -> None:
    assert STORED
    for path in STORED:
        assert path.read_text() == result_file.as_text(result_file.read(path)), f"{path.name} was not written by result_file.py"
    assert sum(path.stat().st_size for path in result_file.RESULTS.iterdir()) < 810_000
