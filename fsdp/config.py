"""The options of a unit: checked once, then frozen."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch

from fsdp.errors import ShardingError
from state_machine import ReshardPolicy

GUARD_VARIABLE: Final = "FSDP_GUARD"
"""The environment variable that switches guard mode on with the value 1, if the option is left out."""


class MeshKind(Enum):
    """How the ranks share the parameters."""

    SHARD = auto()
    """Each rank holds one shard."""
    HYBRID = auto()
    """Each replica, a row of a mesh, holds all shards."""
    REPLICATE = auto()
    """Each rank holds all parameters."""


class Sharding(NamedTuple):
    """What the name of a strategy means."""

    reshard_policy: ReshardPolicy
    mesh_kind: MeshKind
    keeps_buckets: bool = False
    """Whether the memory of unsharded gradients is kept between steps."""


STRATEGIES: Final[dict[str, Sharding]] = {
    "FULL_SHARD": Sharding(ReshardPolicy.AFTER_FORWARD, MeshKind.SHARD),
    "SHARD_GRAD_OP": Sharding(ReshardPolicy.AFTER_BACKWARD, MeshKind.SHARD),
    "SHARD_GRADIENTS": Sharding(ReshardPolicy.NEVER, MeshKind.SHARD),
    "SHARD_OPTIMIZER": Sharding(ReshardPolicy.NEVER, MeshKind.SHARD, keeps_buckets=True),
    "HYBRID_SHARD": Sharding(ReshardPolicy.AFTER_FORWARD, MeshKind.HYBRID),
    "NO_SHARD": Sharding(ReshardPolicy.AFTER_BACKWARD, MeshKind.REPLICATE),
}


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of computation and reduction. None leaves a dtype as it is.

    The first four fields are those of FSDP2's class of the same name. That class is accepted too, and so is FSDP1's
    `MixedPrecision`, unless a field of it asks for something that is not done here.

    Raises:
        ShardingError: a dtype is not a floating-point one, or a flag is not True or False.
    """

    param_dtype: torch.dtype | None = None
    """The dtype in which floating-point parameters are gathered and compute. The shards keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are reduced. None means the dtype in which they were computed."""
    output_dtype: torch.dtype | None = None
    """The dtype to which floating-point outputs of a unit's forward are cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of a unit's forward are cast to `param_dtype`."""
    cast_root_forward_inputs: bool = False
    """Whether those of the root's own unit are cast even if `cast_forward_inputs` is False, as in FSDP1."""
    reduce_in_shard_dtype: bool = False
    """Whether `reduce_dtype=None` means the dtype of a unit's shards, as in FSDP2 since torch 2.15."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ShardingError(f"mp_policy.{name} must be a floating-point torch.dtype or None, not {dtype!r}.")
        for name in ("cast_forward_inputs", "cast_root_forward_inputs", "reduce_in_shard_dtype"):
            check_flag(f"mp_policy.{name}", getattr(self, name))

    def input_dtype(self, is_root: bool) -> torch.dtype | None:
        """The dtype to which inputs of a unit's forward are cast; None if they are not."""
        casts = self.cast_forward_inputs or (is_root and self.cast_root_forward_inputs)
        return self.param_dtype if casts else None


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Shards, gradients and optimizer state are in host memory; the device holds what computes.

    FSDP2's `CPUOffloadPolicy` is accepted too, and so is FSDP1's `CPUOffload`. Where the parameters are in host memory already
    nothing changes.

    Raises:
        ShardingError: `pin_memory` is not True or False.
    """

    pin_memory: bool = True
    """Whether the host memory is pinned. The device then copies from and to it while the host program goes on. False waits for
    each copy of a gradient, and takes no memory that the system cannot swap."""

    def __post_init__(self) -> None:
        check_flag("offload_policy.pin_memory", self.pin_memory)


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """How gradients are put into buckets, and how buckets are summed over the ranks.

    If units were wrapped by hand, the policy of the outermost unit counts. Sizes and triggers are those of each unit. An inner
    unit that was given another `average`, `predivide_factor` or `deterministic` is refused.

    Raises:
        ShardingError: a value is out of range, or `find_unused_parameters` and `static_graph` are both given.
    """

    bucket_cap_mb: float | None = None
    """The most MiB of gradients that one collective reduces. A single larger parameter still is reduced at once.

    Small units that follow each other share a collective. A larger unit is cut into pieces. Each piece is gathered by itself, and
    reduced as soon as its gradients have arrived; pieces of a unit with inner units wait for the end of the backward, except
    under "NO_SHARD". None means that each unit is one bucket. Under "NO_SHARD" None means 25, and towards the end of the backward
    half of what is left, where that is less."""
    first_bucket_mb: float = 1.0
    """The most MiB of the first collective of a backward, if units share one. A small one lets communication start early."""
    coalesce_cap_mb: float = 0.0
    """The most MiB of a collective that small units share. 0: each has its own.

    With 1, units that follow each other share one all-gather and one reduction of up to 1 MiB. Models of many tiny units need
    it. Gathers are shared from the second step on, when all ranks have completed one and know the order of the units. A job that
    only evaluates shares none. `bucket_cap_mb`, if given, counts for reductions. Units whose shards are in host memory share no
    gather. With `uneven_paths` units share neither."""
    triggers: tuple[str, ...] = ()
    """Names of parameters that end a bucket, as in `module.named_parameters()` of the wrapped module.

    Backward order counts: the gradients of such a parameter and of those after it in the module are reduced without waiting for
    those before it."""
    at_end: bool = False
    """Whether every reduction is launched at the end of the backward."""
    average: bool = True
    """Whether the sum over the ranks is divided by their number."""
    predivide_factor: float | None = None
    """The factor by which gradients are divided before the sum; the rest of the division follows after it.

    None means the number of ranks in fp16, whose sums would overflow. None also means the number of ranks where dividing first
    costs nothing and `deterministic` is off: under "NO_SHARD", and for large buckets on the host if the number is a power of two,
    which rounds nothing. Otherwise None means 1."""
    streams: int = 1
    """The number of reductions that may run at the same time, each on a communicator and a stream of its own, in turns."""
    deterministic: bool = False
    """Whether gradients are summed in fp32 and in a fixed order of the ranks, on every backend.

    The same number of ranks then gives the same bits under every strategy; rows of "HYBRID_SHARD" do so if their length is a
    power of 2. Half precision is sent as fp32. On CUDA, and in all-reduces, the sum is an exchange of chunks that takes as much
    memory as the bucket."""
    find_unused_parameters: bool = False
    """Whether ranks may pass through different units in a backward. Every unit is then reduced in each. Needs "NO_SHARD".

    `uneven_paths` includes it under every strategy."""
    static_graph: bool = False
    """Whether the same parameters get gradients in every backward.

    Which rank has which gradients is then exchanged in the first backward only. A rank that differs later gets an error that
    names the parameter."""

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb", "predivide_factor"):
            number = getattr(self, name)
            optional = name != "first_bucket_mb"
            if not ((optional and number is None) or (_is_number(number) and 0 < number < float("inf"))):
                raise ShardingError(
                    f"reduction.{name} must be a positive number{' or None' if optional else ''}, not {number!r}."
                )
        if self.predivide_factor is not None and not 1e-37 <= self.predivide_factor <= 1e37:
            raise ShardingError(
                f"reduction.predivide_factor must be a number that fp32 holds, from 1e-37 to 1e37, not {self.predivide_factor!r}."
            )
        if not _is_number(self.coalesce_cap_mb) or not 0 <= self.coalesce_cap_mb < float("inf"):
            raise ShardingError(f"reduction.coalesce_cap_mb must be a number, 0 or more, not {self.coalesce_cap_mb!r}.")
        _check_count("reduction.streams", self.streams, "streams", 1)
        is_collection = isinstance(self.triggers, Collection) and not isinstance(self.triggers, str | torch.Tensor)
        if not is_collection or not all(isinstance(name, str) for name in self.triggers):
            raise ShardingError(f"reduction.triggers must be names of parameters, not {self.triggers!r}.")
        object.__setattr__(self, "triggers", tuple(self.triggers))
        for name in ("at_end", "average", "deterministic", "find_unused_parameters", "static_graph"):
            check_flag(f"reduction.{name}", getattr(self, name))
        if self.find_unused_parameters and self.static_graph:
            raise ShardingError("reduction.find_unused_parameters and static_graph contradict each other; give one of them.")


def as_flag(name: str, value: Any) -> bool:
    """`value` as a bool: also one of numpy's, and 0 or 1. Raise ShardingError if it is none."""
    if isinstance(value, int) or type(value).__module__ == "numpy":
        value = bool(value) if value in (0, 1) else value
    check_flag(name, value)
    return bool(value)


