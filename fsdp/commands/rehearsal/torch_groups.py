"""Other dimensions than data in a rehearsal: device meshes of the planned job, and the collectives of torch's parallel styles.

Rule 1: groups are those of a simulated rank. Their communicators are rehearsed ones, which send nothing.
Rule 2: a functional collective begins where it is called, and is awaited where its result is used first, as on a device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import loss_parallel as loss_parallel

from fsdp.comm.simulated import current_rank
from fsdp.comm.simulated_group import c10d_bindings, torch_groups
from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError

_WRAPS: Final = "_wrap_tensor_autograd"


@contextmanager
def groups_of_torch(per_host: int) -> Iterator[None]:
    """Let `torch.distributed` inside be that of the rank that is played. `per_host`: devices of a host."""
    with torch_groups(current_rank):
        # torch asks the module of a type of device how many a host has, and chooses collectives by the answer
        torch.__dict__["meta"] = SimpleNamespace(device_count=lambda: per_host, is_initialized=lambda: True)
        _forget_shardings()
        try:
            yield
        finally:
            del torch.__dict__["meta"]
            c10d_bindings._unregister_all_process_groups()  # those of this thread: the next rehearsal's have the same names
            _forget_shardings()


def _forget_shardings() -> None:
    """Let torch find anew how operators treat DTensors: what it remembers has groups of a mesh that was equal to this one."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    MeshTopoInfo.build_from_mesh.cache_clear()


def open_mesh(sizes: Mapping[str, int], on_host: bool) -> DeviceMesh:
    """A mesh of all ranks, by the names and sizes of its dimensions."""
    mesh = init_device_mesh("cpu" if on_host else "meta", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    played: Any = current_rank()
    for name in sizes:
        played.dimensions[tuple(c10d.get_process_group_ranks(mesh.get_group(name)))] = name
    return mesh


def call_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch a collective of torch on the communicator of its group, and return tensors of the shapes of its results."""
    played: Any = current_rank()
    name = func._schema.name.partition("::")[2]
    if name == _WRAPS:
        return AsyncCollectiveTensor(args[0])
    if name == "wait_tensor":
        work = played.in_flight.pop(storage_key(args[0]), None)
        if work is not None:
            work.wait()
        return args[0]
    launch = _LAUNCHES.get(name.removesuffix("_").removesuffix("_coalesced").removesuffix("_out"))
    if launch is None:
        raise ShardingError(f"plan: torch's {name} is not counted; a plan counts {', '.join(_LAUNCHES)}.")
    result = func(*args, **kwargs)
    given = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    group = c10d_bindings._resolve_process_group(given["group_name"])
    ranks = tuple(c10d.get_process_group_ranks(group))
    label = played.dimensions.get(ranks, "torch")
    comm = played.comm(label, ranks)
    for one, made in zip(args[0], result, strict=True) if isinstance(result, list) else [(args[0], result)]:
        played.in_flight[storage_key(made)] = launch(comm, label, one, made, given)
    return result


_Launch: TypeAlias = Callable[[Any, str, Tensor, Tensor, Mapping[str, Any]], Any]


def _exchange(comm: Any, label: str, given: Tensor, made: Tensor, arguments: Mapping[str, Any]) -> Any:
    """Send a part to each rank. What stays here is the first part, because the first rank is played."""
    parts = arguments.get("output_split_sizes")
    kept = made.nbytes // comm.size if not parts else parts[0] * made[:1].nbytes
    return comm.all_to_all(made.nbytes - kept, label)


_LAUNCHES: Final[Mapping[str, _Launch]] = {
    "all_reduce": lambda comm, label, given, made, _: comm.all_reduce(made, "sum", label),
    "all_gather_into_tensor": lambda comm, label, given, made, _: comm.all_gather(made, label),
    "reduce_scatter_tensor": lambda comm, label, given, made, _: comm.reduce_scatter(given, made, label),
    "broadcast": lambda comm, label, given, made, _: comm.broadcast(made, 0, label),
    "all_to_all_single": _exchange,
    "shard_dim_alltoall": _exchange,
}
"""How a rehearsed communicator launches each functional collective, by its name."""
