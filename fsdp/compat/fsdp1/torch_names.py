"""torch's own objects that the door uses: enumerations, configurations, groups, kinds of sharded tensors.

Rule: the only file of the package that imports torch.distributed.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._flat_param import _ShardParamInfo as ShardParamInfo
from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOfDTensor

from fsdp.comm.dtensor_mesh import is_part as is_part
from fsdp.comm.simulated import current_rank
from fsdp.compat.shared.plain_group import PlainGroup
from fsdp.errors import ShardingError

__all__ = [
    "ActivationWrapper",
    "BackwardPrefetch",
    "CPUOffload",
    "DTensor",
    "DeviceMesh",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateKeyType",
    "ShardParamInfo",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardedTensor",
    "ShardingStrategy",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
]

auto_wrap = _auto_wrap
"""torch's: wrap the children of a module that a policy chooses, each by the given class and arguments."""
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def default_group() -> Any:
    """The group of all ranks.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    here = current_rank()
    return PlainGroup(here.rank, here.size) if here is not None else c10d._get_default_group()


def ranks_of(group: Any) -> tuple[int, ...]:
    """The numbers of the ranks of a group among all."""
    return tuple(range(group.size())) if not isinstance(group, dist.ProcessGroup) else tuple(dist.get_process_group_ranks(group))


def hybrid_mesh(groups: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """The mesh for the engine, the group that shards and the group of replicas, of a hybrid strategy.

    Raises:
        ValueError: `groups` is no pair of groups, or `mesh` has not two dimensions.
        ShardingError: the groups are no rows and columns of one table of all ranks.
    """
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(f"device_mesh has {mesh.ndim} dimension; a hybrid strategy needs two: replicas, shards.")
        return mesh, mesh.get_group(1), mesh.get_group(0)
    if groups is None:
        total = default_group().size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", torch.accelerator.device_count() or total))
        if current_rank() is not None or not 0 < local <= total or total % local:
            local = total
        return (total // local, local), default_group(), None
    if isinstance(groups, tuple) and all(isinstance(one, int) for one in groups):
        return groups, default_group(), None  # the shape, from the instance around this one
    if not (isinstance(groups, tuple) and len(groups) == 2 and all(isinstance(one, dist.ProcessGroup) for one in groups)):
        raise ValueError(
            "Expected process_group to be passed in as a pair (ranks that share the shards, ranks that hold the same), not "
            f"{type(groups).__name__}."
        )
    row, column = map(ranks_of, groups)
    total = default_group().size()
    table = torch.arange(total).view(-1, len(row)) if total == len(row) * len(column) else torch.empty(0, 0)
    here = default_group().rank()
    if not table.numel() or table[here // len(row)].tolist() != [*row] or table[:, here % len(row)].tolist() != [*column]:
        raise ShardingError(
            f"process_group: ranks {row} share the shards and ranks {column} hold the same; they must be a row and a column of "
            "the table of all ranks in order. Give device_mesh for another order."
        )
    return (len(column), len(row)), groups[0], groups[1]


def local_chunk(full: Tensor, group: Any, mesh: Any) -> Any:
    """This rank's part of a full tensor, as FSDP1 gives it in a sharded state: a DTensor if there is a mesh, or a ShardedTensor.

    Raises:
        ShardingError: inside `fsdp.simulate`, where torch's sharded tensors have no group.
    """
    if mesh is not None:
        return _create_chunk_dtensor(full, mesh.get_rank(), mesh)
    _require_group("SHARDED_STATE_DICT", group)
    devices = max(torch.accelerator.device_count(), 1)
    return _create_chunk_sharded_tensor(full, group.rank(), group.size(), devices, group)


def chunk_of_both(full: Tensor, mesh: DeviceMesh, styles: DeviceMesh, parameter: Tensor) -> Tensor:
    """This rank's part of a full tensor over `mesh` and `styles`, the mesh of tensor parallelism, cut there like `parameter`."""
    cut = getattr(parameter, "placements", ())[mesh.ndim :] or (Replicate(),) * styles.ndim
    joined = DeviceMesh._concatenate([mesh, styles])
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), ShardOfDTensor(0), *cut]
    return distribute_tensor(full, joined, placements, src_data_rank=None)


def full_value(value: Any, group: Any) -> Any:
    """The full tensor of a ShardedTensor or DTensor, which communicates; any other value as it is.

    Lightning's `load` gives objects that read a tensor from a file when torch uses it. They are read.
    """
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return torch.clone(value) if hasattr(value, "__torch_function__") and not isinstance(value, Tensor) else value
    metadata = value.metadata()  # what the tensor itself is asked for, torch answers with a warning of its format
    full = torch.zeros(tuple(metadata.size), dtype=metadata.tensor_properties.dtype)
    parts: list[Any] = [None] * group.size()
    mine = [(shard.metadata.shard_offsets, shard.tensor.cpu()) for shard in value.local_shards()]
    dist.all_gather_object(parts, mine, group=group)
    for offsets, part in (one for parts_of_rank in parts for one in parts_of_rank):
        window = full
        for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
            window = window.narrow(dim, offset, size)
        window.copy_(part)
    return full


def flat_chunk(local: Tensor, first: int, total: int, group: Any) -> Any:
    """A vector of `total` elements as a ShardedTensor, of which this rank holds `local` from element `first` on. Communicates.

    Raises:
        ShardingError: as for `local_chunk`.
    """
    _require_group("LOCAL_STATE_DICT", group)
    shards = [Shard.from_tensor_and_offsets(local, [first], group.rank())] if local.numel() else []
    return init_from_local_shards(shards, total, process_group=group)


def _require_group(kind: str, group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise ShardingError(
            f"{kind}: torch's ShardedTensor needs a process group, which fsdp.simulate has not; use FULL_STATE_DICT."
        )


def from_rank_0(value: Any, group: Any) -> Any:
    """The value that rank 0 of `group` has. Communicates."""
    if not isinstance(group, dist.ProcessGroup):
        return value
    carrier = [value if group.rank() == 0 else None]
    dist.broadcast_object_list(carrier, src=ranks_of(group)[0], group=group)
    return carrier[0]
