"""How a unit is to be sharded: frozen, validated once, given once."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from fsdp.errors import ShardingError
from fsdp.groups import Grouping
from state_machine import Strategy


class Sharding(NamedTuple):
    """What a name of a strategy stands for."""

    strategy: Strategy
    grouping: Grouping


STRATEGIES: Final[dict[str, Sharding]] = {
    "FULL_SHARD": Sharding(Strategy.FREE_AFTER_FORWARD, Grouping.SHARDED),
    "SHARD_GRAD_OP": Sharding(Strategy.KEEP_AFTER_FORWARD, Grouping.SHARDED),
    "HYBRID_SHARD": Sharding(Strategy.FREE_AFTER_FORWARD, Grouping.HYBRID),
    "NO_SHARD": Sharding(Strategy.KEEP_AFTER_FORWARD, Grouping.REPLICATED),
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
class Config:
    """The options of one unit, checked and normalised."""

    strategy: Strategy
    grouping: Grouping
    keep_root: bool
    """Whether the unit keeps its whole parameters after the forward when it turns out to be the root's own."""
    mp_policy: MixedPrecisionPolicy
    prefetch: int
    """How many units may be gathered ahead of the one that computes."""
    sync_module_states: bool

    @property
    def root_strategy(self) -> Strategy:
        """The strategy of this unit where it is the root's own."""
        return Strategy.KEEP_AFTER_FORWARD if self.keep_root else self.strategy


def make_config(
    sharding_strategy: str | Any = "FULL_SHARD",
    reshard_after_forward: bool | None = None,
    mp_policy: Any = None,
    prefetch: int = 1,
    sync_module_states: bool = False,
) -> Config:
    """Check the options against each other.

    Raises:
        ShardingError: an unknown strategy, or two options that contradict each other.
    """
    strategy, grouping = find_strategy(sharding_strategy)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ShardingError(f"reshard_after_forward must be True, False or None, not {reshard_after_forward!r}.")
    if reshard_after_forward is True and strategy is Strategy.KEEP_AFTER_FORWARD:
        raise ShardingError(
            f"reshard_after_forward=True contradicts sharding_strategy={sharding_strategy!r}, which keeps the whole parameters "
            "between forward and backward; leave one of them out."
        )
    if reshard_after_forward is False:
        strategy = Strategy.KEEP_AFTER_FORWARD
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ShardingError(f"prefetch must be a number of units, 0 or more, not {prefetch!r}.")
    keep_root = reshard_after_forward is not True
    return Config(strategy, grouping, keep_root, _precision(mp_policy), prefetch, bool(sync_module_states))


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
