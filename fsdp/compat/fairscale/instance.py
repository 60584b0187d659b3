"""What of an instance changes after its constructor, and by which call: its class alone writes it."""

import torch
from torch import nn


class InstanceState(nn.Module):
    """The base of FullyShardedDataParallel."""

    _fsdp_keeps_engine = "call its summon_full_params() and copy what you need"
    """See `fsdp.runtime.registry.KEEPS_ENGINE`."""
    gradient_predivide_factor: float
    gradient_postdivide_factor: float
    no_broadcast_optim_state: bool
    """Whether the optimizer's state of this instance is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers_are_cast = False
        """Whether buffers have the `buffer_dtype`."""
        self.keeps_shards = False
        """Whether `state_dict()` gives shards, for `local_state_dict()`."""
        self.compute_device = torch.device("cpu")
        """Where the instance computes."""
        self.is_lazily_sharded = False
        """Whether the engine takes over at the first use, because there is no process group yet."""

    def set_compute_device(self, device: torch.device) -> None:
        """See `compute_device`."""
        self.compute_device = device

    def set_lazily_sharded(self, lazily: bool) -> None:
        """See `is_lazily_sharded`."""
        self.is_lazily_sharded = lazily

    def set_buffers_are_cast(self, are_cast: bool) -> None:
        """See `buffers_are_cast`."""
        self.buffers_are_cast = are_cast

    def set_keeps_shards(self, keeps: bool) -> None:
        """See `keeps_shards`."""
        self.keeps_shards = keeps

    def set_factors(self, before: float, after: float) -> None:
        """Gradients are divided by these before and after the sum over the ranks."""
        self.gradient_predivide_factor, self.gradient_postdivide_factor = before, after

    def keep_state_on_each_rank(self) -> None:
        """From now on, the optimizer's state of this instance is this rank's own."""
        self.no_broadcast_optim_state = True
