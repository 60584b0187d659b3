"""Apex's name of its data-parallel wrapper, on this engine: import it from here instead of from apex.parallel."""

from fsdp.compat.ddp.apex_wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
