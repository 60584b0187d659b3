"""The engine over a process group whose collectives are queued on devices, as NCCL's are: between processes, on pretend devices.

See docs/development/pretend-accelerator.md. No GPU takes part.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from tests.support.accelerator.device import Scheduler
from tests.support.accelerator.pretend_nccl import ENDED_BY_WATCHDOG
from tests.support.everything import EVERYTHING
from tests.support.processes import start_rank

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("compiled")]  # it starts processes
SIZE = 2


def ranks_of(story: str, folder: Path, scheduler: str = "RANDOM") -> tuple[list[int], list[Any], str]:
    """The exit status and the result of each rank, and what they printed."""
    module = "tests.support.accelerator.nccl_rank"
    ranks = [start_rank(module, rank, SIZE, folder, story, scheduler, output=folder / f"{rank}.txt") for rank in range(SIZE)]
    try:
        codes = [one.wait(timeout=150) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    printed = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(SIZE))
    saved = [folder / f"{rank}.pt" for rank in range(SIZE)]
    return codes, [torch.load(one, weights_only=False) if one.exists() else None for one in saved], printed


@pytest.mark.parametrize("scheduler", [one.name for one in Scheduler] if EVERYTHING else ["STARVE"])
def test_training_has_the_bits_of_the_host(scheduler: str, tmp_path: Path) -> None:
    from tests.support.accelerator.nccl_rank import trained

    codes, found, printed = ranks_of("trained", tmp_path, scheduler)
    assert codes == [0, 0], printed
    for here, there in zip(found, fsdp.simulate(SIZE, lambda rank: trained(rank, "cpu")), strict=True):
        assert here.keys() == there.keys() and len(here) > 50
        assert [name for name, value in there.items() if not torch.equal(here[name], value)] == []


def test_a_step_makes_no_host_wait(tmp_path: Path) -> None:
    codes, found, printed = ranks_of("waits", tmp_path)
    assert (codes, found) == ([0, 0], [0, 0]), printed


@pytest.mark.parametrize(
    ("story", "reason"),
    [("a peer that raises", "rank 1 has abandoned the step, in unit"), ("a peer that is killed", "rank 1 has ended")],
)
def test_a_host_that_waits_for_a_peer_in_vain_gets_peer_failed(story: str, reason: str, tmp_path: Path) -> None:
    codes, (found, _), printed = ranks_of(story, tmp_path)
    assert codes == [0, 9 if "killed" in story else 0], printed
    assert found["kind"] == "PeerFailed" and found["error"].startswith(reason), found
    assert "What was in flight on the device of rank 0 has been aborted" in found["error"]
    assert "What was in flight on the device of rank 0 has been aborted" in found["again"], "a later step must not run"


def test_selftest_finds_that_the_others_raise_when_a_rank_fails(tmp_path: Path) -> None:
    codes, found, printed = ranks_of("selftest", tmp_path)
    assert codes == [0, 0], printed
    assert found[0].startswith("PeerFailed on the other ranks after") and found[1] == "raised on this rank"


def test_an_abort_frees_a_host_that_waits_and_later_launches_raise(tmp_path: Path) -> None:
    codes, (found, _), printed = ranks_of("an abort", tmp_path)
    assert codes == [0, 0], printed
    assert found["refused"] == "the communicator of pretend_nccl was aborted"
    assert not torch.tensor(found["values"]).isfinite().any(), "there is no result"


def test_ranks_that_launch_different_sizes_wait_until_a_watchdog_ends_them(tmp_path: Path) -> None:
    """As with NCCL. The engine compares what it launches before it does, so that its own calls do not come here."""
    codes, found, printed = ranks_of("a mismatch", tmp_path)
    assert codes == [ENDED_BY_WATCHDOG] * 2 and found == [None, None], printed
    assert all(f"rank {rank} has waited too long for collective 1" in printed for rank in range(SIZE))
