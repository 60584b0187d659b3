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


def torchrun(host: Host, folder: Path, hosts: str) -> "subprocess.Popen[bytes]":
    """Start torchrun on a host, with one rank there. `hosts`: how many may be part of the job.

    The last variable is needed where a host joins later: torch 2.13's torchrun publishes the address of its store only once, and
    the new host would wait for it.
    """
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = [f"--nnodes={hosts}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
    rendezvous = ["--rdzv-endpoint=h0:29500", f"--rdzv-conf={patience}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, str(SCRIPT), str(folder), "0.3"]
    variables = {"FSDP_HOST_SECONDS": "3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return host.start(command, folder / f"{host.name}.txt", **variables)


def losses_in(folder: Path) -> list[tuple[int, float, int]]:
    """Step, loss and number of ranks, in the order in which they were written."""
    path = folder / "losses.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss), int(size)) for step, loss, size in map(str.split, lines)]


def printed(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("h*.txt")))


def lose_one(hosts: Hosts, folder: Path, how_many: str) -> "subprocess.Popen[bytes]":
    """Train on the first two hosts, and let the second one lose its power after some steps. Returns torchrun of the first."""
    agents = [torchrun(host, folder, how_many) for host in hosts[:2]]
    end = time.monotonic() + 90
    while len(losses_in(folder)) < 6:
        assert time.monotonic() < end and agents[0].poll() is None, printed(folder)
        time.sleep(0.05)
    hosts[1].lose_power()
    return agents[0]


def assert_resumed(found: list[tuple[int, float, int]]) -> None:
    """Training began again at a checkpoint, and went on to the end."""
    restart = next(i for i in range(1, len(found)) if found[i][0] <= found[i - 1][0] or found[i][2] != found[i - 1][2])
    assert found[restart][0] in (4, 8), "the step after a checkpoint"
    assert [step for step, _, _ in found[restart:]] == list(range(found[restart][0], STEPS))


def test_training_goes_on_with_one_host_fewer(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    job, alone = tmp_path / "job", tmp_path / "alone"
    job.mkdir()
    alone.mkdir()
    agent = lose_one(make_hosts(2), job, "1:2")
    assert agent.wait(150) == 0, printed(job)
    assert "PeerFailed" in (job / "h0.txt").read_text()

    command = [sys.executable, str(SCRIPT), str(alone), "0"]
    subprocess.run(command, env=environment(), check=True, timeout=90)
    expected = {step: loss for step, loss, _ in losses_in(alone)}
    found = losses_in(job)
    sizes = [size for _, _, size in found]
    assert (sizes[0], sizes[-1]) == (2, 1)
    for step, loss, _ in found:
        assert loss == pytest.approx(expected[step], rel=1e-5), (step, found)
    assert_resumed(found)


def test_training_goes_on_with_another_host_in_its_place(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    job, uninterrupted = tmp_path / "job", tmp_path / "uninterrupted"
    job.mkdir()
    uninterrupted.mkdir()
    hosts = make_hosts(3)
    agent = lose_one(hosts, job, "2")
    end = time.monotonic() + 60
    while "PeerFailed" not in (job / "h0.txt").read_text():
        assert time.monotonic() < end and agent.poll() is None, printed(job)
        time.sleep(0.05)
    replacement = torchrun(hosts[2], job, "2")
    assert agent.wait(150) == 0, printed(job)
    assert replacement.wait(30) == 0, printed(job)

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(SCRIPT), str(uninterrupted), "0"], env=environment(), check=True, timeout=120)
    expected = {step: loss for step, loss, _ in losses_in(uninterrupted)}
    found = losses_in(job)
    for step, loss, size in found:
        assert (loss, size) == (expected[step], 2), (step, found)
    assert_resumed(found)
