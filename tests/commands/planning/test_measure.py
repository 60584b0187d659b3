"""`fsdp.measure_links` gives what `fsdp.plan` takes."""

from pathlib import Path

import pytest

import fsdp
from tests.support.processes import results_of


@pytest.mark.gloo
def test_what_two_ranks_measure_is_what_a_plan_takes(tmp_path: Path) -> None:
    (one, plan), (other, _) = results_of("tests.commands.planning.measure_program", 2, tmp_path)
    assert one["network"] == other["network"], "the ranks agree on the links"
    assert 1e6 < one["network"].bandwidth < 1e12 and 1e-7 < one["network"].latency < 1.0
    assert 1e6 < one["device"].flops < 1e14 and 1e6 < one["device"].bandwidth < 1e13
    assert one["device"].memory > 2**28
    assert "between hosts: measured by fsdp.measure_links" in plan.replace("\n", " ")


def test_without_ranks_there_is_nothing_to_measure() -> None:
    with pytest.raises(fsdp.ShardingError, match="there is no process group of at least two ranks"):
        fsdp.measure_links()
