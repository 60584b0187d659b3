"""`fsdp.measure_links` gives what `fsdp.plan` takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.commands.planning import measure
from fsdp.commands.rehearsal.hardware import Link
from tests.commands.rehearsal.models import MODELS
from tests.support.processes import results_of


def measured(rank: int, size: int, folder: Path) -> Any:
    """The links of two processes over gloo, and a plan with them."""
    measure.SIDE = 128  # type: ignore[misc]
    found = fsdp.measure_links()
    case = MODELS["GPT"]
    plan = fsdp.plan(case.build, 4, inputs=case.inputs, checkpointing=[False], strategies=["FULL_SHARD"], **found)
    return found, str(plan)


@pytest.mark.gloo
def test_what_two_ranks_measure_is_what_a_plan_takes(tmp_path: Path) -> None:
    (one, plan), (other, _) = results_of(measured, 2, tmp_path)
    assert one["network"] == other["network"], "the ranks agree on the links"
    assert 1e6 < one["network"].bandwidth < 1e12 and 1e-7 < one["network"].latency < 1.0
    assert 1e6 < one["device"].flops < 1e14 and 1e6 < one["device"].bandwidth < 1e13
    assert one["device"].memory > 2**28
    assert "between hosts: measured by fsdp.measure_links" in plan.replace("\n", " ")


def test_a_small_gather_that_other_work_has_slowed_does_not_make_links_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    megabyte = 2**20

    def link(*seconds: float) -> Link:
        measured = iter(seconds)
        monkeypatch.setattr(measure, "_fastest", lambda work, where: next(measured))
        monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
        found = measure._link(None, 2, torch.device("cpu"))
        assert next(measured, None) is None, "it measures as often as it must"
        return found

    quiet = link(0.001, 0.005)
    assert quiet.bandwidth == pytest.approx(4 * megabyte / 0.004, rel=1e-3) and quiet.latency == pytest.approx(0.001, rel=1e-3)
    disturbed = link(0.02, 0.005, 0.001, 0.017)
    assert disturbed.bandwidth == pytest.approx(16 * megabyte / 0.016, rel=1e-3)
    assert link(0.02, 0.005, 0.02, 0.016).bandwidth == pytest.approx(16 * megabyte / 0.008, rel=1e-3)


def test_without_ranks_there_is_nothing_to_measure() -> None:
    with pytest.raises(fsdp.ShardingError, match="there is no process group of at least two ranks"):
        fsdp.measure_links()