def check_flag(name: str, value: object, or_none: bool = False) -> None:
    """Raise ShardingError if `value` is not True or False, nor None where `or_none` allows it."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        raise ShardingError(f"{name} must be {'True, False or None' if or_none else 'True or False'}, not {value!r}.")


def _check_count(name: str, value: object, of: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ShardingError(f"{name} must be a number of {of}, {least} or more, not {value!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Config:
    """The options of one unit, after all checks."""

    reshard_policy: ReshardPolicy
    mesh_kind: MeshKind
    keeps_buckets: bool
    keep_root: bool
    """Whether the unit keeps its unsharded parameters after the forward if it is the root's own unit."""
    mp_policy: MixedPrecisionPolicy
    guard: bool
    """Whether guard mode is on."""
    prefetch: int
    """The number of units that may be gathered ahead of the one that computes."""
    sync_module_states: bool
    reduction: ReductionPolicy
    broadcast_buffers: bool
    """Whether a forward of the root overwrites the buffers with rank 0's."""
    aligned: bool
    """Whether the shards of a flat buffer are multiples of 16 bytes."""
    plain_shards: bool
    """Whether shards are ordinary parameters, whose operators compute on this rank's part."""
    dtensors: bool
    """Whether shards are torch's DTensors, each cut evenly between rows."""
    uneven_paths: bool
    """Whether the ranks may go different ways through the units."""
    offload: OffloadPolicy | None
    """How shards are kept in host memory; None if they stay on the device."""

    @property
    def bucket_bytes(self) -> int | None:
        """The most bytes of gradients that one collective reduces; None means those of one unit."""
        cap = 25.0 if self.tapers else self.reduction.bucket_cap_mb
        return None if cap is None else int(cap * 2**20)

    @property
    def coalesce_bytes(self) -> int:
        """The most bytes of small units that share an all-gather; 0 if none do."""
        shares = self.mesh_kind is not MeshKind.REPLICATE and not self.uneven_paths
        return int(self.reduction.coalesce_cap_mb * 2**20) if shares else 0

    @property
    def reduction_bytes(self) -> int | None:
        """The most bytes of buckets that share a reduction; None if none do."""
        return self.bucket_bytes or self.coalesce_bytes or None

    @property
    def tapers(self) -> bool:
        """Whether buckets get smaller towards the end of a backward. That is free where nothing is gathered."""
        return self.mesh_kind is MeshKind.REPLICATE and self.reduction.bucket_cap_mb is None

    @property
    def root_reshard_policy(self) -> ReshardPolicy:
        """The reshard policy of this unit if it is the root's own."""
        reshards = self.reshard_policy is ReshardPolicy.AFTER_FORWARD
        return ReshardPolicy.AFTER_BACKWARD if reshards and self.keep_root else self.reshard_policy


