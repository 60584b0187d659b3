"""The time that a rehearsal takes: one sequence of computing, and two wires on which collectives follow each other.

One wire connects the ranks of a host, the other one connects hosts. A collective begins when it is launched and its wire is
free. Computing goes on meanwhile, and stands still in a wait. This is how streams order a step on a device, where the host is
faster than the device. With an offload policy there is one more sequence of copies in each direction: a gather begins when its
shard was copied, and a pass ends when all of its copies have.
"""

from collections import defaultdict
from typing import Final

from fsdp.commands.rehearsal.hardware import Cluster, Device

COPIES: Final = "copies from and to the host"


class Clock:
    """Seconds of one rank."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.now = 0.0
        """When the computing so far ends."""
        self.computing = 0.0
        """Seconds of computing."""
        self.latency = 0.0
        """Seconds that all collectives would take if they sent nothing."""
        self.exposed: defaultdict[str, float] = defaultdict(float)
        """Seconds of waiting, by unit."""
        self._free: defaultdict[bool, float] = defaultdict(float)
        """When the wire inside the host (True) and the one between hosts (False) are free."""
        self.uploaded = self._downloaded = 0.0
        """When the last copies from and to the memory of the host end. A gather begins after those from it."""

    @property
    def device(self) -> Device:
        """What this rank computes on."""
        return self._cluster.device

    def compute(self, seconds: float) -> None:
        """Compute for that long."""
        self.now += seconds
        self.computing += seconds

    def compute_on_host(self, count: int) -> None:
        """Read and write so many bytes of the memory of the host."""
        self.compute(count / self.device.host_bandwidth)

    def upload(self, count: int) -> None:
        """Copy so many bytes from the host. Later gathers need them."""
        self.uploaded = max(self.uploaded, self.now) + self._copying(count)

    def download(self, after: float, count: int) -> None:
        """Copy so many bytes to the host, when a reduction has ended."""
        self._downloaded = max(self._downloaded, after) + self._copying(count)

    def wait_for_copies(self) -> None:
        """Stand still until all copies from and to the host have ended."""
        self.wait(max(self.uploaded, self._downloaded), COPIES)

    def _copying(self, count: int) -> float:
        return self.device.host_link.latency + count / self.device.host_link.bandwidth

    def launch(self, ranks: tuple[int, ...], received: float, after: float = 0.0) -> float:
        """Launch a collective among these ranks, in ascending order; return when it ends.

        `received`: bytes that reach this rank. It begins after the moment `after`.
        """
        latency, inside = self._cluster.latency_of(ranks), self._cluster.is_inside(ranks)
        self.latency += latency
        seconds = latency + received / self._cluster.link_of(ranks).bandwidth
        self._free[inside] = max(self._free[inside], self.now, after) + seconds
        return self._free[inside]

    def wait(self, end: float, label: str) -> None:
        """Stand still until then."""
        if end > self.now:
            self.exposed[label] += end - self.now
            self.now = end
