"""torch's name of its data-parallel wrapper, on this engine: import it from here instead of from torch.nn.parallel."""

from fsdp.ddp_api.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
