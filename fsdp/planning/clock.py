"""The time that a rehearsal takes: one sequence of computing, and one wire on which collectives follow each other.

A collective begins when it is launched and the wire is free. Computing goes on meanwhile, and stands still in a wait. This is
how streams order a step on a device, where the host is faster than the device.
"""

from collections import defaultdict
from math import ceil, log2

from fsdp.planning.hardware import Cluster, Device


class Clock:
    """Seconds of one rank."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.now = 0.0
        """When the computing so far ends."""
        self.computing = 0.0
        """Seconds of computing."""
        self.exposed: defaultdict[str, float] = defaultdict(float)
        """Seconds of waiting, by unit."""
        self._free = 0.0
        """When the wire is free."""

    @property
    def device(self) -> Device:
        """What this rank computes on."""
        return self._cluster.device

    def compute(self, seconds: float) -> None:
        """Compute for that long."""
        self.now += seconds
        self.computing += seconds

    def launch(self, ranks: tuple[int, ...], received: float) -> float:
        """Launch a collective among these ranks; return when it ends. `received`: bytes that reach this rank."""
        link = self._cluster.link_of(ranks)
        # ranks exchange in log2(W) rounds at least; torch's backends do for small messages
        seconds = link.latency * max(1, ceil(log2(len(ranks)))) + received / link.bandwidth
        self._free = max(self._free, self.now) + seconds
        return self._free

    def wait(self, end: float, label: str) -> None:
        """Stand still until then."""
        if end > self.now:
            self.exposed[label] += end - self.now
            self.now = end