def make_config(
    *,
    sharding_strategy: str | Enum | None,
    reshard_after_forward: bool | None,
    sync_module_states: bool,
    guard: bool | None,
    reduction: ReductionPolicy | None,
    **options: Any,
) -> Config:
    """Check each option and all of them together. `options`: those that are fields of `Config` as they are.

    Raises:
        ShardingError: an option has a wrong value, or two options contradict each other.
    """
    reshard_policy, mesh_kind, keeps_buckets = find_strategy(sharding_strategy)
    check_flag("reshard_after_forward", reshard_after_forward, or_none=True)
    if reshard_after_forward is True and reshard_policy is not ReshardPolicy.AFTER_FORWARD:
        raise ShardingError(
            f"reshard_after_forward=True contradicts sharding_strategy={sharding_strategy!r}, which keeps the unsharded "
            "parameters between forward and backward; leave one of them out."
        )
    if reshard_after_forward is False and reshard_policy is ReshardPolicy.AFTER_FORWARD:
        reshard_policy = ReshardPolicy.AFTER_BACKWARD
    check_flag("guard", guard, or_none=True)
    reduction = ReductionPolicy() if reduction is None else reduction
    config = Config(
        reshard_policy,
        mesh_kind,
        keeps_buckets,
        keep_root=reshard_after_forward is not True,
        guard=os.environ.get(GUARD_VARIABLE) == "1" if guard is None else guard,
        sync_module_states=as_flag("sync_module_states", sync_module_states),
        reduction=reduction,
        **options,
    )
    _check_count("prefetch", config.prefetch, "units", 0)
    if not isinstance(reduction, ReductionPolicy):
        raise ShardingError(f"reduction must be a fsdp.ReductionPolicy, not {reduction!r}.")
    for name in ("uneven_paths", "broadcast_buffers", "aligned", "plain_shards", "dtensors"):
        check_flag(name, getattr(config, name))
    if config.uneven_paths and reduction.static_graph:
        raise ShardingError("uneven_paths and reduction.static_graph contradict each other: paths may change; give one of them.")
    if reduction.find_unused_parameters and not config.uneven_paths and mesh_kind is not MeshKind.REPLICATE:
        raise ShardingError(
            "reduction.find_unused_parameters needs sharding_strategy='NO_SHARD': under "
            f"{sharding_strategy!r} a unit is gathered by all ranks or none. Some ranks only may use a parameter without it."
        )
    if config.dtensors and config.plain_shards:
        raise ShardingError("dtensors and plain_shards contradict each other; give one of them.")
    if config.dtensors and mesh_kind is MeshKind.REPLICATE:
        raise ShardingError(f"dtensors: {sharding_strategy!r} cuts no parameter; leave dtensors out.")
    if config.offload is not None and config.uneven_paths:
        raise ShardingError(
            "offload_policy and uneven_paths cannot be combined: a rank takes part in gathers of others at any time, and their "
            "shards must be in device memory then; give one of them."
        )
    if config.uneven_paths and config.broadcast_buffers:
        raise ShardingError(
            "uneven_paths and broadcast_buffers contradict each other: a rank may leave a forward out. Broadcast the buffers "
            "yourself, after a backward or after fsdp.meet on every rank."
        )
    if config.uneven_paths:  # which includes it, under every strategy
        config = replace(config, reduction=replace(reduction, find_unused_parameters=False))
    return config


def find_strategy(sharding_strategy: str | Enum | None) -> Sharding:
    """Return what a strategy means. It is given by name or as a member of torch's enum. None is FSDP1's default.

    Raises:
        ShardingError: the strategy is not known.
    """
    name = "FULL_SHARD" if sharding_strategy is None else getattr(sharding_strategy, "name", sharding_strategy)
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ShardingError(f"sharding_strategy {sharding_strategy!r} is not known; choose one of {', '.join(STRATEGIES)}.")
    return STRATEGIES[name]
