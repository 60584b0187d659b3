"""A report says the numbers of a made-up trace, and a sentence for every file that is none."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fsdp.commands.main import main
from fsdp.commands.reporting import html
from fsdp.commands.reporting.advice import advise
from fsdp.commands.reporting.clocks import merged, offset
from fsdp.commands.reporting.numbers import numbers_of, slowest
from fsdp.commands.reporting.rank_trace import read_traces
from fsdp.commands.reporting.replay import ranks_of, replayed, with_prefetch, without_second_gather
from fsdp.errors import ShardingError
from tests.commands.reporting.made_up import made_up, written


def test_a_step_is_divided_into_computing_waiting_the_engine_and_the_rest(tmp_path: Path) -> None:
    (trace,) = read_traces(written(tmp_path, made_up()))
    step = numbers_of(trace).typical
    assert (step.length, step.computing, step.waiting, step.engine, step.rest) == (100e3, 49e3, 15e3, 1e3, 35e3)
    assert step.communication == 10e3 + 25e3
    assert step.exposed == {("gathers", "a"): 10e3, ("reductions", "a"): 5e3}
    assert step.received == {"all_gather": 1000, "reduce_scatter": 1000}
    assert (step.peak, step.held_at_peak) == (500, {"shards": 100, "whole": 400})


def test_the_report_prints_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = written(tmp_path, made_up())
    assert main(["trace", "report", str(path), "--json", str(tmp_path / "numbers.json")]) == 0
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("0 "))
    assert row == ["0", "1", "100.00", "49.00", "15.00", "1.00", "35.00", "35.00"]
    assert re.search(r"^gathers +a +10.00$", printed, re.MULTILINE)
    assert "1 all_gather (1000 B received), 1 reduce_scatter (1000 B received)" in printed
    assert "Peak of the engine's memory: 500 B on rank 0 in step 0: 400 B whole, 100 B shards." in printed
    assert json.loads((tmp_path / "numbers.json").read_text())["steps"]["0"]["exposed"] == {
        "gathers: a": 10e3,
        "reductions: a": 5e3,
    }


def test_clocks_are_aligned_by_what_no_rank_can_see_end_before_all_have_launched_it(tmp_path: Path) -> None:
    first, other = read_traces(written(tmp_path, made_up(0, 2), made_up(1, 2, clock=7.0)))
    found = offset(first, other)
    # the gather took 10 ms: a clock can be wrong by half of that at the most, and the middle is right here
    assert (found.middle, found.error) == (7e3, 10e3)
    events = merged([first, other])["traceEvents"]
    gathers = [event for event in events if event["name"] == "all_gather a"]
    assert [(event["pid"], event["ts"], event["args"]["wait_began"]) for event in gathers] == [(0, 10e3, 10e3), (1, 10e3, 10e3)]


def test_a_trace_is_not_overwritten_by_the_merged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, made_up(0, 2), made_up(1, 2))
    before = paths[0].read_bytes()
    assert main(["trace", "merge", *map(str, paths), "-o", str(paths[0])]) != 0
    assert "is one of the traces, and would be lost" in capsys.readouterr().err
    assert paths[0].read_bytes() == before


def test_a_merged_file_gives_the_same_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in written(tmp_path, made_up(0, 2), made_up(1, 2, clock=7.0))]
    assert main(["trace", "merge", *paths, "-o", str(tmp_path / "all.json")]) == 0
    assert main(["trace", "report", *paths]) == 0
    apart = capsys.readouterr().out.partition("\n")[2]
    assert main(["trace", "report", str(tmp_path / "all.json")]) == 0
    assert capsys.readouterr().out == apart


def test_the_rank_with_the_most_work_of_its_own_is_the_slowest(tmp_path: Path) -> None:
    busy = made_up(1, 2)
    for event in busy["traceEvents"]:
        if event["name"] == "all_gather a":
            event["args"]["waited"] = 0.0
    traces = read_traces(written(tmp_path, made_up(0, 2), busy))
    rank, excess = slowest([numbers_of(one) for one in traces])
    assert (rank.rank, excess) == (1, 5e3)


def test_simulating_the_same_options_takes_as_long_as_the_step(tmp_path: Path) -> None:
    traces = read_traces(written(tmp_path, made_up(0, 2), made_up(1, 2)))
    ranks = ranks_of(traces, [numbers_of(one) for one in traces], 0)
    assert replayed(ranks) == pytest.approx(100e3)
    assert replayed([with_prefetch(one, 1) for one in ranks]) == pytest.approx(100e3)
    assert replayed([without_second_gather(one) for one in ranks]) == pytest.approx(100e3), "nothing is gathered twice"


def test_buckets_are_advised_by_the_ranks_that_share_a_reduction(tmp_path: Path) -> None:
    """Of a cap of 4 MiB, one rank of two receives 2 MiB, and one of four 3 MiB: only these join reductions of 2.2 and 0.2 MiB."""

    def advice(ranks: int) -> list[str]:
        document = made_up(world_size=4)
        reduction = next(one for one in document["traceEvents"] if one["name"] == "reduce_scatter a")
        times = {"wait_began": 80e3, "waited": 10e3, "end_after": 80e3, "end_before": 90e3}
        reduction |= {"ts": 79e3, "dur": 11e3, "args": {**reduction["args"], **times, "received": 2_300_000}}
        times = {"wait_began": 90e3, "waited": 10e3, "end_after": 90e3, "end_before": 100e3}
        args = {**reduction["args"], **times, "number": 1, "received": 200_000}
        second = {**reduction, "ts": 79.5e3, "dur": 20.5e3, "args": args}
        document["traceEvents"].append(second)
        for one in document["traceEvents"]:
            if one["cat"] == "collective":
                one["args"]["ranks"] = ranks
        traces = read_traces(written(tmp_path, document))
        return [one.change for one in advise(traces, [numbers_of(one) for one in traces]) if "bucket" in one.change]

    assert advice(4) == ["reduction=fsdp.ReductionPolicy(bucket_cap_mb=4)"]
    assert advice(2) == ["reduction=fsdp.ReductionPolicy(bucket_cap_mb=25)"]


def test_ranks_that_traced_different_steps_are_refused(tmp_path: Path) -> None:
    other = made_up(1, 2)
    for event in other["traceEvents"]:
        event["name"] = event["name"].replace(" a", " b")
    with pytest.raises(ShardingError, match="rank 0 has traced all_gather a where rank 1 has traced all_gather b"):
        merged(read_traces(written(tmp_path, made_up(0, 2), other)))
    late = made_up(1, 2, clock=7.0)
    for event in late["traceEvents"]:
        if event["name"] == "reduce_scatter a":
            event["ts"] += 90e3
    with pytest.raises(ShardingError, match="ranks 0 and 1 have traced different steps: no difference of their clocks"):
        merged(read_traces(written(tmp_path, made_up(0, 2), late)))


def _without(category: str) -> dict[str, Any]:
    document = made_up()
    return {**document, "traceEvents": [one for one in document["traceEvents"] if one["cat"] != category]}


def _changed(**info: Any) -> dict[str, Any]:
    document = made_up()
    return {**document, "fsdp": {**document["fsdp"], **info}}


BROKEN: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "no file": (lambda folder: [folder / "missing.json"], r"missing.json: No such file or directory"),
    "cut off": (lambda folder: [_text(folder, json.dumps(made_up())[:-40])], r"not a complete JSON file .*cut off"),
    "no JSON": (lambda folder: [_text(folder, "a log")], r"not a complete JSON file"),
    "another JSON": (lambda folder: [_text(folder, '{"traceEvents": []}')], r"a JSON file, but no trace of fsdp"),
    "a list": (lambda folder: [_text(folder, "[1]")], r"a JSON file, but no trace of fsdp"),
    "another version": (lambda folder: written(folder, _changed(version=9)), r"a trace of version 9, and this fsdp reads 1"),
    "no fields": (
        lambda folder: written(folder, {**made_up(), "traceEvents": [{"pid": 0, "cat": "step"}]}),
        r"event 0 has no field 'ph'; the file was changed",
    ),
    "twice": (lambda folder: written(folder, made_up(), made_up()), r"rank 0 is in another file too"),
    "two jobs": (lambda folder: written(folder, made_up(0, 2), made_up(1, 4)), r"of jobs with 2 and 4 ranks"),
    "ranks missing": (lambda folder: written(folder, made_up(1, 4)), r"no trace of ranks 0, 2, 3 of 4: give the files of all"),
    "no step": (lambda folder: written(folder, _without("step")), r"rank 0 has no complete training step"),
}


def _text(folder: Path, text: str) -> Path:
    path = folder / "trace.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("make", "text"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_reported_gets_a_sentence(
    make: Callable[[Path], list[Path]], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "report", *map(str, make(tmp_path))]) == 1
    told = capsys.readouterr().err
    assert re.search(text, told) and told.startswith("fsdp: ") and told.count("\n") == 1


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*above, name)
        yield from _places(inner, (*above, name))


@pytest.mark.parametrize("wrong", [..., "x", float("nan")], ids=str)
def test_a_file_with_any_field_changed_is_reported_or_gets_a_sentence(
    wrong: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = 0
    for number, place in enumerate(_places(made_up(0, 2))):
        document = made_up(0, 2)
        *above, last = place
        inside = reduce(lambda part, name: part[name], above, document)
        if wrong is ...:
            del inside[last]
        else:
            inside[last] = wrong
        paths = written(tmp_path, document, made_up(1, 2))
        command = ["report", "--allow-missing"] if number % 2 else ["merge", "--out", str(tmp_path / "all.json")]
        if main(["trace", *command, *map(str, paths)]):
            told = capsys.readouterr().err
            assert told.startswith("fsdp: ") and told.count("\n") == 1, place
            refused += 1
    assert refused > 20


def test_some_ranks_are_enough_if_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = written(tmp_path, made_up(1, 4))
    assert main(["trace", "report", "--allow-missing", str(path)]) == 0
    assert "No trace of ranks 0, 2, 3" in capsys.readouterr().out


def test_a_page_has_the_numbers_and_asks_the_network_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", ModuleType("plotly"))
    monkeypatch.setitem(sys.modules, "plotly.offline", SimpleNamespace(get_plotlyjs=lambda: "/* the library */"))
    document = made_up()
    for event in document["traceEvents"]:
        event["args"] = {**event["args"], **({"unit": "</script><b>"} if "unit" in event["args"] else {})}
    (path,) = written(tmp_path, document)
    assert main(["trace", "report", str(path), "--html", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "/* the library */" in text and "100.00 ms" in text
    assert text.count("</script>") == 2, "names of units are data"
    assert not re.search(r"""(src|href)=['"](?!data:)""", text) and "http" not in text
    for plot in ("parts", "exposed", "timeline", "memory"):
        assert f"id='{plot}'" in text and f'"{plot}": {{"data"' in text
    assert all(one in text for one in ("lang='en'", "aria-labelledby='parts-title'", "<button type='button'"))


def test_a_page_without_plotly_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ShardingError, match="report --html needs the package plotly: pip install plotly"):
        html.document("report --html", "", [], {})
