"""The page says what the results say, and nothing else."""

import re
from pathlib import Path

import report
import result_file
from common import Bar


def test_the_page_is_what_the_script_makes_of_the_results() -> None:
    results = report.load()
    remedy = "run: python benchmarks/report.py"
    assert report.PAGE.read_text() == report.page(results), remedy


def test_every_figure_of_the_page_is_there_and_small_and_no_other_is() -> None:
    performance = (report.ROOT / "docs" / "explanation" / "performance.md").read_text()
    shown = set(re.findall(r"\(\.\./figures/(\w+)\.png\)", report.page(report.load()) + performance))
    # the picture of a trace's report is on a page of its own
    assert {path.stem for path in report.FIGURES.glob("*.png")} - {"report", "plan"} == shown
    assert shown >= {"step_sharded", "step_replicated", "host", "memory", "wire", "overlap", "scale"}
    for name in shown:
        path = report.FIGURES / f"{name}.png"
        assert 1000 < path.stat().st_size < 60_000
        assert int.from_bytes(path.read_bytes()[16:20]) == 900, f"{name}.png is not 900 pixels wide"


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    hosts = report.load()["hosts"]
    result_file.write(tmp_path / "hosts.json", hosts)
    results = report.load(tmp_path)
    assert [*results] == ["hosts"]
    assert "Not measured yet: `python benchmarks/step.py`." in report.page(results)
    assert report.page(results).count("Not measured yet: ") == len(report.TITLES) - 1


def test_bars_of_several_cases_are_one_line_and_no_miss_is_lost() -> None:
    bars = [Bar("step: a / b", 0.8, 0.7, "here"), Bar("step: a / b", 0.8, 0.9, "there"), Bar("wire: c", 0, 0, "d")]
    results = {"step": {"bars": [bar.as_json() for bar in bars]}}
    assert report.bars_table(results).splitlines()[2:] == [
        "| step: a / b | 0.8 | 0.7 to 0.9 | there | holds in 1 of 2 |",
        "| wire: c | 0 | 0 | d | holds |",
    ]


def test_every_bar_is_on_the_page_also_those_that_are_missed() -> None:
    results = report.load()
    page = report.page(results)
    measures = {bar["measure"] for one in results.values() for bar in one["bars"]}
    assert len(measures) > 50 and all(f"| {measure} | " in page for measure in measures)
    assert "missed" in page


def test_text_of_the_page_is_wrapped_and_tables_are_not() -> None:
    lines = report.page(report.load()).splitlines()
    assert max(len(line) for line in lines if not line.startswith("|")) <= report.WIDTH < max(map(len, lines))
