"""The files under results/: how a benchmark's report is written and read. Nothing else reads or writes them.

A file is one JSON object. Each entry of the report has a line of its own, and each case, bar or row a line of its own below it:

    {
    "benchmark": "memory",
    "cases": [
    {"settings": {"world": 2}, "floor": 33956864},
    {"settings": {"world": 4}, "floor": 27505664}
    ]
    }

Rule 1: every repeat is kept. Medians and ratios can be computed again from the file.
Rule 2: fractions have `DIGITS` significant digits. Whole numbers, which are counts, are exact.
"""

import json
from collections.abc import Mapping
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DIGITS = 8
"""More than a float32 holds, so losses are kept as they were computed. With seven, the page would differ in two figures."""

Report = Mapping[str, Any]


def write(path: Path, report: Report) -> None:
    """Write a report. The folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(report))


def read(path: Path) -> dict[str, Any]:
    """The report in a file."""
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def as_text(report: Report) -> str:
    """The text of a file: an entry a line, and a case a line."""
    return _over_lines([f"{_line(key)}: {_entry(value)}" for key, value in report.items()], "{}") + "\n"


def _entry(value: Any) -> str:
    """One entry of the report, with a line for each part that has parts itself."""
    if isinstance(value, list | tuple) and any(isinstance(one, dict) for one in value):
        return _over_lines([_line(one) for one in value], "[]")
    if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
        return _over_lines([f"{_line(key)}: {_line(one)}" for key, one in value.items()], "{}")
    return _line(value)


def _over_lines(lines: list[str], brackets: str) -> str:
    return "\n".join([brackets[0], ",\n".join(lines), brackets[1]])


def _line(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """The same value, with fractions rounded. Digits before the decimal point all stay."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float) and isfinite(value) and value:
        return round(value, max(0, DIGITS - 1 - floor(log10(abs(value)))))
    return value
