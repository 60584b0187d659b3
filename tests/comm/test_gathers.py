"""Which collectives of gloo a gather launches, on one host and between hosts."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.failure import ended_processes
from fsdp.comm.open_communicators import open_comms
from fsdp.config import MeshKind
from tests.support.processes import results_of

SIZES = (2**14 - 4, 2**14)
"""Elements of a chunk: just less than 64 KiB, and 64 KiB."""
NAMES = ("broadcast", "_allgather_base", "alltoall_base")


def counting(name: str, calls: Counter[str]) -> Callable[..., Any]:
    launch = getattr(dist.ProcessGroupGloo, name)

    def counted(*args: Any) -> Any:
        calls[name] += 1
        return launch(*args)

    return counted


def gathers(rank: int, size: int) -> dict[int, dict[str, int]]:
    """For each size of a chunk, the collectives of gloo that one gather launched."""
    comm, found = open_comms(None, None, MeshKind.SHARD).shard_comm, {}
    for chunk in SIZES:
        calls: Counter[str] = Counter()
        unsharded = torch.zeros(size, chunk)
        unsharded[rank] = 1.0 + rank
        with mock.patch.multiple(dist.ProcessGroupGloo, **{name: counting(name, calls) for name in NAMES}):
            comm.all_gather(unsharded.view(-1), "unit").wait()
        assert unsharded.eq(torch.arange(1.0, 1 + size).view(size, 1)).all()
        found[chunk] = dict(calls)
    return found


def gathers_on_hosts(rank: int, size: int, folder: Path) -> dict[int, dict[int, dict[str, int]]]:
    """First as if all ranks were on one host, then on two."""
    found = {}
    for hosts in (1, 2):
        process = f"host {rank * hosts // size}", os.getpid(), ""
        with mock.patch.object(ended_processes, "this_process", lambda: process):  # noqa: B023
            dist.destroy_process_group()
            dist.init_process_group("gloo", f"file://{folder}/store-{hosts}", rank=rank, world_size=size)
            found[hosts] = gathers(rank, size)
    return found


@pytest.mark.gloo
def test_large_chunks_are_broadcast_on_one_host_and_go_round_the_ring_between_hosts(tmp_path: Path) -> None:
    small, large = SIZES
    for found in results_of(gathers_on_hosts, 4, tmp_path):
        assert found[1] == {small: {"_allgather_base": 1}, large: {"broadcast": 4}}
        assert found[2] == {small: {"_allgather_base": 1}, large: {"_allgather_base": 1}}
