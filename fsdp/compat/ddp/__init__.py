"""torch's name of its data-parallel wrapper, on this engine: import it from here instead of from torch.nn.parallel."""

from fsdp.building.peer_options import PEER_OPTIONS
from fsdp.compat.ddp.wrapper import DistributedDataParallel, TorchDDP
from fsdp.newer_peers import refuses_names_of, stands_in_for

__all__ = ["DistributedDataParallel"]

refuses_names_of(TorchDDP, stands_in_for(TorchDDP, DistributedDataParallel, PEER_OPTIONS))
