"""Whether the weights of a unit have changed: the version counters and checksums of its shards. Read and compared here alone."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.device.streams import readable_device
from fsdp.params.flat_buffer import FlatBuffer, sum_of_bits
from fsdp.shards.shard_parameter import moved_shards
from fsdp.shards.shard_tensor import quick_attributes

_VERSION: Final = attrgetter("_version")


class Versions:
    """The clocks of the shards of one unit."""

    def __init__(self, flats: Sequence[FlatBuffer]) -> None:
        self._flats = tuple(flats)
        self._movable = tuple([flat for flat in flats if not flat.placements[0].refuses_data])
        """Those whose shards the user may point at other memory."""
        self._asks_addresses = any([flat.asks_addresses for flat in self._movable])
        self._repeated = 0
        """How many changes were made by recomputes, which repeat those of a forward."""
        self._written_back = 0
        """How many changes were made by this library, which copied in-place updates of a forward to the shards."""
        self.at_forward = 0
        """What `now` was when the last forward of the unit began."""
        self._at_gather = 0
        self._others_at_gather = 0
        self._copies = any([not flat.is_shared for flat in flats])
        self._at_pass = 0
        self._places = 0
        self._sums: Tensor | None = None
        """The checksums that were noted last; None before the first time."""
        self._when_made = self.now()

    def now(self) -> int:
        """Another number after every in-place change of a shard, but for those that a recompute repeats.

        Also another one while the user has pointed a sharded parameter at other memory.
        """
        counts = -self._repeated
        with quick_attributes():
            for flat in self._flats:
                counts += sum(map(_VERSION, flat.sharded_params))
        return counts + self._count_places() if self._asks_addresses or moved_shards.data else counts

    @property
    def changed_since_made(self) -> bool:
        """Whether a shard was changed in place since the unit was made."""
        return self.now() != self._when_made

    def repeat(self, changes: int) -> None:
        """So many of the last changes were made a second time, and are no reason to refuse a backward."""
        self._repeated += changes

    def write_back(self, changes: int) -> None:
        """So many of the last changes were made by this library."""
        self._written_back += changes

    @property
    def of_others(self) -> int:
        """Another number after every in-place change of a shard, but for those that this library makes."""
        return self.now() + self._repeated - self._written_back

    def invalidate(self) -> None:
        """The shards are gone: whatever computed with them before must not go on."""
        self._repeated -= 1 << 40

    def forward_begins(self) -> int:
        """A forward of the unit begins; return the number that its backward must find again."""
        self.at_forward = self.now()
        return self.at_forward

    def pass_begins(self) -> None:
        """A pass of the root begins."""
        self._at_pass = self.now()

    @property
    def moved_in_pass(self) -> bool:
        """Whether the counters had moved since the last pass began when the last copy was gathered."""
        return self._at_gather != self._at_pass

    def before_gather(self, in_backward: bool) -> None:
        """A copy is about to be gathered: note where the shards lie, and outside any backward what they are at."""
        self._places = self._count_places()
        if not in_backward:
            self._at_gather = self.now()
            self._others_at_gather = self._at_gather + self._repeated - self._written_back

    @property
    def is_copy_of_earlier(self) -> bool:
        """Whether others have changed a shard since the last copy was gathered."""
        return self._copies and self.now() + self._repeated - self._written_back != self._others_at_gather

    @property
    def is_copy_of_others(self) -> bool:
        """Whether the last copy was gathered while a sharded parameter lay in other memory than now."""
        return self._places != self._count_places()

    def _count_places(self) -> int:
        return sum([flat.places for flat in self._movable]) if self._asks_addresses or moved_shards.data else 0

    @property
    def moved(self) -> bool:
        """Whether the counters had moved since the gather when the last forward began."""
        return self.at_forward != self._at_gather

    def remember_sums(self) -> None:
        """A copy is about to be gathered: note the checksums of what it will be a copy of."""
        self._sums = self._count_sums()

    def has_changed(self) -> Tensor:
        """Whether a shard was changed, also through `.data`, or replaced, since then: () bool, on the device of the shards."""
        if self._sums is None or self.now() != self._at_gather or any(flat.is_replaced for flat in self._flats):
            return torch.ones((), dtype=torch.bool, device=readable_device(self._flats[0].device))
        if self._sums.is_meta:
            return torch.zeros((), dtype=torch.bool)  # a rehearsal changes no weight in secret
        return (self._count_sums() != self._sums).any()

    def _count_sums(self) -> Tensor:
        """Of each flat buffer, the sum of its bits, taken as numbers of four bytes."""
        with torch.no_grad():
            return torch.stack([sum_of_bits(flat.shard) for flat in self._flats])


def any_changed(asked: Sequence[Versions], world_comm: Communicator) -> bool:
    """Whether any rank has changed any of these weights since their gather.

    Traffic: one byte, reduced over all ranks.
    """
    flag = torch.stack([versions.has_changed() for versions in asked]).any().to(torch.uint8).view(1)
    world_comm.all_reduce(flag, "max", "which weights changed").wait()
    return bool(flag.item())
