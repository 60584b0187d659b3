"""Whole parameters that stay in memory from pass to pass: which of them are stale when the next pass begins."""

from collections.abc import Sequence

import torch

from fsdp.comm.communicator import Communicator
from fsdp.params.unit import Unit


class StaleParams:
    """The copies of the units that keep theirs always."""

    __slots__ = ("_everyone", "_stepped", "_trained", "_units")

    def __init__(self, units: Sequence[Unit], world_comm: Communicator) -> None:
        self._units = tuple(units)
        self._everyone = world_comm
        self._stepped = True
        """A backward that synchronised has ended since the last pass began: an optimizer may have stepped."""
        self._trained = False
        """The last pass recorded a graph."""

    def backward_synchronised(self) -> None:
        """A backward ended that reduced gradients."""
        self._stepped = True

    def pass_begins(self, kept: Sequence[int]) -> Sequence[int]:
        """Of the units in `kept`, those whose weights may have changed since their gather, on any rank.

        After a backward that synchronised, those of trainable weights; around a pass without gradients, all. Of what is left
        every rank compares version counters and checksums with those of the gather, and tells: a collective of one byte.
        """
        trains = torch.is_grad_enabled()
        everything = not (trains and self._trained)
        stale = [index for index in kept if everything or (self._stepped and self._units[index].trains)]
        left = [index for index in kept if index not in stale]
        if left:
            flag = torch.stack([self._units[index].has_changed() for index in left]).any().to(torch.uint8).view(1)
            self._everyone.all_reduce(flag, "max", "which weights changed").wait()
            if flag.item():
                stale = list(kept)
        # a pass that failed here did not begin, and what may have changed before it may still have
        self._stepped, self._trained = False, trains
        return stale
