"""Apex's name of its data-parallel wrapper, on this engine: import it from here instead of from apex.parallel."""

from fsdp.ddp_api.apex_wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
