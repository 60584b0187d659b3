"""The checks of `python -m fsdp selftest` pass on the pretend accelerator, before somebody runs them on a real one."""

from pathlib import Path

import pytest
import torch

from fsdp.commands.selftest.checks import CHECKS
from fsdp.commands.selftest.training import Place
from tests.support.accelerator.device import NAME, Scheduler, load
from tests.support.accelerator.world import run
from tests.support.everything import EVERYTHING

load()
torch.set_num_threads(1)
NOT_HERE = {
    "memory between steps": "torch asks no allocator of a device type that it does not ship",
    "a step that fails on one rank": "ranks of one process have no watchdog; tests/device/test_pretend_nccl.py has the check",
}
SKIPPED = ("host waits in a step",)
"""Only CUDA can be asked."""


OTHER_STRATEGIES = [name for name in CHECKS if name.startswith("trains as") and not name.endswith(": FULL_SHARD")]
"""By default left out: their code is the same, and check_training.py trains with each strategy."""


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ([] if EVERYTHING else OTHER_STRATEGIES) + [*NOT_HERE]])
def test_a_check_passes_on_a_device(name: str, tmp_path: Path) -> None:
    def check(rank: int) -> str | None:
        with torch.device(NAME, rank):
            return CHECKS[name](Place(rank, 2, torch.device(NAME, rank), tmp_path))

    found = run(2, check, Scheduler.RANDOM, 1)
    assert [one is None for one in found] == [name in SKIPPED] * 2


def test_what_is_left_out_are_checks() -> None:
    assert CHECKS.keys() >= {*NOT_HERE, *SKIPPED}
