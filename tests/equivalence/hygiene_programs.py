"""What is left behind by models that come and go, by loaders of data beside them, and by an end in the middle.

Run by end_programs.py.
"""

import faulthandler
import gc
import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import fsdp
from tests.support.models import Block, Net, X, loss_of

LIMIT: Final = 120
ROUNDS: Final = 50


class Broken(Exception):
    pass


def breaks(*_: Any) -> None:
    raise Broken


def round_of_training() -> None:
    """With each strategy: wrap, train, fail in a forward, fail in a backward, train, and let go."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        torch.manual_seed(3)  # replicas begin alike
        model = fsdp.fully_shard(Net(1), auto_wrap_policy={Block}, sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for broken in ("", "forward", "backward", ""):
            x = X.clone().requires_grad_()
            if broken == "backward":
                x.register_hook(breaks)  # at its end, with everything in flight
            failed = ""
            with model.blocks[0].up.register_forward_pre_hook(breaks) if broken == "forward" else nullcontext():
                try:
                    loss_of(model(x)).backward()
                except Broken:
                    failed = broken
            assert failed == broken
            if not failed:
                optimizer.step()
                optimizer.zero_grad()


def held() -> dict[str, int]:
    gc.collect()
    for one in threading.enumerate():
        if one.name == "fsdp disconnects":
            one.join()  # it closes the connections of the last failure
            while os.path.exists(f"/proc/self/task/{one.native_id}"):
                time.sleep(0.01)  # it is over, and still listed
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": sum(type(one).__name__ == "Listener" for one in gc.get_objects()),
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
        "resident": resident,
    }


def loaded(how: str) -> float:
    """Batches that come from another process."""
    data = TensorDataset(torch.arange(24.0).view(4, 6))
    model = fsdp.fully_shard(Net(1), auto_wrap_policy={Block})
    total = 0.0
    for (batch,) in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=how):
        loss_of(model(batch)).backward()
        total += float(batch.sum())
    return total


def ends_in_the_middle(rank: int) -> None:
    """Rank 0 ends with a gather in flight, which rank 1 has not joined, and rank 1 a while later."""
    model = fsdp.fully_shard(Net(2), auto_wrap_policy={Block})
    for _ in range(5):  # until nothing that is called is new
        loss_of(model(X)).backward()

    def end(*_: Any) -> None:
        time.sleep(1.0 * rank)
        sys.exit(0)

    # the second block is gathered ahead when the first is needed
    module = model.blocks[0] if rank else model.blocks[0].up
    module.register_forward_pre_hook(end, prepend=True)
    model(X)


def run_rank(rank: int, folder: Path) -> None:
    """Be one rank of two."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT))
    found: dict[str, Any] = {}
    for number in range(ROUNDS + 5):
        if number == 5:
            found["before"] = held()
        round_of_training()
    found["after"] = held()
    found["fork" if rank else "spawn"] = loaded("fork" if rank else "spawn")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    ends_in_the_middle(rank)
