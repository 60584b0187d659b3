"""What other parts of torch do to a sharded model: programs for real processes. Each returns what was said, and the weights."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

import fsdp
from tests.api.test_shard_grads import batch, shard
from tests.shards.optimizer_table import rows
from tests.shards.programs import PROGRAMS, Found
from tests.shards.test_optimizers import outcome
from tests.support.models import local, loss_of

ENGINES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "replicate": replicate,
    "FSDP1": Fsdp1,
    "FSDP2": lambda model: fsdp2(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),))),
}


OPTIMIZERS: Final = (
    *("torch.optim.Muon()", "torch.optim.Adafactor()", "torch.optim.LBFGS()", "torch.optim.Adafactor() of vectors alone"),
    *("LARS, written with p.norm()", "LAMB, written with p.norm()", "torch.optim.Adagrad()"),
)


def said_by(function: Callable[[], object]) -> str:
    """The class and the text of the error that `function` raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def other_engines(rank: int) -> dict[str, tuple[str, bool]]:
    """What each engine is told, and whether the weights are the same and the model still trains."""
    found = {}
    for name, engine in ENGINES.items():
        model = shard()
        before = [local(p).clone() for p in model.parameters()]
        said = said_by(lambda engine=engine, model=model: engine(model))  # type: ignore[misc]
        same = all(torch.equal(local(p), was) for p, was in zip(model.parameters(), before, strict=True))
        loss_of(model(batch(rank))).backward()
        found[name] = said, same
    return found


def around_a_container(rank: int) -> tuple[str, bool]:
    """What DistributedDataParallel is told around a module that contains a unit, and whether the weights are the same."""
    outer = nn.Sequential(fsdp.fully_shard(nn.Linear(6, 6, bias=False)), nn.Linear(6, 1))
    before = [local(p).clone() for p in outer.parameters()]
    said = said_by(lambda: DistributedDataParallel(outer))
    return said, all(torch.equal(local(p), was) for p, was in zip(outer.parameters(), before, strict=True))


def scripts(rank: int) -> dict[str, Found]:
    """What each script of a user prints, and the weights at its end."""
    return {name: program(range(rank, rank + 1), True) for name, program in PROGRAMS.items()}


def optimizers(rank: int) -> dict[str, Any]:
    """Of each optimizer that needs more than single elements, the weights after some steps, or the text of its error."""
    table = rows()
    return {name: outcome(table[name], rank) for name in OPTIMIZERS}


BORDER: Final[dict[str, Callable[[int], Any]]] = {
    "other engines": other_engines,
    "around a container": around_a_container,
    "optimizers": optimizers,
    "scripts": scripts,
}
