"""What other parts of torch do to a sharded model: programs for real processes. Each returns what was said, and the weights."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

import fsdp
from tests.api.test_shard_grads import batch, full_values, shard
from tests.shards.optimizer_table import rows
from tests.shards.programs import PROGRAMS, Found
from tests.shards.test_border import REFUSED
from tests.shards.test_optimizers import outcome
from tests.support.models import Block, local, loss_of, make_net

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


def bad_parameter(rank: int) -> tuple[str, dict[str, Tensor]]:
    """What is said when rank 1 alone has a sparse parameter; then the model is mended and trained."""
    net = make_net()
    weight = net.enter.weight
    if rank == 1:
        net.enter.weight = nn.Parameter(weight.detach().to_sparse())
    said = said_by(lambda: fsdp.fully_shard(net, auto_wrap_policy={Block}))
    net.enter.weight = weight
    model = fsdp.fully_shard(net, auto_wrap_policy={Block})
    loss_of(model(batch(rank))).backward()
    return said, full_values(model, {name: p.grad for name, p in model.named_parameters()})


def gradients_of_shards(rank: int) -> dict[str, dict[str, Tensor]]:
    """The gradients in full, by `torch.autograd.grad` and by `backward(inputs=...)`."""
    model = shard()
    parameters = dict(model.named_parameters())
    by_grad = torch.autograd.grad(loss_of(model(batch(rank))), list(parameters.values()))
    model.zero_grad()
    loss_of(model(batch(rank))).backward(inputs=list(parameters.values()))
    by_inputs: dict[str, Tensor | None] = {name: p.grad for name, p in parameters.items()}
    return {"grad": full_values(model, dict(zip(parameters, by_grad, strict=True))), "inputs": full_values(model, by_inputs)}


def one_rank_steps(rank: int) -> list[str]:
    """What is said when rank 0 takes a step that the others skip, and in the backward after that."""
    model = shard()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(batch(rank))).backward()
    if rank == 0:
        optimizer.step()
    return [said_by(lambda: loss_of(model(batch(rank))).backward()) for _ in range(2)]


def added(rank: int) -> list[str]:
    """What is said when rank 1 alone adds a module; then it takes it away, and all go on."""
    model = shard()
    loss_of(model(batch(rank))).backward()
    if rank == 1:
        model.more = nn.Linear(2, 2)
    said = said_by(lambda: model(batch(rank)))
    if rank == 1:
        del model.more
    return [said, said_by(lambda: loss_of(model(batch(rank))).backward())]


def scripts(rank: int) -> dict[str, Found]:
    """What each script of a user prints, and the weights at its end."""
    return {name: program(range(rank, rank + 1), True) for name, program in PROGRAMS.items()}


def optimizers(rank: int) -> dict[str, Any]:
    """Of each optimizer that needs more than single elements, the weights after some steps, or the text of its error."""
    table = rows()
    return {name: outcome(table[name], rank) for name in OPTIMIZERS}


def needs_the_full_tensor(rank: int) -> dict[str, str]:
    """What is said to functions that cannot compute on parts."""
    weight = fsdp.fully_shard(nn.Linear(8, 12, bias=False)).weight
    return {name: said_by(lambda function=function: function(weight)) for name, (function, _) in REFUSED.items()}  # type: ignore[misc]


BORDER: Final[dict[str, Callable[[int], Any]]] = {
    "other engines": other_engines,
    "around a container": around_a_container,
    "bad parameter": bad_parameter,
    "gradients of shards": gradients_of_shards,
    "one rank steps": one_rank_steps,
    "added": added,
    "optimizers": optimizers,
    "needs the full tensor": needs_the_full_tensor,
    "scripts": scripts,
}
