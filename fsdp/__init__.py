"""A fully sharded data-parallel engine for PyTorch with an explicit state machine."""

from fsdp.abandoned import agree_abandoned
from fsdp.background import Saving
from fsdp.checkpoint import latest, load
from fsdp.clipping import ShardedGradScaler, clip_grad_norm_
from fsdp.comm_hooks import register_comm_hook
from fsdp.config import MixedPrecisionPolicy, ReductionPolicy
from fsdp.dump import dump_on_signal
from fsdp.errors import IllegalTransition, PeerFailed, ShardingError, WorldError
from fsdp.full_state import full_state_dict, iter_full_params, load_full_state_dict
from fsdp.hugging_face import export_safetensors, load_safetensors
from fsdp.joining import join
from fsdp.methods import register_forward_method
from fsdp.optimizer_state import full_optim_state_dict, load_full_optim_state_dict
from fsdp.outside import full_tensor, to_local
from fsdp.reductions import reducer_stats, relearn_order
from fsdp.saving import save
from fsdp.simulated import simulate
from fsdp.story import story
from fsdp.summon import summon_full_params
from fsdp.wrapper import FullyShardedDataParallel, fully_shard, memory_bytes, no_sync, set_requires_gradient_sync

__all__ = [
    "FullyShardedDataParallel",
    "IllegalTransition",
    "MixedPrecisionPolicy",
    "PeerFailed",
    "ReductionPolicy",
    "Saving",
    "ShardedGradScaler",
    "ShardingError",
    "WorldError",
    "agree_abandoned",
    "clip_grad_norm_",
    "dump_on_signal",
    "export_safetensors",
    "full_optim_state_dict",
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
    "memory_bytes",
    "no_sync",
    "reducer_stats",
    "register_comm_hook",
    "register_forward_method",
    "relearn_order",
    "save",
    "set_requires_gradient_sync",
    "simulate",
    "story",
    "summon_full_params",
    "to_local",
]
