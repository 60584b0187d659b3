"""The engine over a process group whose collectives are queued on devices, as NCCL's are: between processes, on pretend devices.

See docs/development/pretend-accelerator.md. No GPU takes part.
"""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from tests.support.accelerator.device import Scheduler
from tests.support.accelerator.pretend_nccl import ENDED_BY_WATCHDOG
from tests.support.everything import EVERYTHING
from tests.support.processes import beside_each_other, start_rank

pytestmark = pytest.mark.gloo  # it starts processes
SIZE = 2
SCHEDULERS = [one.name for one in Scheduler] if EVERYTHING else ["STARVE"]
STORIES = ["waits", "a peer that raises", "a peer that is killed", "selftest", "an abort", "a mismatch"]
Ended = dict[str, Future[tuple[list[int], list[Any], str]]]


@pytest.fixture(scope="module")
def ended(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """By story."""
    starts = {name: partial(ranks_of, name, tmp_path_factory.mktemp("story")) for name in STORIES}
    for name in SCHEDULERS:
        starts[f"trained, {name}"] = partial(ranks_of, "trained", tmp_path_factory.mktemp("trained"), name)
    return beside_each_other(starts)


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


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_training_has_the_bits_of_the_host(scheduler: str, ended: Ended) -> None:
    from tests.support.accelerator.nccl_rank import trained

    codes, found, printed = ended[f"trained, {scheduler}"].result()
    assert codes == [0, 0], printed
    for here, there in zip(found, fsdp.simulate(SIZE, lambda rank: trained(rank, "cpu")), strict=True):
        assert here.keys() == there.keys() and len(here) > 50
        assert [name for name, value in there.items() if not torch.equal(here[name], value)] == []


def test_a_step_makes_no_host_wait(ended: Ended) -> None:
    codes, found, printed = ended["waits"].result()
    assert (codes, found) == ([0, 0], [0, 0]), printed


@pytest.mark.parametrize(
    ("story", "reason"),
    [("a peer that raises", "rank 1 has abandoned the step, in unit"), ("a peer that is killed", "rank 1 has ended")],
)
def test_a_host_that_waits_for_a_peer_in_vain_gets_peer_failed(story: str, reason: str, ended: Ended) -> None:
    codes, (found, _), printed = ended[story].result()
    assert codes == [0, 9 if "killed" in story else 0], printed
    assert found["kind"] == "PeerFailed" and found["error"].startswith(reason), found
    assert "What was in flight on the device of rank 0 has been aborted" in found["error"]
    assert "What was in flight on the device of rank 0 has been aborted" in found["again"], "a later step must not run"


def test_selftest_finds_that_the_others_raise_when_a_rank_fails(ended: Ended) -> None:
    codes, found, printed = ended["selftest"].result()
    assert codes == [0, 0], printed
    assert found[0].startswith("PeerFailed on the other ranks after") and found[1] == "raised on this rank"


def test_an_abort_frees_a_host_that_waits_and_later_launches_raise(ended: Ended) -> None:
    codes, (found, _), printed = ended["an abort"].result()
    assert codes == [0, 0], printed
    assert found["refused"] == "the communicator of pretend_nccl was aborted"
    assert not torch.tensor(found["values"]).isfinite().any(), "there is no result"


def test_ranks_that_launch_different_sizes_wait_until_a_watchdog_ends_them(ended: Ended) -> None:
    """As with NCCL. The engine compares what it launches before it does, so that its own calls do not come here."""
    codes, found, printed = ended["a mismatch"].result()
    assert codes == [ENDED_BY_WATCHDOG] * 2 and found == [None, None], printed
    assert all(f"rank {rank} has waited too long for collective 1" in printed for rank in range(SIZE))
