"""Hosts for tests: network namespaces of this machine, joined by a bridge.

A host has its own network, host name, process numbers and /etc/hosts. It shares files, processors and the clock with all others.
Its init process holds it: when that process ends, the kernel ends all processes of the host and removes its link. The bridge is
in a namespace of its own, so nothing is added to the network of this machine. Needs root, util-linux and iproute2 (Linux only).
"""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.processes import ROOT, Rank, environment, start_rank

SECONDS: Final = 10.0
"""The time-out of a command that sets something up."""
TOOLS: Final = ("unshare", "nsenter", "setpriv", "ip", "tc")
_HOLDS: Final = ("setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child=KILL", "--fork", "--net")


class Host:
    """One host. Its name is h0, h1, and so on; all hosts know each other's names."""

    def __init__(self, number: int, switch: int, names: Path) -> None:
        self.name = f"h{number}"
        self.address = address_of(number)
        self._port = f"p{number}"
        self._switch = switch
        self._holder, self.init = _hold("--pid", "--mount-proc", "--uts", "--mount")
        _in_network(switch, "ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.init))
        _in_network(switch, "ip", "link", "set", self._port, "master", "bridge", "up")
        self.call("hostname", self.name)
        self.call("mount", "--bind", str(names), "/etc/hosts")
        self.call("ip", "link", "set", "lo", "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "eth0", "up")

    def call(self, *command: str, seconds: float = SECONDS) -> str:
        """Run a command here, and return what it prints. Raises if it fails or takes longer than `seconds`."""
        return _call(*self._enter(command), seconds=seconds)

    def start(self, command: Sequence[str], output: Path, **variables: str) -> "subprocess.Popen[bytes]":
        """Start a command here. What it prints goes to the file `output`."""
        with open(output, "wb") as opened:
            return subprocess.Popen(
                self._enter(command), cwd=ROOT, env=environment(**variables), stdout=opened, stderr=subprocess.STDOUT
            )

    def start_rank(self, module: str, *arguments: object, output: Path, **variables: str) -> Rank:
        """As `tests.support.processes.start_rank`, here."""
        return start_rank("tests.support.in_host", self.init, module, *arguments, output=output, **variables)

    def shape(self, megabits: float, inside: float | None = None) -> None:
        """Limit what this host sends, in Mbit/s; `inside`: also what its own processes send each other."""
        for device, rate in (("eth0", megabits), ("lo", inside)):
            if rate is not None:
                limit = f"rate {rate:g}mbit burst 128kb latency 400ms".split()
                self.call("tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)
                # a packet must fit into the bucket of tbf
                self.call("ip", "link", "set", "dev", device, "gso_max_size", "65536")

    def delay(self, milliseconds: float) -> None:
        """Delay all that this host sends to others. Raises if the kernel has no netem."""
        self.call("tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{milliseconds:g}ms")

    def cut(self) -> None:
        """Set the link down at the bridge: packets are lost, and neither side is told."""
        _in_network(self._switch, "ip", "link", "set", self._port, "nomaster")

    def lose_power(self) -> None:
        """End all processes at once; no packet says so."""
        self.cut()
        self.delete()

    def delete(self) -> None:
        """End all processes, and remove the network. Idempotent."""
        self._holder.kill()  # takes its child, which takes the others of its process numbers
        self._holder.wait(SECONDS)

    def _enter(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.init), "-n", "-p", "-m", "-u", f"--wd={ROOT}", *command]


class Hosts(list[Host]):
    """Hosts h0, h1, ... on one bridge. Use `hosts_apart`, which removes them."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__()
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address_of(one)} h{one}\n" for one in range(count)))
        self._holder, switch = _hold()
        try:
            _in_network(switch, "ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            _in_network(switch, "ip", "link", "set", "bridge", "up")
            for number in range(count):
                self.append(Host(number, switch, names))
        except BaseException:
            self.delete()
            raise

    def delete(self) -> None:
        """Remove all hosts and the bridge."""
        for host in self:
            host.delete()
        self._holder.kill()
        self._holder.wait(SECONDS)


@contextmanager
def hosts_apart(count: int, folder: Path) -> Iterator[Hosts]:
    """Make hosts, and remove them at the end with all that runs there. `folder` receives their /etc/hosts."""
    hosts = Hosts(count, folder)
    try:
        yield hosts
    finally:
        hosts.delete()


@cache
def why_no_hosts() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        _call("unshare", "--net", "--pid", "--fork", "--mount-proc", "--uts", "ip", "link", "add", "bridge", "type", "bridge")
        _call("unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two")
    except (AssertionError, subprocess.TimeoutExpired) as reason:
        return f"namespaces, bridges and veth links cannot be made: {reason}"
    return None


@cache
def why_no_delay() -> str | None:
    """Why links cannot be delayed; None if they can."""
    try:
        _call("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except (AssertionError, subprocess.TimeoutExpired) as reason:
        return f"the kernel has no netem: {reason}"
    return None


def address_of(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _hold(*namespaces: str) -> tuple["subprocess.Popen[bytes]", int]:
    """A process that holds new namespaces, and the number of its child, which is in them."""
    holder = subprocess.Popen([*_HOLDS, *namespaces, "sleep", "infinity"], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and holder.poll() is None:
        child = children.read_text().split()
        # it has its namespaces, and its /proc, when it has become `sleep`
        if child and Path(f"/proc/{child[0]}/comm").read_text().strip() == "sleep":
            return holder, int(child[0])
        time.sleep(0.005)
    holder.kill()
    holder.wait(SECONDS)
    raise AssertionError("namespaces were not made in time")


def _in_network(init: int, *command: str) -> str:
    return _call("nsenter", "-t", str(init), "-n", *command)


def _call(*command: str, seconds: float = SECONDS) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout
