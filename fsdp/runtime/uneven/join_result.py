"""What ranks get from each other at the end of a join without a step: weights, gradients, buffers, state of optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp.autograd.dynamo import uncompiled
from fsdp.comm.communicator import Communicator
from fsdp.comm.exchanges import copy_from
from fsdp.errors import ShardingError, name_ranks
from fsdp.shards.optimizer_state import living_optimizers

_LABEL: Final = "the result of join"


@contextmanager
def stepped_optimizers(model: nn.Module) -> Iterator[Callable[[], list[Optimizer]]]:
    """Yield a function that returns the optimizers that step parameters of `model` inside, in the order of their first steps.

    If none has stepped, because there was no batch, it returns those that there are.
    """
    params = {id(parameter) for parameter in model.parameters()}
    stepped: list[Optimizer] = []

    def has_params(optimizer: Optimizer) -> bool:
        return any(id(parameter) in params for group in optimizer.param_groups for parameter in group["params"])

    def on_step(optimizer: Optimizer, *_: Any) -> None:
        if has_params(optimizer) and not any(one is optimizer for one in stepped):
            stepped.append(optimizer)

    handle = register_optimizer_step_post_hook(uncompiled(on_step))
    try:
        yield lambda: stepped or [one for one in living_optimizers() if has_params(one)]
    finally:
        handle.remove()


def take_over(source: int, model: nn.Module, optimizers: list[Optimizer], comm: Communicator) -> None:
    """Make weights, gradients, buffers and the state of `optimizers` those of rank `source`. Every rank holds full parameters.

    Traffic: a broadcast for each tensor.

    Raises:
        ShardingError: a rank lacks an optimizer, or its options differ. Nothing was taken over, on any rank.
    """
    described = comm.gather_objects([_describe(one) for one in optimizers], "optimizers")
    _check_alike(source, described)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(copy_from(source, tensor, comm, _LABEL))
        _take_grads([*model.parameters()], source, comm)
        for optimizer, (_, states) in zip(optimizers, described[source], strict=False):
            params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter, state in zip(params, states, strict=True):
                _take_state(optimizer.state, parameter, state, source, comm)


def _take_grads(params: list[nn.Parameter], source: int, comm: Communicator) -> None:
    """Sparse gradients are pickled: each rank may have other rows."""
    mine = [None if p.grad is None else p.grad.cpu() if p.grad.is_sparse else True for p in params]
    for parameter, given in zip(params, comm.gather_objects(mine, "gradients")[source], strict=True):
        if given is None:
            parameter.grad = None
        elif isinstance(given, Tensor):
            parameter.grad = given.to(parameter.device)
        else:
            gradient = torch.zeros_like(parameter) if parameter.grad is None or parameter.grad.is_sparse else parameter.grad
            parameter.grad = copy_from(source, gradient, comm, _LABEL)


def _describe(optimizer: Optimizer) -> tuple[list[str], list[dict[str, Any]]]:
    """The options of each group as text; for each parameter its state, with a `_Shape` for each tensor."""
    options = [
        ", ".join(f"{name}: {value}" for name, value in group.items() if name != "params") for group in optimizer.param_groups
    ]
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return options, [
        {name: _Shape.of(value) if isinstance(value, Tensor) else value for name, value in optimizer.state.get(p, {}).items()}
        for p in params
    ]


class _Shape(tuple[Any, ...]):
    """Stands for a tensor of a state: its shape, its dtype, and whether it is on the host."""

    __slots__ = ()

    @staticmethod
    def of(tensor: Tensor) -> "_Shape":
        return _Shape((tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"))


def _check_alike(source: int, described: list[list[tuple[list[str], list[dict[str, Any]]]]]) -> None:
    has_state = any(state for _, states in described[source] for state in states)
    lacking = [rank for rank, found in enumerate(described) if len(found) != len(described[source])]
    if lacking and has_state:
        raise ShardingError(
            f"join: rank {source} has stepped {len(described[source])} optimizers of this model, and {name_ranks(lacking)} "
            "another number, so their state would differ; step the same optimizers on all ranks, and give every rank a batch."
        )
    for rank, found in enumerate(described):
        for (mine, _), (theirs, _) in zip(found, described[source], strict=False):
            if mine != theirs:
                raise ShardingError(
                    f"join: the options of an optimizer are {'; '.join(mine)} on rank {rank} and {'; '.join(theirs)} on rank "
                    f"{source}; change the learning rate outside of join, or as often on every rank."
                )


def _take_state(states: Any, parameter: Tensor, wanted: dict[str, Any], source: int, comm: Communicator) -> None:
    mine = states.get(parameter, {})
    for name, value in wanted.items():
        if not isinstance(value, _Shape):
            mine[name] = value
            continue
        shape, dtype, on_host = value
        if not isinstance(mine.get(name), Tensor) or mine[name].shape != shape:
            mine[name] = torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
        mine[name].copy_(copy_from(source, mine[name].to(parameter.device), comm, _LABEL))
    if wanted:
        states[parameter] = mine
