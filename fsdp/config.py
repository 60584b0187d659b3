"""How a unit is to be sharded: frozen, validated once, given once."""

import os
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch

from fsdp.errors import ShardingError
from state_machine import ReshardPolicy

GUARD: Final = "FSDP_GUARD"
"""The environment variable that switches guard mode on where the option is left out, with the value 1."""


class MeshKind(Enum):
    """How the ranks share the work."""

    SHARD = auto()
    HYBRID = auto()
    REPLICATE = auto()


class Sharding(NamedTuple):
    """What a name of a strategy stands for."""

    reshard_policy: ReshardPolicy
    mesh_kind: MeshKind
    keeps_buckets: bool = False
    """Whether the memory of whole gradients stays between steps."""


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
    """Which precision each part of the work runs in. None leaves a dtype as it is.

    The field names are those of torch's own `MixedPrecisionPolicy`, which is accepted as well.
    """

    param_dtype: torch.dtype | None = None
    """Floating-point parameters are gathered, and compute, in this dtype; the shards keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """Gradients are reduced in this dtype; None means the dtype they were computed in."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of a unit's forward are cast to this dtype."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of a unit's forward to `param_dtype`."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ShardingError(f"mp_policy.{name} must be a floating-point torch.dtype or None, not {dtype!r}.")


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """How gradients are put into buckets, and how buckets are summed over the ranks.

    Where units were wrapped by hand, that of the outermost unit counts, but for the sizes and triggers.
    """

    bucket_cap_mb: float | None = None
    """MiB of gradients that one collective reduces at most, unless one parameter is larger. Small units that follow each other
    share a collective; a larger unit is cut, and each piece is gathered and reduced by itself, the latter as soon as its
    gradients are there (but in units with units inside, which wait for the end of the backward unless the strategy is
    "NO_SHARD"). None means that a bucket is a unit; for "NO_SHARD" 25, and half of what is left where that is
    less, towards the end of the backward."""
    first_bucket_mb: float = 1.0
    """The same for the first collective of a backward, where units share one, so that communication starts early."""
    triggers: tuple[str, ...] = ()
    """Names of parameters, as in `module.named_parameters()` of the wrapped module, that end a bucket in the order of the
    backward: their gradients and those of the parameters after them are reduced without waiting for those before."""
    at_end: bool = False
    """Launch every reduction at the end of the backward."""
    average: bool = True
    """Divide the sum over the ranks by their number."""
    predivide_factor: float | None = None
    """Divide by this before the sum, and by the rest after it. None means the number of ranks in fp16, which would overflow, and
    where it costs nothing, unless `deterministic`: under "NO_SHARD", and for large buckets on the host where it is a power of
    two and rounds nothing. Otherwise 1."""
    streams: int = 1
    """How many reductions may run at the same time, each on a communicator and a stream of its own. They take turns."""
    deterministic: bool = False
    """Sum in fp32 and in a fixed order of the ranks on every backend: the same bits for the same number of ranks under every
    strategy, and for the rows of "HYBRID_SHARD" where their length is a power of 2. Half precision travels as fp32. On CUDA, and
    in all-reduces, the sum is an exchange of chunks that takes as much memory as the bucket."""
    find_unused_parameters: bool = False
    """Under "NO_SHARD", ranks may come through different units in a backward: every unit is reduced in each."""
    static_graph: bool = False
    """The same parameters get gradients in every backward. Who has which is then exchanged in the first one only; a rank that
    leaves it raises an error that names the parameter."""

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb", "predivide_factor"):
            number = getattr(self, name)
            optional = name != "first_bucket_mb"
            if not ((optional and number is None) or _is_positive(number)):
                raise ShardingError(
                    f"reduction.{name} must be a positive number{' or None' if optional else ''}, not {number!r}."
                )
        if not isinstance(self.streams, int) or isinstance(self.streams, bool) or self.streams < 1:
            raise ShardingError(f"reduction.streams must be a number of streams, 1 or more, not {self.streams!r}.")
        if isinstance(self.triggers, str) or not all(isinstance(name, str) for name in self.triggers):
            raise ShardingError(f"reduction.triggers must be names of parameters, not {self.triggers!r}.")
        object.__setattr__(self, "triggers", tuple(self.triggers))
        for name in ("at_end", "average", "deterministic", "find_unused_parameters", "static_graph"):
            if not isinstance(getattr(self, name), bool):
                raise ShardingError(f"reduction.{name} must be True or False, not {getattr(self, name)!r}.")
        if self.find_unused_parameters and self.static_graph:
            raise ShardingError("reduction.find_unused_parameters and static_graph contradict each other; give one of them.")


def _is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


