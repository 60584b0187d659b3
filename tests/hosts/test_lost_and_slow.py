"""Hosts that are lost, slow, or listen: ranks on hosts of their own, over a bridge."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp.commands.main import main as fsdp_command
from tests.hosts.program import PORT
from tests.support.everything import EVERYTHING
from tests.support.hosts import Hosts, why_no_delay
from tests.support.processes import Rank

pytestmark = pytest.mark.gloo
MakeHosts = Callable[[int], Hosts]
RANKS = 3
HOST_SECONDS = 3.0
LIMIT = 60.0
"""Seconds within which the others must name a lost rank: gloo alone would end their waits after 30 minutes."""


def start(hosts: Hosts, folder: Path, seconds: float) -> list[Rank]:
    """A rank on each host."""
    return [
        host.start_rank(
            *("tests.hosts.program", rank, len(hosts), folder, seconds),
            output=folder / f"{rank}.txt",
            FSDP_HOST_SECONDS=f"{HOST_SECONDS}",
        )
        for rank, host in enumerate(hosts)
    ]


def await_files(ranks: list[Rank], folder: Path, names: list[str], seconds: float, may_end: bool = False) -> None:
    """Wait until these files are there. Fails with what the ranks have printed."""
    end = time.monotonic() + seconds
    while not all((folder / name).exists() for name in names):
        ended = not may_end and any(rank.poll() is not None for rank in ranks)
        if ended or time.monotonic() > end:
            printed = [path.read_text() for path in sorted(folder.glob("*.txt"))]
            pytest.fail(f"{names} were not written:\n" + "\n".join(printed))
        time.sleep(0.05)


def listening(table: str) -> list[tuple[str, int]]:
    """The address and the port of each listening TCP socket, of /proc/net/tcp (as hexadecimal words of the host) or tcp6."""
    found = []
    for line in table.splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = local.split(":")
            found.append((".".join(str(byte) for byte in reversed(bytes.fromhex(address[-8:]))), int(port, 16)))
    return found


def slowest_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of the report that names the slowest rank."""
    capsys.readouterr()
    status = fsdp_command(["trace", "report", *(str(folder / f"trace-{rank}.json") for rank in range(RANKS))])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return next(line for line in printed.out.splitlines() if line.startswith("Slowest rank"))


def waits_of(folder: Path) -> list[float]:
    return [json.loads((folder / f"{rank}.stats").read_text()) for rank in range(RANKS)]


def lose(hosts: Hosts, folder: Path, ranks: list[Rank], how: str) -> None:
    """Lose the last host; the others must name its rank."""
    lost = hosts[-1]
    {"link": lost.cut, "power": lost.lose_power, "processes": lost.delete}[how]()
    await_files(ranks, folder, [f"{rank}.json" for rank in range(RANKS - 1)], LIMIT, may_end=True)
    for rank in range(RANKS - 1):
        ended = json.loads((folder / f"{rank}.json").read_text())
        assert (ended["error"], ended["rank"]) == ("PeerFailed", RANKS - 1), ended


def test_who_listens_who_is_slow_and_who_is_lost(
    make_hosts: MakeHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job, because each rank takes seconds to start."""
    hosts = make_hosts(RANKS)
    ranks = start(hosts, tmp_path, 0.05)
    await_files(ranks, tmp_path, [f"{rank}.stats" for rank in range(RANKS)], 60)

    # the store of the job, which torch opens on all addresses, and gloo's, on the address of the host; nothing else
    for number, host in enumerate(hosts):
        tables = [host.call("cat", f"/proc/net/{name}") for name in ("tcp", "tcp6")]
        sockets = [one for table in tables for one in listening(table)]
        by_address = {address: [port for other, port in sockets if other == address] for address, _ in sockets}
        expected = {host.address} if number else {host.address, "0.0.0.0"}
        assert set(by_address) == expected, by_address
        assert by_address.get("0.0.0.0", [PORT]) == [PORT]
        assert len(by_address[host.address]) == 3, "the group's, and one for each of the two communicators"
        assert len(host.call("cat", "/proc/net/udp").splitlines()) == 1, "a UDP port"

    # the last rank sleeps 50 ms before each step
    assert slowest_of(tmp_path, capsys).startswith(f"Slowest rank: {RANKS - 1}, by ")
    waits = waits_of(tmp_path)
    assert min(range(RANKS), key=waits.__getitem__) == RANKS - 1, waits

    lose(hosts, tmp_path, ranks, "link")


@pytest.mark.skipif(not EVERYTHING, reason="FSDP_TESTS=all")
@pytest.mark.parametrize("how", ["power", "processes"])
def test_a_lost_host_is_named(make_hosts: MakeHosts, tmp_path: Path, how: str) -> None:
    hosts = make_hosts(RANKS)
    ranks = start(hosts, tmp_path, 0.0)
    await_files(ranks, tmp_path, [f"{rank}.stats" for rank in range(RANKS)], 60)
    lose(hosts, tmp_path, ranks, how)


@pytest.mark.skipif(not EVERYTHING, reason="FSDP_TESTS=all")
def test_a_rank_that_is_stopped_in_bursts_is_the_slowest_and_not_lost(
    make_hosts: MakeHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = make_hosts(RANKS)
    ranks = start(hosts, tmp_path, 0.05)
    last = tmp_path / f"{RANKS - 1}.process"
    await_files(ranks, tmp_path, [last.name], 60)
    bursts = "for i in $(seq 40); do kill -STOP $0 || exit 0; sleep 0.2; kill -CONT $0; sleep 0.02; done"
    hosts[-1].call("sh", "-c", bursts, last.read_text(), seconds=60)
    await_files(ranks, tmp_path, [f"{rank}.stats" for rank in range(RANKS)], 60)
    assert slowest_of(tmp_path, capsys).startswith(f"Slowest rank: {RANKS - 1}, by ")
    # longer than FSDP_HOST_SECONDS: its kernel answers for it
    hosts[-1].call("sh", "-c", f"kill -STOP $0; sleep {2 * HOST_SECONDS + 4}; kill -CONT $0", last.read_text(), seconds=60)
    assert all(rank.poll() is None for rank in ranks)
    (tmp_path / "stop").touch()


def test_links_are_shaped(make_hosts: MakeHosts) -> None:
    first, _ = make_hosts(2)
    first.shape(20, inside=200)
    shown = first.call("tc", "qdisc")
    assert "rate 20Mbit" in shown and "rate 200Mbit" in shown
    if why_no_delay():
        with pytest.raises(AssertionError, match="qdisc"):
            first.delay(1)
    else:
        first.delay(1)
        assert "delay 1ms" in first.call("tc", "qdisc")
