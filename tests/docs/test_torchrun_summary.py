"""What docs/reference/errors.md says of the last lines of a job under torchrun."""

from pathlib import Path

import pytest

from tests.support.processes import run_module

SCRIPT = """
import torch, torch.distributed as dist, fsdp
from torch import nn

def main():
    dist.init_process_group("gloo")
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()

main()
"""
CAUSE = "Only rank 0 made a forward without gradients (an evaluation) before: make it on every rank"


@pytest.mark.gloo
def test_the_summary_of_torchrun_has_the_error_of_each_rank(tmp_path: Path) -> None:
    (script := tmp_path / "evaluates.py").write_text(SCRIPT)
    ran = run_module("torch.distributed.run", "--standalone", "--nproc-per-node=2", script)
    above, _, summary = ran.stderr.partition(f"{script} FAILED")
    assert ran.returncode == 1 and CAUSE in above and CAUSE in summary, ran.stderr
    assert summary.rstrip().endswith("=====")  # torchrun's own, and nothing can be written below it
