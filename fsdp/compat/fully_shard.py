"""The names of torch's FSDP2, on this engine: import them from here instead of from torch.distributed.fsdp."""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from fsdp.fully_shard_api.module import FSDPModule
from fsdp.fully_shard_api.residence import UnshardHandle
from fsdp.fully_shard_api.wrap import fully_shard, register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
