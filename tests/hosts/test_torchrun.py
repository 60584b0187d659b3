"""A host is lost, torchrun starts the job again, and training goes on from the newest checkpoint as if nothing had happened."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.resumes import STEPS
from tests.support.everything import EVERYTHING
from tests.support.hosts import Host, Hosts
from tests.support.processes import environment

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(not EVERYTHING, reason="FSDP_TESTS=all")]
SCRIPT = Path(__file__).with_name("resumes.py")


def torchrun(host: Host, folder: Path) -> "subprocess.Popen[bytes]":
    """Start torchrun on a host, with one rank there."""
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
    rendezvous = ["--rdzv-endpoint=h0:29500", f"--rdzv-conf={patience}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, str(SCRIPT), str(folder), "0.3"]
    return host.start(command, folder / f"{host.name}.txt", FSDP_HOST_SECONDS="3")


def losses_in(folder: Path) -> list[tuple[int, float, int]]:
    """Step, loss and number of ranks, in the order in which they were written."""
    path = folder / "losses.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss), int(size)) for step, loss, size in map(str.split, lines)]


def test_training_goes_on_after_a_host_is_lost(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """With one host fewer."""
    job, alone = tmp_path / "job", tmp_path / "alone"
    job.mkdir()
    alone.mkdir()
    hosts = make_hosts(2)
    agents = [torchrun(host, job) for host in hosts]

    def printed() -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(job.glob("h*.txt")))

    end = time.monotonic() + 90
    while len(losses_in(job)) < 6:
        assert time.monotonic() < end and agents[0].poll() is None, printed()
        time.sleep(0.05)
    hosts[1].lose_power()
    assert agents[0].wait(150) == 0, printed()
    assert "PeerFailed" in (job / "h0.txt").read_text()

    command = [sys.executable, str(SCRIPT), str(alone), "0"]
    subprocess.run(command, env=environment(), check=True, timeout=90)
    expected = {step: loss for step, loss, _ in losses_in(alone)}
    found = losses_in(job)
    sizes = [size for _, _, size in found]
    assert (sizes[0], sizes[-1]) == (2, 1)
    for step, loss, _ in found:
        assert loss == pytest.approx(expected[step], rel=1e-5), (step, found)
    restart = next(i for i in range(1, len(found)) if found[i][0] <= found[i - 1][0] or found[i][2] != found[i - 1][2])
    assert found[restart][0] in (4, 8), "the step after a checkpoint"
    assert [step for step, _, _ in found[restart:]] == list(range(found[restart][0], STEPS))
