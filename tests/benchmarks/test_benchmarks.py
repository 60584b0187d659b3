"""The benchmarks run, and write down what they promise. Times are never asserted."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerator
import common
import dimensions
import engines
import host
import instructions
import pytest
import result_file
import step
import step_profile
import torch
from report import page as report_page
from workloads import SMALL, WORKLOADS, Adapted

from tests.support.accelerator.build import missing
from tests.support.jobs import run_alone
from tests.support.processes import ROOT, START_METHOD, environment

Run = Callable[..., None]
NEEDS_COMPILER = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The main program of a benchmark with these arguments, in this process. Its ranks are forks."""
    monkeypatch.setattr(common, "START_METHOD", START_METHOD)

    def main(benchmark: ModuleType, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments])
        benchmark.main()

    return main


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_a_step_is_measured_for_every_contender_and_all_compute_the_same(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "step.json"
    tiny = ("--small", "--repeats", "1", "--steps", "2", "--date", "2000-01-01", "--timeout", "120", "--out", str(out))
    run(step, *tiny, "--option", "accumulate", "--contenders", *step.NAMES, *step.DOORS)
    report: dict[str, Any] = result_file.read(out)
    assert report["machine"]["date"] == "2000-01-01"
    assert str(Path.home()) not in out.read_text()
    (case,) = report["cases"]
    assert set(case["contenders"]) == {*step.NAMES, *step.DOORS}
    assert report["options"].keys() == case["contenders"].keys()
    for one in case["contenders"].values():
        assert len(one["seconds_per_step"]) == len(one["processor_seconds_per_step"]) == 1
        assert len(one["losses"]) == 2 + 2, "two to warm up, two measured"
    assert case["largest_loss_difference"] <= 1e-4
    assert [bar["limit"] for bar in report["bars"]] == [0.80, 0.70, 1.10, 1.00, 0.80, 1.05, 1.05]
    found = report_page({"step": report, "doors": report})
    assert "| step: ours / FSDP2 | 0.7 |" in found and "| ours, by FSDP2's names |" in found


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_data_and_tensor_parallelism_are_measured_beside_fsdp2(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "dimensions.json"
    monkeypatch.setattr(dimensions.shutil, "which", lambda name: None)  # valgrind takes a minute
    run(dimensions, "--units", "2", "--width", "8", "--host-width", "8", "--repeats", "1", "--timeout", "120", "--out", str(out))
    report: dict[str, Any] = result_file.read(out)
    assert [case["settings"]["style"] for case in report["cases"]] == [*dimensions.STYLES]
    for case in report["cases"]:
        assert set(case["steps"]) == set(case["host_seconds"]) == set(dimensions.NAMES)
        assert all(len(one["seconds_per_step"]) == 1 and len(one["losses"]) == 3 + 1 for one in case["steps"].values())
        assert case["steps"]["ours"]["losses"] == pytest.approx(case["steps"]["fsdp2"]["losses"], rel=1e-5)
    assert [bar["limit"] for bar in report["bars"]] == [dimensions.STEP_BAR, dimensions.ADDED_BAR] * 4


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_where_a_step_goes_is_listed_by_kind_of_work(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    given = ("--small", "--model", "gpt8x256", "--contenders", "ours", "--timeout", "90", "--out", str(out))
    run(step_profile, *given)
    found = result_file.read(out)["cases"][0]["contenders"]["ours"]
    assert found["arithmetic"] + found["moving"] + found["the rest"] == pytest.approx(found["by the clock"])
    # which of them took longest depends on what else the machine did
    dearest = found["dearest"]
    assert len(dearest) == 12 and found["operators"] > 100 and found["arithmetic"] > 0 and found["moving"] > 0
    assert any(name.startswith("aten::") for name in dearest) and [*dearest.values()] == sorted(dearest.values(), reverse=True)
    assert "| ours |" in capsys.readouterr().out


@pytest.mark.parametrize("option", step.OPTIONS)
@pytest.mark.parametrize("model", WORKLOADS)
def test_every_model_can_be_trained_with_every_option(model: str, option: str) -> None:
    settings = step.Settings(("bare",), model, option, 1, 1, 1, small=True)
    module = step.make(settings)
    workload = settings.workload
    batch = workload.batch(torch.Generator().manual_seed(0))
    wrapped = engines.CONTENDERS["bare"].wrap(module, workload.unit, half=option == "bf16")
    loss = wrapped(*batch)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    if option == "lora":
        assert trained and all(".inward." in name or ".outward." in name for name in trained)
        assert not any(isinstance(child, Adapted) for child in workload.make().modules())
    else:
        assert trained == {name for name, _ in module.named_parameters()}
    assert SMALL.keys() == WORKLOADS.keys()


def test_losses_that_part_are_named() -> None:
    one = {"losses": [1.0, 0.5]}
    report = {"bare": {"losses": [1.0, 0.7]}, "ddp": one, "fsdp2": one, "ours": {"losses": [1.0, 0.6]}}
    worst, complaints = step.compare_losses(report, 1e-4)
    assert worst == pytest.approx(0.1)
    assert [complaint.split(" differ")[0] for complaint in complaints] == ["ours and ddp", "ours and fsdp2"]


def test_host_time_and_operations_are_measured_for_every_contender(report_of: Callable[..., Any]) -> None:
    tiny = ("--units", "2", "--width", "8", "--repeats", "1", "--steps", "2", "--tensors", "12", "--world", "8")
    report = report_of(host, *tiny)
    (case,) = report["cases"]
    assert set(case["contenders"]) == set(host.NAMES)
    for one in case["contenders"].values():
        assert all(len(one["seconds_of_all_units"][phase]) == 2 for phase in host.PHASES)
        assert all(len(one["seconds_of_all_units"][phase]) == 1 for phase in host.ONCE)
    bare = case["contenders"]["bare"]["operations"]["dispatched"]["forward"]
    assert bare["per_unit"] == 6 * 2, "six F.linear, each a transpose and a product"
    assert [bar["limit"] for bar in report["bars"]] == [0.40, 0.25, 0.35, 0.5, 1.0, 1.0, 0.5, 0.5, 1.0]
    assert "| host: added, ours / FSDP2 | 0.25 |" in report_page({"host": report})


def test_growth_is_what_one_more_tensor_adds() -> None:
    cases = [
        {"settings": {"world": 8, "tensors": tensors}, "microseconds_per_unit": {"ours": {"added": {"median": micro}}}}
        for tensors, micro in ((1, 50.0), (12, 100.0), (32, 140.0))
    ]
    (bar,) = host.judge_growth(cases)
    assert (bar.value, bar.case, bar.holds) == (2.0, "12 to 32, 8 ranks", True)


def test_instructions_are_read_in_the_order_in_which_they_are_counted(tmp_path: Path) -> None:
    (tmp_path / "callgrind.1").write_text("version: 1\nsummary: 12\nfn=(1)\n0 12\n\ntotals: 12\n")
    assert instructions.total(tmp_path / "callgrind.1") == 12
    keys = instructions.keys(host.Settings(("bare", "ours"), 0, 12, 8, 64, 1, instructions.STEPS))
    assert len(keys) == 2 * len(host.COUNTED_UNITS) * instructions.STEPS * len(host.PHASES)
    assert keys[: len(host.PHASES)] == [("bare", host.COUNTED_UNITS[0], phase) for phase in host.PHASES]
    found = {"bare": dict.fromkeys(host.PHASES, 10.0), "fsdp2": dict.fromkeys(host.PHASES, 60.0)}
    bars = instructions.judge({**found, "ours": dict.fromkeys(host.PHASES, 15.0)}, "here")
    assert [(bar.value, bar.holds) for bar in bars] == [(0.1, True), (0.25, True), (0.25, True)]


def test_a_contender_asked_for_by_name_that_does_not_exist_is_refused_in_words() -> None:
    with pytest.raises(
        SystemExit, match="unknown contender 'apex': choose from bare, fsdp1, fsdp1_orig, fsdp2, ours, door_fsdp1"
    ):
        engines.choose(["apex"], host.NAMES)


@NEEDS_COMPILER
@pytest.mark.timeout(180)
def test_memory_and_host_waits_are_counted_on_the_pretend_accelerator(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "accelerator.json"
    sizes = ("--blocks", "2", "--width", "16", "--heads", "2", "--sequence", "4", "--vocabulary", "16")
    given = ("--world", "2", *sizes, "--contenders", "fsdp2", "ours", "--timeout", "120", "--out", str(out))
    run(accelerator, *given)
    report: dict[str, Any] = result_file.read(out)
    theirs, ours = report["cases"]
    assert ours["waits"] == 0
    assert theirs["largest_loss_difference"] <= 1e-6  # the norm of gradients is added in another order
    for case in (theirs, ours):
        assert 0 < case["at_rest"] < case["training"] <= case["peak"]
        assert len(case["losses"]) == 2 and all(len(losses) == 4 for losses in case["losses"])
        assert list(case["times"]) == ["0.5", "1.0", "2.0"]
        for times in case["times"].values():
            parts = [times[part] for part in ("gathers", "reductions", "copies")]
            assert min(parts) > 0 and sum(parts) == pytest.approx(times["step"] - 1, rel=1e-6)
            assert times["apart"] <= times["step"] * (1 + 1e-6)
    assert "| FSDP2 |" in report_page({"accelerator": report})


THREADS = """
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.accelerator.device import Scheduler
from tests.support.accelerator.threads import run_threads

turns = threading.Barrier(2)


def device_of_a_tensor_without_memory(rank):
    for turn in range(2):  # one after the other
        if turn == rank:
            with FakeTensorMode():
                found = str(torch.empty_strided((2,), (1,), device="pretend").device)
        turns.wait(60)
    return found


print(*run_threads(2, device_of_a_tensor_without_memory, Scheduler.EAGER))
"""


@NEEDS_COMPILER
def test_each_thread_of_the_pretend_accelerator_computes_the_shapes_of_dtensors_on_its_own_device(tmp_path: Path) -> None:
    """FSDP2 was told of "at least two devices" now and then."""
    (tmp_path / "threads.py").write_text(THREADS)
    ended = run_alone(tmp_path / "threads.py", cwd=tmp_path)
    assert (ended.status, ended.output) == (0, "pretend:0 pretend:1\n"), ended.errors


@NEEDS_COMPILER
@pytest.mark.timeout(180)
def test_each_collective_and_each_wait_of_a_step_is_listed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--blocks", "2", "--width", "16", "--heads", "2", "--sequence", "4", "--vocabulary", "16")
    run(accelerator, "--world", "2", *sizes, "--contenders", "ours", "ours_last_kept", "--timeline", "1")
    ours, kept = capsys.readouterr().out.split("ours, last unit kept, load 1: ")
    assert "ours, load 1: " in ours
    # the root and two units are gathered, the units again for the backward, and each is reduced; and gradients are counted
    for printed, counts in ((ours, [5, 4]), (kept, [4, 4])):
        assert [len(re.findall(f"  {what}, .* MB: there", printed)) for what in ("gathers", "reductions")] == counts
        assert "computing waits: " in printed


@NEEDS_COMPILER
@pytest.mark.timeout(180)
def test_a_step_with_shards_in_host_memory_takes_as_long_as_its_copies_and_its_computing_let_it(tmp_path: Path) -> None:
    out = tmp_path / "offload.json"
    given = ("--blocks", "6", "--loads", "0.1", "1", "4", "--out", str(out))
    # in a process of its own, because torch cannot lose an accelerator again
    command = [sys.executable, str(ROOT / "benchmarks" / "offload.py"), *given]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = result_file.read(out)
    assert [(line["ranks"], line["load"]) for line in report["lines"]] == [(r, load) for r in (1, 2) for load in (0.1, 1.0, 4.0)]
    for line in report["lines"]:
        copy = line["load"] * 3 * 6 / 12  # one unit's, to the device: two in a step for each of six blocks
        alone = 4 * copy  # the first copy of each pass, and the last gradients, hide behind nothing
        by_pass = line["step"] / line["to_by_pass"]
        assert line["ideal"] <= by_pass <= line["step"] <= by_pass + alone
    assert "| offload: step / max(computing, transfers) | 1.1 |" in report_page({"offload": report})
