"""The plan of flat buffers: which parameters of a unit share one. By dtypes, trainable or frozen, and up to the bucket cap."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fsdp.comm.context import CommContext
from fsdp.config import Config, MeshKind
from fsdp.device.storage import size_of
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.layout import next_bucket_limit
from fsdp.params.param_info import ParamInfo
from fsdp.params.placement import place
from fsdp.shards.dtensors import Mesh


def make_flat_buffers(
    param_infos: Sequence[ParamInfo], config: Config, comms: CommContext, mesh: Mesh | None = None
) -> tuple[FlatBuffer, ...]:
    """The flat buffers of a unit, planned by mesh, dtype, `requires_grad` and the bucket cap. `mesh`: see `place`."""
    return tuple([_make(members, config, comms, mesh) for members in _plan(param_infos, config)])


def _make(members: Sequence[ParamInfo], config: Config, comms: CommContext, mesh: Mesh | None) -> FlatBuffer:
    comms, mesh = members[0].comms or comms, members[0].mesh or mesh
    kept = members[0].parameter.dtype
    dtype = compute_dtype(members[0], kept, config)
    placements = place(members, min(kept.itemsize, dtype.itemsize), config, comms.shard_comm, mesh)
    return FlatBuffer(members, placements, comms, dtype, config.offload)


def compute_dtype(param_info: ParamInfo, dtype: torch.dtype, config: Config) -> torch.dtype:
    """The dtype in which a parameter is gathered whose shard has `dtype`."""
    param_dtype = config.mp_policy.param_dtype
    return dtype if param_dtype is None or param_info.keeps_dtype or not dtype.is_floating_point else param_dtype


def _plan(param_infos: Sequence[ParamInfo], config: Config) -> Iterator[list[ParamInfo]]:
    """The parameters of a unit, grouped by mesh, dtype and `requires_grad`, each group cut at the size of a bucket.

    Frozen parameters are cut in the same way, so that a frozen copy of a trained unit (a momentum encoder) has its layout.
    A parameter whose gradients stay sparse has a flat buffer of its own.
    """
    groups: dict[tuple[Any, ...], list[ParamInfo]] = {}
    for info in param_infos:
        alone = id(info) if info.is_sparse and config.mesh_kind is MeshKind.REPLICATE else None
        kind = info.parameter.dtype, compute_dtype(info, info.parameter.dtype, config), info.parameter.requires_grad
        groups.setdefault((*kind, alone, info.comms), []).append(info)
    for members in groups.values():
        yield from _cut(members, config)


def _cut(members: Sequence[ParamInfo], config: Config) -> Iterator[list[ParamInfo]]:
    """Consecutive parts of a group. They are filled in the order of the backward, so that what is left over is reduced last."""
    parts: list[list[ParamInfo]] = []
    limit, filled, remaining = 0, 0, sum(size_of(info.parameter) for info in members)
    is_complete = True
    for info in reversed(members):
        size = size_of(info.parameter)
        if is_complete or filled + size > limit:
            parts.append([])
            limit, filled = next_bucket_limit(remaining, config.bucket_bytes or remaining, config.tapers), 0
        parts[-1].append(info)
        filled += size
        remaining -= size
        is_complete = info.names[0] in config.reduction.triggers
    for part in reversed(parts):
        yield part[::-1]
