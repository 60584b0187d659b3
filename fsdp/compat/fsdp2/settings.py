"""What FSDP2's setters have set on a module, where the engine has no place for it."""

from typing import ClassVar

from torch import nn

from state_machine import ReshardPolicy


class Settings:
    """The settings of one module. They survive when an outer module is wrapped around it."""

    ATTRIBUTE: ClassVar = "_fsdp2_settings"

    __slots__ = ("all_reduces", "divide_factor", "policy", "reduces")

    def __init__(self) -> None:
        self.reduces = True
        """Whether gradients are reduced."""
        self.all_reduces = True
        """Whether gradients are summed over replicas."""
        self.divide_factor: float | None = None
        """The divisor of gradients that was set; None means their number of ranks."""
        self.policy: ReshardPolicy | None = None
        """When unsharded parameters are freed, as `set_reshard_after_forward` has said last."""

    def set_syncs(self, reduces: bool, all_reduces: bool) -> None:
        """Set whether gradients are reduced, and whether they are summed over replicas."""
        self.reduces, self.all_reduces = bool(reduces), bool(all_reduces)

    def set_divide_factor(self, factor: float) -> None:
        """Set the divisor of gradients."""
        self.divide_factor = factor

    def set_policy(self, policy: ReshardPolicy) -> None:
        """Set when unsharded parameters are freed."""
        self.policy = policy


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module. The first call makes them."""
    found: Settings = module.__dict__.setdefault(Settings.ATTRIBUTE, Settings())
    return found
