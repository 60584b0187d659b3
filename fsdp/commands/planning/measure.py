"""Measures the devices and links of a running job: `fsdp.measure_links`."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, log2
from typing import Any, Final, TypedDict

import torch
import torch.distributed as dist

from fsdp.commands.rehearsal.hardware import Device, Link
from fsdp.errors import ShardingError

REPEATS: Final = 5
SMALL: Final = 2**10
"""Bytes that each rank gives to a gather that takes its latency."""
LARGE: Final = 2**22
"""Bytes that each rank gives to a gather that takes its bandwidth."""
SIDE: Final = 1024
"""Rows and columns of the matrices that are multiplied."""


class Measured(TypedDict):
    """Arguments of `fsdp.plan`."""

    device: Device
    network: Link
    per_host: int


def measure_links(process_group: dist.ProcessGroup | None = None) -> Measured:
    """Measure the device of this rank and the links of a group, for `fsdp.plan(..., **fsdp.measure_links())`.

    Every rank must call it, with no other work on its device. It takes a few seconds, and multiplies matrices, copies memory and
    gathers tensors, among all ranks and among those of one host. The fastest of five repeats counts.

    Raises:
        ShardingError: there is no process group of at least two ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) < 2:
        raise ShardingError("measure_links: there is no process group of at least two ranks; start the job with torchrun.")
    on_device = torch.accelerator.is_available() and dist.get_backend(process_group) != "gloo"
    where = torch.accelerator.current_accelerator() if on_device else torch.device("cpu")
    assert where is not None
    size = dist.get_world_size(process_group)
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    network = _link(process_group, size, where)
    inside = network
    if 1 < per_host < size and size % per_host == 0:
        host, _ = dist.new_subgroups(per_host, process_group)  # type: ignore[no-untyped-call]
        inside = _link(host, per_host, where)
        # the ranks of a host have used their links together, see `Cluster.link_of`
        network = replace(network, bandwidth=network.bandwidth / per_host)
        dist.destroy_process_group(host)
    memory = torch.accelerator.get_memory_info()[1] if on_device else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = Device(
        "measured" if on_device else "cpu",
        memory,
        flops=_flops(torch.float32, where),
        half_flops=_flops(torch.bfloat16, where),
        bandwidth=_bandwidth(where),
        link=inside,
        source="measured by fsdp.measure_links",
    )
    return {"device": device, "network": network, "per_host": min(per_host, size)}


def _link(group: dist.ProcessGroup | None, size: int, where: torch.device) -> Link:
    """From a small and a large gather among these ranks: seconds = latency * log2(ranks) + received / bandwidth.

    Their difference says nothing if other work slowed the small one, so latency counts for half of the large one at most.
    """

    def seconds(count: int) -> float:
        gathered, own = (torch.zeros(ranks * count, dtype=torch.uint8, device=where) for ranks in (size, 1))
        gather = partial(dist.all_gather_into_tensor, gathered, own, group)
        # all ranks plan with the numbers of the slowest
        agreed = torch.tensor(_fastest(gather, where), dtype=torch.float64, device=where)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        return agreed.item()

    for count in (LARGE, 4 * LARGE):
        small, large = seconds(SMALL), seconds(count)
        if large > 2 * small:
            break
    bandwidth = (count - SMALL) * (size - 1) / max(large - small, large / 2)
    rounds = max(1, ceil(log2(size)))
    return Link(bandwidth, max(small - SMALL * (size - 1) / bandwidth, 1e-9) / rounds, "measured by fsdp.measure_links")


def _flops(dtype: torch.dtype, where: torch.device) -> float:
    one, other = (torch.zeros(SIDE, SIDE, dtype=dtype, device=where) for _ in range(2))
    return 2 * SIDE**3 / _fastest(lambda: one @ other, where)


def _bandwidth(where: torch.device) -> float:
    one, other = (torch.zeros(2**24, dtype=torch.uint8, device=where) for _ in range(2))
    return 2 * one.nbytes / _fastest(lambda: one.copy_(other), where)


def _fastest(work: Callable[[], Any], where: torch.device) -> float:
    """Seconds of the fastest repeat."""
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        if where.type != "cpu":
            torch.accelerator.synchronize(where)
        found.append(time.perf_counter() - began)
    return min(found)
