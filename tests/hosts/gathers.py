"""A rank that gathers large chunks: python -m tests.hosts.gathers RANK SIZE FOLDER

`FOLDER / "RANK.json"`: how many chunks its host has sent to others in a gather, with the headers of all protocols.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp.comm.open_communicators import open_comms
from fsdp.config import MeshKind
from tests.hosts.program import PORT

CHUNK = 2**18
"""Elements."""
GATHERS = 4


def sent_here() -> int:
    """Bytes that this host has sent to others."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("h0", PORT, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
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
    (folder / f"{rank}.json").write_text(json.dumps(chunks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
