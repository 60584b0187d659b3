"""The names of torch's FSDP2, on this engine: import them from here instead of from torch.distributed.fsdp."""

from typing import Any

from torch.distributed import fsdp as _torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp.compat.fsdp2 import wrap as _ours
from fsdp.compat.fsdp2.module import FSDPModule
from fsdp.compat.fsdp2.residence import GradientReductionHandle, UnshardHandle
from fsdp.compat.shared.newer_peers import stands_in_for, takes_arguments_of
from fsdp.runtime.registry import unit_ref_of

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

DataParallelMeshDims: Any = getattr(_torch, "DataParallelMeshDims", None)  # not in torch 2.11
stands_in_for(_torch.FSDPModule, FSDPModule)
# torch's own functions, whatever these names are bound to later
_fully_shard, _register, _share = _torch.fully_shard, _torch.register_fsdp_forward_method, _torch.share_comm_ctx
fully_shard = takes_arguments_of(lambda: _fully_shard, "fully_shard")(_ours.fully_shard)
fully_shard.state = unit_ref_of  # type: ignore[attr-defined]  # of a module, as torch's; None if it is not wrapped
register_fsdp_forward_method = takes_arguments_of(lambda: _register, "register_fsdp_forward_method")(
    _ours.register_fsdp_forward_method
)
share_comm_ctx = takes_arguments_of(lambda: _share, "share_comm_ctx")(_ours.share_comm_ctx)


def __getattr__(name: str) -> Any:
    """Import the stage of pipelines, which takes long, where its name is asked for."""
    if name == "PipelineStage":
        from fsdp.api.pipeline import PipelineStage

        return PipelineStage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
