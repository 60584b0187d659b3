"""`benchmarks/gpu.py`, as far as a CPU can tell: it runs for everybody, counts operations, judges, and says what is missing."""

import gc
import sys
from pathlib import Path
from typing import Any

import device_runs
import engines
import gpu
import pytest
import result_file
import torch
from common import Sample
from llama import Llama, Sizes, batch_of, operations
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

MEASURED = ("bare", "fsdp1", "fsdp1_orig", "fsdp2", "ours")
CPU = torch.device("cpu")
TINY = ("--blocks", "1", "--width", "16", "--vocabulary", "32", "--sequence", "16", "--batch", "1")
QUICK = ("--steps", "1", "--repeats", "1", "--varying", "2", "--host-units", "1", "--date", "2000-01-01")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *given: str) -> dict[str, Any]:
    """The report of a run on the CPU, in this process: a start costs more than all else."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *TINY, *QUICK, "--out", str(out), *given])
    monkeypatch.setattr(gpu, "elsewhere", lambda measure, settings, timeout: measure(settings))
    gc.freeze()  # it collects garbage before every measurement, and not what is here by now
    gpu.run(gpu.parse(), "cpu")
    return result_file.read(out)


@pytest.mark.parametrize(("version", "why"), [(None, "is built without CUDA"), ("13.0", "torch sees none")])
def test_without_a_device_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, version: str | None, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match=f"not run: needs a CUDA device, and .*{why}"):
        gpu.main()


def test_no_benchmark_hides_a_package_that_torch_imports() -> None:
    """Scripts see their folder before everything that is installed."""
    assert not (Path(gpu.__file__).parent / "cuda.py").exists()


def test_operations_are_those_that_torch_counts() -> None:
    sizes, length = Sizes(blocks=2, width=512, vocabulary=64, sequence=16, batch=2), 8
    assert (sizes.heads, sizes.key_heads) == (4, 1)
    model = Llama(sizes)
    # the one implementation whose attention is made of products that are counted, and computes nothing again
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*batch_of(sizes, length, torch.Generator().manual_seed(0), CPU)).backward()
    assert counter.get_total_flops() == operations(sizes, length)


def test_every_contender_is_measured_on_a_group_that_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(monkeypatch, tmp_path / "cuda.json", "--world", "8")
    (case,) = report["cases"]
    assert tuple(case["contenders"]) == tuple(report["options"]) == tuple(case["memory"]) == MEASURED
    assert report["skipped"] == {"fairscale": "fairscale needs a CUDA device"}
    assert case["failed"] == {}
    for one in case["contenders"].values():
        assert len(one["seconds_per_step"]) == len(one["launching_seconds_per_step"]) == 1
        assert len(one["host_seconds_of_all_units"]["backward_by_the_clock"]) == 1
        assert one["losses"] == [], "the values of a fake group mean nothing"
    assert all(of == {"fixed": None, "varying": None, "failed": None} for of in case["memory"].values()), (
        "a CPU keeps no such statistics"
    )
    assert {"step", "launching", "tokens_per_second", "mfu", "added"} == case["figures"]["ours"].keys()
    assert [bar["limit"] for bar in report["bars"]] == [0.97, 0.25, 0.40]
    assert {bar["case"] for bar in report["bars"]} == {"8 ranks, fake"}
    assert str(Path.home()) not in (tmp_path / "cuda.json").read_text()


def test_all_compute_the_same_where_there_is_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(monkeypatch, tmp_path / "cuda.json", "--world", "1", "--steps", "2", "--varying", "0")
    (case,) = report["cases"]
    losses = [one["losses"] for one in case["contenders"].values()]
    assert [len(one) for one in losses] == [device_runs.COMPARED] * len(MEASURED)
    assert 0 <= case["largest_loss_difference"] <= 1e-3


def test_weights_stay_finite_and_as_they_were_where_gradients_mean_nothing() -> None:
    settings = device_runs.Settings(("fsdp2",), 8, Sizes(1, 16, 32, 8, 1), 1, 1, 0, 1, "cpu")
    with device_runs.group_of(settings):
        runner = device_runs.Runner("fsdp2", settings)
        before = [parameter.detach().to_local().clone() for parameter in runner.model.parameters()]  # type: ignore[attr-defined]
        runner.warm_up()
        after = [parameter.detach().to_local() for parameter in runner.model.parameters()]  # type: ignore[attr-defined]
    # AdamW's own decay is all that moves them
    decay = (1 - 3e-4 * 1e-2) ** runner.turns
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old * decay, rtol=1e-6, atol=0)


def test_lengths_vary_alike_for_everybody() -> None:
    drawn = device_runs.lengths(2048, 200)
    assert drawn == device_runs.lengths(2048, 200)
    assert {512, 2048} <= set(drawn) and len(set(drawn)) == 13 and min(drawn) == 512 and max(drawn) == 2048


def figures(step: float, added: float) -> dict[str, Any]:
    return {"step": Sample(step, step, step), "added": Sample(added, added, added)}


def bytes_of(allocated: float, fixed: float, varying: float) -> dict[str, Any]:
    return {
        "fixed": {"peak_allocated": allocated, "reserved_to_allocated": fixed},
        "varying": {"peak_allocated": 2 * allocated, "reserved_to_allocated": varying},
    }


def test_what_is_judged_and_what_is_missed() -> None:
    peers = {"fsdp1": figures(1.1, 50.0), "fsdp1_orig": figures(1.2, 40.0), "fsdp2": figures(1.0, 80.0)}
    memory = {"fsdp2": bytes_of(10.0, 1.2, 1.5), "ours": bytes_of(8.0, 1.04, 1.06)}
    bars = gpu.judge({**peers, "ours": figures(0.9, 18.0)}, memory, "8 ranks, fake")
    found = {(bar.measure, bar.case): (bar.limit, pytest.approx(bar.value), bar.holds) for bar in bars}
    label = "8 ranks, fake"
    assert found == {
        ("CUDA: step, ours / FSDP2", label): (0.97, 0.9, True),
        ("CUDA: added on the host, ours / FSDP2", label): (0.25, 0.225, True),
        ("CUDA: added on the host, ours / the faster FSDP1", label): (0.40, 0.45, False),
        ("CUDA: peak allocated, ours / FSDP2", label): (0.90, 0.8, True),
        ("CUDA: reserved / allocated, ours", f"{label}, fixed lengths"): (1.05, 1.04, True),
        ("CUDA: reserved / allocated, ours", f"{label}, varying lengths"): (1.05, 1.06, False),
    }
    assert [bar.holds for bar in gpu.judge({**peers, "ours": figures(0.98, 21.0)}, {}, label)] == [False, False, False]
    assert gpu.judge(peers, memory, label) == []


def test_contenders_state_their_options_on_cuda() -> None:
    on_cuda = engines.contenders("cuda")
    assert "limit_all_gathers=True" in on_cuda["fsdp1"].options and "CUDA mesh" in on_cuda["fsdp2"].options
    assert "limit_all_gathers=False" in engines.CONTENDERS["fsdp1"].options
    assert on_cuda.keys() == engines.CONTENDERS.keys() and set(gpu.NAMES) <= on_cuda.keys() <= engines.TITLES.keys()


def test_fairscale_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names, skipped = engines.choose(None, gpu.NAMES)
    assert names == MEASURED and skipped == {"fairscale": "fairscale needs a CUDA device"}
    assert "fairscale is left out: fairscale needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="fairscale: fairscale needs a CUDA device"):
        engines.choose(["fairscale"], gpu.NAMES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    assert engines.contenders("cuda")["fairscale"].missing() == "fairscale is not installed"


def test_only_fairscale_may_fail() -> None:
    class Failing:
        def __init__(self, name: str, settings: device_runs.Settings) -> None:
            self.name = name

        def warm_up(self) -> None:
            if self.name != "bare":
                raise AttributeError("no such function")

    def ready(*names: str) -> Any:
        return device_runs.ready(Failing, device_runs.Settings(names, 8, Sizes(1, 8, 8, 8, 1), 1, 1, 0, 1, "cpu"))  # type: ignore[type-var]

    runners, failed = ready("bare", "fairscale")
    assert list(runners) == ["bare"] and failed == {"fairscale": "AttributeError: no such function"}
    with pytest.raises(AttributeError):
        ready("bare", "fsdp2")


class Event:
    """One that CUDA would have filled: each is recorded 5 ms after the one before."""

    recorded = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 5.0
        self.at, self.done = Event.recorded, False

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.done, "an event that has not happened has no time"
        return end.at - self.at


def test_the_time_of_the_device_is_in_seconds_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = device_runs.Clock(torch.device("cuda", 0))
    begun, ended = clock.mark(), clock.mark()
    assert clock.seconds(begun, ended) == pytest.approx(5e-3)


def test_what_the_allocator_says_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"max_memory_allocated": 80, "max_memory_reserved": 100, "memory_allocated": 10, "memory_reserved": 100}
    for name, count in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count)
    early = {"inactive_split_bytes.all.current": 7, "inactive_split_bytes.all.peak": 9, "num_alloc_retries": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: early)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert device_runs.held(torch.device("cuda", 0)) == {
        "peak_allocated": 80,
        "peak_reserved": 100,
        "reserved_to_allocated": 1.25,
        "allocated": 10,
        "reserved": 100,
        "inactive_split": 7,
        "peak_inactive_split": 9,
        "allocation_retries": 1,
    }
    assert device_runs.held(CPU) is None
