"""What devices and links can do: the numbers that estimated times are made of, each with its source.

The numbers are those of data sheets, which no program reaches. `EFFICIENCY` is the part of them that estimates assume.
`fsdp.measure_links` replaces them by measured ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Final, TypeVar

import torch

from fsdp.errors import ShardingError

T = TypeVar("T")
EFFICIENCY: Final = 0.5
"""The part of a device's peak that the matrix products of large models are assumed to reach. Measured on no device here."""
LINK_EFFICIENCY: Final = 0.8
"""The part of a link's bandwidth that large collectives are assumed to reach. Measured on no device here."""
MEMORY_EFFICIENCY: Final = 0.8
"""The part of the bandwidth of a device's memory that operators are assumed to reach. Measured on no device here."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a rank can receive over one kind of link."""

    bandwidth: float
    """Bytes a second, in one direction, for each rank. Between hosts: of one rank's own link."""
    latency: float
    """Seconds from the launch of a small collective to its end."""
    source: str = "given"


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on."""

    name: str
    memory: int
    """Bytes."""
    flops: float
    """Floating-point operations a second of large matrix products in float32, or in TF32 where the device has it."""
    half_flops: float
    """The same in bfloat16."""
    bandwidth: float
    """Bytes a second to and from the device's memory."""
    link: Link
    """Between ranks of one host."""
    source: str = "given"
    host_link: Link = Link(0.8 * 32e9, 10e-6, "assumed: PCIe 4.0, 16 lanes")
    """Between the device and the memory of its host, in one direction, for each rank."""
    host_bandwidth: float = 0.8 * 25e9
    """Bytes a second to and from the memory of the host, for each rank: what an optimizer there needs. Assumed, not measured."""

    def flops_of(self, dtype: torch.dtype) -> float:
        """Operations a second in this dtype."""
        return self.half_flops if dtype.itemsize <= 2 else self.flops


def _link(gigabytes: float, latency: float, source: str) -> Link:
    """From the number of a data sheet: gigabytes a second."""
    return Link(LINK_EFFICIENCY * gigabytes * 1e9, latency, f"{source} (reached: {LINK_EFFICIENCY:.0%})")


def _device(
    name: str, memory: int, flops: float, half_flops: float, bandwidth: float, link: tuple[float, str], source: str
) -> Device:
    """From the numbers of a data sheet: gibibytes, teraflops, gigabytes a second."""
    between = _link(link[0], 10e-6, link[1])
    source += f" (matrix products: {EFFICIENCY:.0%} of it; memory: {MEMORY_EFFICIENCY:.0%})"
    return Device(
        name,
        memory << 30,
        EFFICIENCY * flops * 1e12,
        EFFICIENCY * half_flops * 1e12,
        MEMORY_EFFICIENCY * bandwidth * 1e9,
        between,
        source,
    )


_NVIDIA: Final = "https://www.nvidia.com/en-us/data-center/"
_AMD: Final = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
DEVICES: Final = {
    device.name: device
    for device in (
        _device("a100-40", 40, 156, 312, 1555, (300, "NVLink 3: 600 GB/s, both directions together"), _NVIDIA + "a100/"),
        _device("a100-80", 80, 156, 312, 2039, (300, "NVLink 3: 600 GB/s, both directions together"), _NVIDIA + "a100/"),
        _device("h100", 80, 494, 989, 3350, (450, "NVLink 4: 900 GB/s, both directions together"), _NVIDIA + "h100/"),
        _device("h200", 141, 494, 989, 4800, (450, "NVLink 4: 900 GB/s, both directions together"), _NVIDIA + "h200/"),
        _device("b200", 180, 1100, 2250, 8000, (900, "NVLink 5: 1,800 GB/s, both directions together"), _NVIDIA + "dgx-b200/"),
        _device("l40s", 48, 183, 362, 864, (32, "PCIe 4.0, 16 lanes: 32 GB/s"), _NVIDIA + "l40s/"),
        _device("l4", 24, 60, 121, 300, (32, "PCIe 4.0, 16 lanes: 32 GB/s"), _NVIDIA + "l4/"),
        _device("mi300x", 192, 653, 1307, 5300, (448, "Infinity Fabric: 7 links of 64 GB/s"), _AMD),
        _device("cpu", 16, 0.1, 0.1, 20, (5, "assumed: shared memory of one host"), "assumed: one core; measure it instead"),
    )
}
NETWORKS: Final = {
    "ib-ndr": _link(50, 20e-6, "InfiniBand NDR: 400 Gbit/s for each rank"),
    "ib-hdr": _link(25, 20e-6, "InfiniBand HDR: 200 Gbit/s for each rank"),
    "ethernet-100": _link(12.5, 40e-6, "Ethernet: 100 Gbit/s for each rank"),
    "ethernet-10": _link(1.25, 60e-6, "Ethernet: 10 Gbit/s for each rank"),
}
"""Links between hosts."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices and links of a job."""

    device: Device
    between: Link
    """Between hosts."""
    per_host: int
    """Ranks on one host. Ranks of a host have consecutive numbers."""

    def is_inside(self, ranks: tuple[int, ...]) -> bool:
        """Whether all these ranks, in ascending order, are on one host."""
        return ranks[0] // self.per_host == ranks[-1] // self.per_host

    def latency_of(self, ranks: tuple[int, ...]) -> float:
        """Seconds of a small collective among these ranks: they exchange in log2(W) rounds at least, as torch's backends do."""
        return self.link_of(ranks).latency * max(1, ceil(log2(len(ranks))))

    def link_of(self, ranks: tuple[int, ...]) -> Link:
        """What these ranks, in ascending order, exchange by.

        A byte comes to each host once, over the links of all its ranks in the collective together, and goes on inside the host:
        rings of NCCL that pass through every rank do so.
        """
        if self.is_inside(ranks):
            return self.device.link
        together = sum([rank // self.per_host == ranks[0] // self.per_host for rank in ranks])
        return replace(self.between, bandwidth=min(together * self.between.bandwidth, self.device.link.bandwidth))


def find(kind: str, table: Mapping[str, T], given: str | T, cls: str) -> T:
    """What is given, or what a table of this kind has under its name.

    Raises:
        ShardingError: there is none of that name.
    """
    if not isinstance(given, str):
        return given
    if given not in table:
        raise ShardingError(f"plan: there is no {kind} {given!r} in the table; give one of {', '.join(table)}, or a {cls}.")
    return table[given]
