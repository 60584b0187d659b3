"""The processes of an example: those that torchrun started, or this one alone. The other examples import it."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and where it computes."""

    rank: int
    size: int
    device: torch.device
    description: str

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def mean(self, value: Tensor) -> float:
        """The mean over all ranks. Every rank calls it, and every rank gets the same."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return float(total.item()) / self.size


def join_world() -> World:
    """Join the processes that torchrun started, or be the only one. NCCL if there is a GPU for each, gloo if not."""
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", local_rank()), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=open_store(size), rank=rank, world_size=size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, device, f"{size} {'process' if size == 1 else 'processes'} ({device.type}, {backend})")


def open_store(size: int) -> dist.Store:
    """Where the ranks of this start find each other.

    After a restart torchrun's own store (2.13) still holds the addresses of those that died; so each start has names of its own.
    Without it each start has a store of its own, and a host that joined later has counted fewer starts.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=not shared and rank_before_joining() == 0)
    return dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store) if shared else store


def rank_before_joining() -> int:
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """The number of this process among those of its host."""
    return int(os.environ.get("LOCAL_RANK", 0))
