"""Which test files take how long, from the reports that pytest wrote (`--junitxml`).

python -m tools.durations runs/tests.xml     prints a table of the slowest files
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parents[1]
SLOWEST: Final = 10


class FileTime(NamedTuple):
    """How many tests of a file ran, and how many seconds they took, fixtures included."""

    tests: int
    seconds: float


def file_times(reports: Iterable[str]) -> dict[str, FileTime]:
    """The times of every file in these reports, the slowest file first.

    Raises:
        ValueError: a report names a test whose file does not exist.
    """
    found: dict[str, FileTime] = {}
    for report in reports:
        for case in ElementTree.fromstring(report).iter("testcase"):
            file = file_of(case.attrib["classname"])
            tests, seconds = found.get(file, FileTime(0, 0.0))
            found[file] = FileTime(tests + 1, seconds + float(case.attrib["time"]))
    return dict(sorted(found.items(), key=lambda one: -one[1].seconds))


def file_of(classname: str) -> str:
    """The file of `tests.api.test_errors.TestUse`: the longest part of it that is one."""
    parts = classname.split(".")
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (ROOT / path).exists():
            return path.as_posix()
    raise ValueError(f"no file holds {classname}")


def table(times: Mapping[str, FileTime]) -> str:
    """The slowest files, all others together, and the sum, in Markdown."""
    slow = list(times.items())[:SLOWEST]
    others = sum_of(list(times.values())[SLOWEST:])
    rows = [(f"`{file}`", time) for file, time in slow]
    if others.tests:
        rows.append((f"{len(times) - SLOWEST} other files", others))
    rows.append(("together", sum_of(times.values())))
    lines = [f"| {name} | {tests:,} | {seconds:,.0f} |" for name, (tests, seconds) in rows]
    return "\n".join(["| file | tests | seconds |", "| --- | ---: | ---: |", *lines])


def sum_of(times: Iterable[FileTime]) -> FileTime:
    every = list(times)
    return FileTime(sum(one.tests for one in every), sum(one.seconds for one in every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="files that pytest --junitxml wrote")
    asked = parser.parse_args()
    print(table(file_times(path.read_text(encoding="utf-8") for path in asked.reports)))


if __name__ == "__main__":
    main()