@dataclass(frozen=True, slots=True)
class Config:
    """The options of one unit, checked and normalised."""

    reshard_policy: ReshardPolicy
    mesh_kind: MeshKind
    keeps_buckets: bool
    keep_root: bool
    """Whether the unit keeps its whole parameters after the forward when it turns out to be the root's own."""
    mp_policy: MixedPrecisionPolicy
    guard: bool
    """Whether to look for what no hook sees."""
    prefetch: int
    """How many units may be gathered ahead of the one that computes."""
    sync_module_states: bool
    reduction: ReductionPolicy
    broadcast_buffers: bool
    """Whether a forward of the root begins with rank 0's buffers."""

    @property
    def bucket_bytes(self) -> int | None:
        """How many bytes of gradients one collective reduces at most; None means those of a unit."""
        cap = self.reduction.bucket_cap_mb
        if cap is None:
            cap = 25.0 if self.mesh_kind is MeshKind.REPLICATE else None
        return None if cap is None else int(cap * 2**20)

    @property
    def tapers(self) -> bool:
        """Whether buckets get smaller towards the end of a backward: there are no gathers to pay for more of them."""
        return self.mesh_kind is MeshKind.REPLICATE and self.reduction.bucket_cap_mb is None

    @property
    def root_reshard_policy(self) -> ReshardPolicy:
        """The strategy of this unit where it is the root's own."""
        frees = self.reshard_policy is ReshardPolicy.AFTER_FORWARD
        return ReshardPolicy.AFTER_BACKWARD if frees and self.keep_root else self.reshard_policy


def make_config(
    sharding_strategy: str | Any = "FULL_SHARD",
    reshard_after_forward: bool | None = None,
    mp_policy: Any = None,
    prefetch: int = 1,
    sync_module_states: bool = False,
    guard: bool | None = None,
    reduction: Any = None,
    broadcast_buffers: bool = False,
) -> Config:
    """Check the options against each other.

    Raises:
        ShardingError: an unknown strategy, or two options that contradict each other.
    """
    reshard_policy, mesh_kind, keeps_buckets = find_strategy(sharding_strategy)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ShardingError(f"reshard_after_forward must be True, False or None, not {reshard_after_forward!r}.")
    if reshard_after_forward is True and reshard_policy is not ReshardPolicy.AFTER_FORWARD:
        raise ShardingError(
            f"reshard_after_forward=True contradicts sharding_strategy={sharding_strategy!r}, which keeps the whole parameters "
            "between forward and backward; leave one of them out."
        )
    if reshard_after_forward is False and reshard_policy is ReshardPolicy.AFTER_FORWARD:
        reshard_policy = ReshardPolicy.AFTER_BACKWARD
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ShardingError(f"prefetch must be a number of units, 0 or more, not {prefetch!r}.")
    if not (guard is None or isinstance(guard, bool)):
        raise ShardingError(f"guard must be True, False or None, not {guard!r}.")
    guarded = os.environ.get(GUARD) == "1" if guard is None else guard
    keep_root = reshard_after_forward is not True
    reduction = ReductionPolicy() if reduction is None else reduction
    if not isinstance(reduction, ReductionPolicy):
        raise ShardingError(f"reduction must be a fsdp.ReductionPolicy, not {reduction!r}.")
    if reduction.find_unused_parameters and mesh_kind is not MeshKind.REPLICATE:
        raise ShardingError(
            "reduction.find_unused_parameters needs sharding_strategy='NO_SHARD': under "
            f"{sharding_strategy!r} a unit is gathered by all ranks or none. Some ranks only may use a parameter without it."
        )
    if not isinstance(broadcast_buffers, bool):
        raise ShardingError(f"broadcast_buffers must be True or False, not {broadcast_buffers!r}.")
    precision = _precision(mp_policy)
    return Config(
        reshard_policy,
        mesh_kind,
        keeps_buckets,
        keep_root,
        precision,
        guarded,
        prefetch,
        bool(sync_module_states),
        reduction,
        broadcast_buffers,
    )


def find_strategy(sharding_strategy: Any) -> Sharding:
    """What a strategy stands for, given by name or as a member of torch's enum.

    Raises:
        ShardingError: it is not known.
    """
    name = getattr(sharding_strategy, "name", sharding_strategy)
    if not isinstance(name, str) or name not in STRATEGIES:
        raise ShardingError(f"sharding_strategy {sharding_strategy!r} is not known; choose one of {', '.join(STRATEGIES)}.")
    return STRATEGIES[name]


def _precision(policy: Any) -> MixedPrecisionPolicy:
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, field) for field in fields):
        raise ShardingError(
            f"mp_policy must be a fsdp.MixedPrecisionPolicy (fields {', '.join(fields)}) or torch's class of that "
            f"name, not {policy!r}."
        )
    return MixedPrecisionPolicy(*(getattr(policy, field) for field in fields))
