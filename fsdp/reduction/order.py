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
        self._config = config
        self._by_unit = config.mesh_kind is not MeshKind.REPLICATE
        """True if the buckets of a unit stay together: with gathers between the ranks, a unit's buckets are launched at its
        post-backward (the note in `state_machine.bucket`)."""
        # the gradients of a unit with inner units are complete late: it follows all units that have none
        backwards = range(len(of_unit) - 1, -1, -1)
        self._default = [i for i in backwards if innermost[i]] + [i for i in backwards if not innermost[i]]
        self._learned: dict[tuple[bool, ...], tuple[Sequence[int], Sequence[int]]] = {}
        """The learned orders of units and of buckets. The key says which buckets are trained."""
        self.trained: tuple[bool, ...] = ()
        """For each bucket, whether this backward trains it."""
        self.is_learned = False
        """Whether the order is rank 0's for the buckets that this backward trains."""
        self.arrivals: list[int] = []
        """The buckets in the order in which they became ready in this backward."""
        self.units: Sequence[int] = tuple(self._default)
        """The numbers of all units."""
        self.buckets: Sequence[int] = self._in_units(self._default)
        """The numbers of all buckets."""

    def train(self, trained: tuple[bool, ...]) -> None:
        """Backwards train these buckets from now on: follow the order that was learned for them, if there is one."""
        self.trained, self.is_learned = trained, trained in self._learned
        units, buckets = self._learned.get(trained, (self.units, self.buckets))
        if buckets is not self.buckets:
            self.units, self.buckets = units, buckets
            LOG.info("order of reductions changed with the trainable parameters: %s", [self._buckets[n].name for n in buckets])

    def learn(self, world_comm: Communicator, device: torch.device) -> None:
        """At the end of a backward that synchronised, if the order is not known: adopt rank 0's.

        Traffic: the first such backward of a set of trainable parameters broadcasts one integer a bucket.
        """
        # buckets that never became ready follow in the default order
        every = dict.fromkeys((*self.arrivals, *self._in_units(self._default)))
        arrivals = torch.tensor(list(every), dtype=torch.int64, device=device)
        world_comm.broadcast(arrivals, 0, "the order of reductions").wait()
        numbers = [int(number) for number in arrivals.tolist()]
        present = dict.fromkeys(self._buckets[number].unit for number in numbers)
        self.units = (*present, *(index for index in self._default if index not in present))
        self.buckets = self._in_units(self.units) if self._by_unit else tuple(numbers)
        self._learned[self.trained] = self.units, self.buckets
        self.is_learned = True
        LOG.info("order of reductions learned from rank 0: %s", [self._buckets[number].name for number in self.buckets])

    def relearn(self) -> None:
        """Learn the order anew in the next backward that synchronises."""
        self._learned.clear()
        self.is_learned = False

    def make_groups(self, hooked: bool) -> Sequence[BucketGroup]:
        """The groups of buckets that share a collective, in the agreed order. `hooked`: a comm hook reduces each bucket alone."""
        policy, cap = self._config.reduction, None if hooked else self._config.reduction_bytes
        items = [
            Item(
                size_of(bucket.buffer),
                bucket.group_key,
                any(place.names[0] in policy.triggers for place in bucket.flat.param_infos[:1]),
            )
            for bucket in self._buckets
        ]
        return make_bucket_groups(self.buckets, items, cap, int(policy.first_bucket_mb * 2**20), self._config.tapers)

    def _in_units(self, units: Sequence[int]) -> Sequence[int]:
        """The buckets of these units. Those of one unit go from the last to the first, as its gradients arrive in a backward."""
        return tuple(number for index in units for number in reversed(self._of_unit[index]))
