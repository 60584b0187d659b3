"""The names of fairscale, on this engine: import them from here instead of from fairscale.nn.

Start with wrapper.py, the wrapper class. It gives the engine flat parameters (flat_params.py), one unit for each instance.
May use: every package below.
Must not: decide what a unit does; that is the engine's. Import fairscale.
"""

from fsdp.compat.fairscale.auto_wrap import (
    ConfigAutoWrap,
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from fsdp.compat.fairscale.flat_params import FlatParameter, chunk_and_pad
from fsdp.compat.fairscale.flatten import FlattenParamsWrapper
from fsdp.compat.fairscale.gradients import GradScaler, ShardedGradScaler
from fsdp.compat.fairscale.groups import ProcessGroupName, get_process_group_cached
from fsdp.compat.fairscale.optim_states import is_singleton_tensor
from fsdp.compat.fairscale.recompute import (
    checkpoint_wrapper,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)
from fsdp.compat.fairscale.sharding import cast_floats_to_right_precision, get_fsdp_instances
from fsdp.compat.fairscale.states import no_pre_load_state_dict_hook
from fsdp.compat.fairscale.wrapper import FullyShardedDataParallel, TrainingState

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
