"""One rank over gloo: `python -m tests.runtime.forks RANK SIZE FOLDER` uses a model in forks, like a DataLoader's workers.

Ranks are processes here. A fork of the tests' own process, whose threads simulate ranks, would hold what other tests left.
"""

import faulthandler
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp.compat.ddp import DistributedDataParallel

LIMIT: Final = 90
STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRADIENTS", "NO_SHARD")
USES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "a forward": lambda model: model(torch.ones(1, 4)),
    "a forward of one unit": lambda model: model[1](torch.ones(1, 5)),  # type: ignore[index]
    "an evaluation": lambda model: torch.no_grad()(model)(torch.ones(1, 4)),
    "a full state dict": lambda model: fsdp.full_state_dict(model),
    "a full tensor": lambda model: fsdp.full_tensor(model[0].weight),  # type: ignore[index, arg-type]
}
WITHOUT_A_UNIT: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "a norm of a shard": lambda model: model[0].weight.norm(),  # type: ignore[index, operator, union-attr]
    "another model": lambda model: fsdp.fully_shard(nn.Linear(4, 5)),
}
"""No unit looks first whether it is in its own process."""


def main(rank: int, size: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    said = [of_strategy(strategy) for strategy in STRATEGIES]
    said[0][1].append(of_ddp())
    held, used = [one for one, _ in said], [words for _, several in said for words in several]
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)))
    torch.save((held, used, [in_fork(use, model) for use in WITHOUT_A_UNIT.values()]), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def of_strategy(strategy: str) -> tuple[str, list[str]]:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    model = fsdp.fully_shard(net, auto_wrap_policy={nn.Linear}, sharding_strategy=strategy)
    model(torch.ones(2, 4)).sum().backward()
    held = in_fork(lambda model: (list(model.parameters()), model.state_dict(), model.train(), str(model)), model)
    used = [in_fork(use, model) for use in USES.values()]
    model(torch.ones(2, 4)).sum().backward()
    return held, used


def of_ddp() -> str:
    """By DDP's names the first evaluation after a training step gives the buffers of rank 0 to all."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    model(torch.ones(2, 4)).sum().backward()
    return in_fork(USES["an evaluation"], model)


def in_fork(act: Callable[[nn.Module], Any], model: nn.Module) -> str:
    """What `act` raises when it is given the model in a process that is forked here; "nothing" if it raises nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        gc.disable()  # a process group that is garbage waits in its destructor for threads that a fork has not
        try:
            act(model)
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode() or f"the fork ended with status {status}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
