"""torch's name of its data-parallel wrapper, on this engine: import it from here instead of from torch.nn.parallel.

Start with wrapper.py, torch's class. apex_wrapper.py is Apex's, which compat/apex.py exports. Both classes share their module by
fully_shard with NO_SHARD, so every rank keeps the model.
May use: every package below.
Must not: decide what a unit does; that is the engine's. Import Apex.
"""

from fsdp.building.peer_options import PEER_OPTIONS
from fsdp.compat.ddp.wrapper import DistributedDataParallel, TorchDDP
from fsdp.compat.shared.newer_peers import refuses_names_of, stands_in_for

__all__ = ["DistributedDataParallel"]

refuses_names_of(TorchDDP, stands_in_for(TorchDDP, DistributedDataParallel, PEER_OPTIONS))
