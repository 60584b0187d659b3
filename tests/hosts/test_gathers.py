"""What a gather sends from host to host, counted by the kernel. As a script, this file is one of the ranks."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.open_communicators import open_comms
from fsdp.config import MeshKind
from tests.hosts.program import meet
from tests.support.everything import EVERYTHING
from tests.support.hosts import Hosts

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(not EVERYTHING, reason="FSDP_TESTS=all")]
RANKS = 2
"""Of a host."""
CHUNK = 2**18
"""Elements."""
GATHERS = 4


def sent_here() -> int:
    """Bytes that this host has sent to others."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def chunks_sent(rank: int, size: int) -> float:
    """How many chunks this host sends to others in a gather, with the headers of all protocols."""
    meet(rank, size)
    comm = open_comms(None, None, MeshKind.SHARD).shard_comm
    unsharded = torch.zeros(size, CHUNK)
    unsharded[rank] = 1.0 + rank
    comm.all_gather(unsharded.view(-1), "unit").wait()  # the first calls ask the other ranks
    dist.barrier()
    before = sent_here()
    for _ in range(GATHERS):
        comm.all_gather(unsharded.view(-1), "unit").wait()
    dist.barrier()
    chunks = (sent_here() - before) / (4 * CHUNK) / GATHERS
    assert unsharded.eq(torch.arange(1.0, 1 + size).view(size, 1)).all()
    dist.destroy_process_group()
    return chunks


def test_a_gather_sends_each_chunk_once_over_each_link(make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    """Broadcasts would send 5 chunks from each of two hosts."""
    hosts = make_hosts(2)
    size = RANKS * len(hosts)
    arguments = [("tests.hosts.test_gathers", rank, size, tmp_path) for rank in range(size)]
    ranks = [hosts[rank // RANKS].start_rank(*given, output=tmp_path / f"{rank}.txt") for rank, given in enumerate(arguments)]
    for rank, one in enumerate(ranks):
        assert one.wait(60) == 0, (tmp_path / f"{rank}.txt").read_text()
    for rank in range(size):
        chunks = json.loads((tmp_path / f"{rank}.json").read_text())
        assert size - 1 <= chunks < 1.1 * (size - 1)


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[3])
    (folder / f"{rank}.json").write_text(json.dumps(chunks_sent(rank, int(sys.argv[2]))))
