"""Our engine, FSDP2, FSDP1 and DDP, as their documentation shows them, and the places of failures.py that they have."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.comm.process_group import ProcessGroupCommunicator
from tests.support.models import Block
from tools.failures import POINTS, Fault

OURS, FSDP2, FSDP1, DDP = ENGINES = ("fsdp", "FSDP2", "FSDP1", "DDP")
COMM_HOOK, GATHER, REDUCTION = "the communication hook", "a gather is refused", "a reduction is refused"
USERS: Final = tuple(name for name in POINTS if not name.startswith(("out of memory", "the ")))
"""Places in the user's own code: the hooks and modules of failures.py."""
PLACES: Final = (*USERS, COMM_HOOK, GATHER, REDUCTION)
ALONE: Final = ("a module inside a unit", "a node of the backward", "Ctrl-C in a module", COMM_HOOK, GATHER, REDUCTION)
SHARDED: Final = (OURS, FSDP2, FSDP1)
EXPRESSED: Final = {COMM_HOOK: (OURS, FSDP1, DDP), GATHER: SHARDED, REDUCTION: SHARDED}
"""By place, the engines that have it in Python; all of them have those that are not here."""


class Model(NamedTuple):
    module: Any
    net: nn.Module
    no_sync: Callable[[], AbstractContextManager[Any]]


def wrapped(engine: str, net: nn.Module, group: Any) -> Model:
    """`net` with its blocks as units, as the documentation of each engine shows it."""
    if engine == OURS:
        module: Any = fsdp.FullyShardedDataParallel(net, auto_wrap_policy={Block}, process_group=group)
        return Model(module, net, lambda: fsdp.no_sync(module))
    if engine == FSDP2:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        module = fully_shard(net, mesh=mesh)

        @contextmanager
        def kept() -> Iterator[None]:
            module.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                module.set_requires_gradient_sync(True)

        return Model(module, net, kept)
    if engine == FSDP1:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
        module = FullyShardedDataParallel(net, group, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    else:
        module = nn.parallel.DistributedDataParallel(net, process_group=group)
    return Model(module, net, module.no_sync)


def install(engine: str, place: str, model: Model, fault: Fault) -> None:
    """Put the fault in its place, if that is one of the user's own code."""
    if place in USERS or (place == COMM_HOOK and engine == OURS):
        POINTS[place][0](model.net, fault)
    elif place == COMM_HOOK and engine == DDP:

        def of_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and refuses others than its own
            fault.fire()
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.module.register_comm_hook(None, of_bucket)
    elif place == COMM_HOOK:

        def of_gradient(state: None, gradient: Tensor, shard: Tensor) -> None:
            fault.fire()
            shard.copy_(gradient.chunk(2)[dist.get_rank()])

        model.module.register_comm_hook(None, of_gradient)


@contextmanager
def refusing(place: str, fault: Fault) -> Iterator[None]:
    """The functions by which the engines gather or reduce fail when the fault is armed."""
    # what an engine calls depends on the version of torch; FSDP1 gathers by the last one on the CPU
    names = {
        GATHER: ("all_gather_single", "all_gather_into_tensor", "all_gather"),
        REDUCTION: ("reduce_scatter_single", "reduce_scatter_tensor"),
    }
    owners: list[tuple[Any, str]] = [(dist, name) for name in names.get(place, ()) if hasattr(dist, name)]
    if place in names:
        owners.append((ProcessGroupCommunicator, "all_gather" if place == GATHER else "reduce_scatter"))

    def first(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            fault.fire()
            return real(*args, **kwargs)

        return called

    with ExitStack() as patches:
        for owner, name in owners:
            patches.enter_context(mock.patch.object(owner, name, first(getattr(owner, name))))
        yield
