"""Make the buckets of a root, and decide which of them are early."""

from collections.abc import Sequence
from functools import reduce

import torch

from fsdp.config import Config, MeshKind, ReductionPolicy
from fsdp.device.storage import MemoryTracker
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.sparse_bucket import SparseBucket
from state_machine.bucket import BucketKind


def make_buckets(units: Sequence[Unit], tracker: MemoryTracker) -> tuple[Bucket, ...]:
    """One bucket for each flat buffer of each unit."""
    policy = units[0].config.reduction
    flats = [(index, unit, flat) for index, unit in enumerate(units) for flat in unit.flats]
    return tuple(
        (SparseBucket if flat.is_sparse else Bucket)(
            number, flat, index, unit, _reduce_dtype(unit, flat, policy), unit.config.keeps_buckets, tracker
        )
        for number, (index, unit, flat) in enumerate(flats)
    )


def early_buckets(
    buckets: Sequence[Bucket], of_unit: Sequence[Sequence[int]], innermost: Sequence[bool], config: Config
) -> frozenset[int]:
    """The buckets that are useful and safe to launch early (see the note in `state_machine.bucket`)."""
    if config.uneven_paths:
        return frozenset()
    replicated = config.mesh_kind is MeshKind.REPLICATE

    def may_be_early(unit: int) -> bool:
        is_cut = sum(buckets[number].is_trained for number in of_unit[unit]) > 1
        return (is_cut and innermost[unit]) or (replicated and not innermost[unit])

    return frozenset(bucket.number for bucket in buckets if may_be_early(bucket.unit))


def bucket_kinds(count: int, early: frozenset[int], config: Config) -> list[BucketKind]:
    """The kind of each bucket, which chooses its table."""
    policy = config.reduction
    if policy.at_end:
        return [BucketKind.AT_END] * count
    if policy.find_unused_parameters:
        return [BucketKind.FIND_UNUSED] * count
    other = BucketKind.BEHIND_EARLY if early else BucketKind.ORDINARY
    return [BucketKind.EARLY if number in early else other for number in range(count)]


def _reduce_dtype(unit: Unit, flat: FlatBuffer, policy: ReductionPolicy) -> torch.dtype:
    precision, dtype = unit.config.mp_policy, flat.unsharded.dtype
    if not dtype.is_floating_point:
        return dtype
    wanted = precision.reduce_dtype or dtype
    if precision.reduce_dtype is None and precision.reduce_in_shard_dtype:
        trained = (one.shard.dtype for one in unit.flats if one is flat or any(one.requires_grad_flags))
        wanted = reduce(torch.promote_types, (kept for kept in trained if kept.is_floating_point))
    return torch.float32 if wanted.itemsize < 4 and policy.deterministic else wanted
