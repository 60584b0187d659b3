"""`python -m tools.durations` reads what pytest wrote."""

import pytest

from tools.durations import FileTime, file_of, file_times, table

ONE = """<testsuites><testsuite>
<testcase classname="tests.api.test_errors.TestUse" name="a[1]" time="1.5"/>
<testcase classname="tests.api.test_errors" name="b" time="0.25"/>
<testcase classname="tests.params.test_layout" name="c" time="0.5"/>
</testsuite></testsuites>"""
OTHER = '<testsuites><testsuite><testcase classname="tests.params.test_layout" name="d" time="3"/></testsuite></testsuites>'


def test_times_are_summed_by_file_over_all_reports() -> None:
    times = file_times([ONE, OTHER])
    assert list(times.items()) == [
        ("tests/params/test_layout.py", FileTime(2, 3.5)),
        ("tests/api/test_errors.py", FileTime(2, 1.75)),
    ]
    assert table(times).splitlines()[2:] == [
        "| `tests/params/test_layout.py` | 2 | 4 |",
        "| `tests/api/test_errors.py` | 2 | 2 |",
        "| together | 4 | 5 |",
    ]


def test_a_test_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no file holds tests\.api\.test_gone"):
        file_of("tests.api.test_gone")
