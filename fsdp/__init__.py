"""A fully sharded data-parallel engine for PyTorch with an explicit state machine.

Start with `fsdp.FullyShardedDataParallel`. Every public name is imported here. Names that are only in a subpackage may change.
"""

from typing import TYPE_CHECKING, Any

from fsdp.api.clip_and_scale import ShardedGradScaler, clip_grad_norm_
from fsdp.api.forward_methods import register_forward_method
from fsdp.api.host_memory import offload, onload
from fsdp.api.recovery import agree_abandoned
from fsdp.api.reductions import reducer_stats, register_comm_hook, relearn_order
from fsdp.api.summon import full_parameters, summon_full_params
from fsdp.api.trace import Trace, memory_bytes, stats, story, trace
from fsdp.api.unwrap import unwrap
from fsdp.api.wrap import FullyShardedDataParallel, fully_shard, no_sync, set_requires_gradient_sync
from fsdp.checkpoint.background import Saving
from fsdp.checkpoint.hf_safetensors import export_safetensors, load_safetensors
from fsdp.checkpoint.load import latest, load
from fsdp.checkpoint.save import save
from fsdp.comm.simulated import simulate
from fsdp.commands.planning.comparison import Plan
from fsdp.commands.planning.measure import measure_links
from fsdp.commands.planning.plan import plan
from fsdp.config import MixedPrecisionPolicy, OffloadPolicy, ReductionPolicy
from fsdp.debug.dump_on_signal import dump_on_signal
from fsdp.errors import (
    IllegalTransition,
    InputsExhausted,
    NoMemoryYet,
    PeerFailed,
    ShardingAssertion,
    ShardingError,
    StateMismatch,
    WorldError,
)
from fsdp.params.gathered_copies import full_tensor, to_local
from fsdp.runtime.uneven.common_path import empty_backward, meet
from fsdp.runtime.uneven.join import join
from fsdp.state_dict.ema import EMA
from fsdp.state_dict.full_state import full_state_dict, iter_full_params, load_full_state_dict
from fsdp.state_dict.optim_state import full_optim_state_dict, load_full_optim_state_dict

if TYPE_CHECKING:
    from fsdp.api.pipeline import PipelineStage

__all__ = [
    "EMA",
    "FullyShardedDataParallel",
    "IllegalTransition",
    "InputsExhausted",
    "MixedPrecisionPolicy",
    "NoMemoryYet",
    "OffloadPolicy",
    "PeerFailed",
    "PipelineStage",
    "Plan",
    "ReductionPolicy",
    "Saving",
    "ShardedGradScaler",
    "ShardingAssertion",
    "ShardingError",
    "StateMismatch",
    "Trace",
    "WorldError",
    "agree_abandoned",
    "clip_grad_norm_",
    "dump_on_signal",
    "empty_backward",
    "export_safetensors",
    "full_optim_state_dict",
    "full_parameters",
    "full_state_dict",
    "full_tensor",
    "fully_shard",
    "iter_full_params",
    "join",
    "latest",
    "load",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "measure_links",
    "meet",
    "memory_bytes",
    "no_sync",
    "offload",
    "onload",
    "plan",
    "reducer_stats",
    "register_comm_hook",
    "register_forward_method",
    "relearn_order",
    "save",
    "set_requires_gradient_sync",
    "simulate",
    "stats",
    "story",
    "summon_full_params",
    "to_local",
    "trace",
    "unwrap",
]

__version__ = "0.1.0"
"""The one place of the version. pyproject.toml reads it from here."""


def __getattr__(name: str) -> Any:
    """Import what few programs use, and what takes long to import."""
    if name == "PipelineStage":
        from fsdp.api.pipeline import PipelineStage

        return PipelineStage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and those with double underscores. Subpackages are not public."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
