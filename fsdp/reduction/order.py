"""The order in which one root reduces its units and buckets, and the groups that share a collective.

Rule 1: all ranks use the same order. It is a default one until the first backward that synchronises, then rank 0's.
"""

from collections.abc import Sequence

import torch

from fsdp.comm.communicator import Communicator
from fsdp.config import Config, MeshKind
from fsdp.device.storage import size_of
from fsdp.log import LOG
from fsdp.reduction.bucket import Bucket
from fsdp.reduction.bucketing import BucketGroup, Item, make_bucket_groups


class ReductionOrder:
    """The agreed order of units and buckets, learned once for each set of trainable parameters."""

    def __init__(
        self, buckets: Sequence[Bucket], of_unit: Sequence[Sequence[int]], innermost: Sequence[bool], config: Config
    ) -> None:
        self._buckets = buckets
        self._of_unit = of_unit
        self._policy = config.reduction
        self._cap = config.reduction_bytes
        self._tapers = config.tapers
        self._by_unit = config.mesh_kind is not MeshKind.REPLICATE
        """True if the buckets of a unit stay together: with gathers between the ranks, a unit's buckets are launched at its
        post-backward (the note in `state_machine.bucket`)."""
        # the gradients of a unit with inner units are complete late: it follows all units that have none
        backwards = range(len(of_unit) - 1, -1, -1)
        self._default = [i for i in backwards if innermost[i]] + [i for i in backwards if not innermost[i]]
        self._learned: dict[tuple[bool, ...], tuple[Sequence[int], Sequence[int]]] = {}
        """The learned orders of units and of buckets. The key says which buckets are trained."""
        self._trained: tuple[bool, ...] = ()
        """For each bucket, whether this backward trains it."""
        self.arrivals: list[int] = []
        """The buckets in the order in which they became ready in this backward."""
        self.units: Sequence[int] = tuple(self._default)
        """The numbers of all units."""
        self.buckets: Sequence[int] = self._in_units(self._default)
        """The numbers of all buckets."""

    def begin(self, trained: tuple[bool, ...]) -> bool:
        """Begin a backward that trains these buckets; return whether the order changes."""
        self._trained = trained
        self.arrivals = []
        learned = self._learned.get(trained)
        if learned is None or learned[1] is self.buckets:
            return False
        self.units, self.buckets = learned
        LOG.info("order of reductions changed with the trainable parameters: %s", [self._buckets[n].name for n in self.buckets])
        return True

    def learn(self, world_comm: Communicator, device: torch.device) -> bool:
        """At the end of a backward that synchronised: adopt rank 0's order, unless it is known; return whether it was not.

        Traffic: the first such backward of a set of trainable parameters broadcasts one integer a bucket.
        """
        if self._trained in self._learned:
            return False
        # buckets that never became ready follow in the default order
        every = dict.fromkeys((*self.arrivals, *self._in_units(self._default)))
        arrivals = torch.tensor(list(every), dtype=torch.int64, device=device)
        world_comm.broadcast(arrivals, 0, "the order of reductions").wait()
        numbers = [int(number) for number in arrivals.tolist()]
        present = dict.fromkeys(self._buckets[number].unit for number in numbers)
        self.units = (*present, *(index for index in self._default if index not in present))
        self.buckets = self._in_units(self.units) if self._by_unit else tuple(numbers)
        self._learned[self._trained] = self.units, self.buckets
        LOG.info("order of reductions learned from rank 0: %s", [self._buckets[number].name for number in self.buckets])
        return True

    def relearn(self) -> None:
        """Learn the order anew in the next backward that synchronises."""
        self._learned.clear()

    def make_groups(self, hooked: bool) -> Sequence[BucketGroup]:
        """The groups of buckets that share a collective, in the agreed order. `hooked`: a comm hook reduces each bucket alone."""
        items = [
            Item(
                size_of(bucket.buffer),
                bucket.group_key,
                any(place.names[0] in self._policy.triggers for place in bucket.flat.param_infos[:1]),
            )
            for bucket in self._buckets
        ]
        first = int(self._policy.first_bucket_mb * 2**20)
        return make_bucket_groups(self.buckets, items, None if hooked else self._cap, first, self._tapers)

    def _in_units(self, units: Sequence[int]) -> Sequence[int]:
        """The buckets of these units. Those of one unit go from the last to the first, as its gradients arrive in a backward."""
        return tuple(number for index in units for number in reversed(self._of_unit[index]))
