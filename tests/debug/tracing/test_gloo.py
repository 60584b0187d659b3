"""Traces of processes over gloo: every collective has its end, clocks are aligned, and the report is made."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from fsdp.commands.main import main
from tests.support.models import Block, loss_of, make_net
from tests.support.processes import results_of


def traced(rank: int, size: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """Trace two steps. Return the file of the trace, and the numbers of the last step."""
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})

    def steps() -> None:
        for _ in range(2):
            loss_of(model(torch.linspace(-1, 1, 12).view(2, 6))).backward()

    steps()
    with fsdp.trace(model) as trace:
        steps()
    return str(trace.save(folder / "trace-{rank}.json")), fsdp.stats(model)


@pytest.mark.gloo
def test_traces_over_gloo_are_complete_and_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of(traced, 2, tmp_path)
    paths = [path for path, _ in found]
    for rank, (path, stats) in enumerate(found):
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        calls = [event for event in events if event.get("cat") == "collective"]
        kinds = Counter(event["args"]["collective"] for event in calls)
        assert kinds["all_gather"] == 2 * stats["gathers"] > 0
        assert kinds["reduce_scatter"] == 2 * stats["reductions"] > 0
        for event in calls:
            assert event["pid"] == rank
            # gloo does not tell when a collective ended: the host looked before and after
            args = event["args"]
            assert event["ts"] <= args["end_after"] <= args["end_before"] <= event["ts"] + event["dur"] + 1e-3
    assert main(["trace", "merge", *paths, "-o", str(tmp_path / "all.json")]) == 0
    merged = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    # no rank sees the end of a gather before the other one has launched it, on the common clock too
    launched, ended = {}, {}
    for event in merged["traceEvents"]:
        if event.get("cat") == "collective" and event["args"]["collective"] == "all_gather":
            key = event["args"]["comm"], event["args"]["number"]
            launched[key, event["pid"]] = event["ts"]
            ended[key, event["pid"]] = event["args"]["end_before"]
    error = max(one["clock_error"] for one in merged["fsdp"]["ranks"])
    assert all(ended[key, 1 - rank] >= began - error for (key, rank), began in launched.items())
    capsys.readouterr()
    assert main(["trace", "report", str(tmp_path / "all.json")]) == 0
    assert "Clocks of the ranks are aligned to" in capsys.readouterr().out
