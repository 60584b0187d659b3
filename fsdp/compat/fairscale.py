"""The names of fairscale, on this engine: import them from here instead of from fairscale.nn."""

from fsdp.fairscale_api.auto_wrap import (
    ConfigAutoWrap,
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from fsdp.fairscale_api.flat_params import FlatParameter, chunk_and_pad
from fsdp.fairscale_api.flatten import FlattenParamsWrapper
from fsdp.fairscale_api.gradients import GradScaler, ShardedGradScaler
from fsdp.fairscale_api.groups import ProcessGroupName, get_process_group_cached
from fsdp.fairscale_api.optim_states import is_singleton_tensor
from fsdp.fairscale_api.recompute import (
    checkpoint_wrapper,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)
from fsdp.fairscale_api.sharding import cast_floats_to_right_precision
from fsdp.fairscale_api.states import no_pre_load_state_dict_hook
from fsdp.fairscale_api.wrapper import FullyShardedDataParallel, TrainingState, get_fsdp_instances

__all__ = [
    "ConfigAutoWrap",
    "FlatParameter",
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "GradScaler",
    "ProcessGroupName",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "cast_floats_to_right_precision",
    "checkpoint_wrapper",
    "chunk_and_pad",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "enable_wrap",
    "get_fsdp_instances",
    "get_process_group_cached",
    "is_checkpointing",
    "is_recomputing",
    "is_singleton_tensor",
    "no_pre_load_state_dict_hook",
    "patch_batchnorm",
    "wrap",
]
