"""The groups of one model together, such as those of shards and of replicas, or of data and of tensor parallelism.

A rank that waits in one group may be awaited in another. So after an abandoned step, each rank reconnects its groups in the same
order. That of all ranks is the first: when they meet there, all know of the failure.

A group sees only the calls of its own ranks. So a rank that has waited long, and found no reason in its group, also publishes its
call for all ranks that have a part of the model, with the number of calls it has made in each of its groups. If all of them have
published one, and each waits for a call that some rank has not made, nobody can go on.
"""

import json
import time
import weakref
from collections.abc import Iterable
from typing import NoReturn, Protocol

from fsdp.comm.failure.desync import STALL_SECONDS, DesyncDetector
from fsdp.comm.failure.pending_call import PendingCall, absent_ranks, describe_deadlock


class Monitor(Protocol):
    """What is needed of the monitor of a group: see `PeerMonitor`."""

    detector: DesyncDetector
    group: str
    ranks: tuple[int, ...]
    down: bool

    def reconnect_alone(self) -> None: ...
    def report_restart(self, rank: int) -> NoReturn: ...


class JointGroups:
    """The groups that have a part of one model on this rank."""

    def __init__(self, joint: Monitor, monitors: Iterable[Monitor]) -> None:
        """`joint`: the monitor of all ranks. `monitors`: those of this rank's groups, in an order that all ranks have."""
        self._joint = weakref.ref(joint)
        self._monitors = [weakref.ref(one) for one in monitors]

    @property
    def monitors(self) -> list[Monitor]:
        """Those of this rank's groups that have not been destroyed, in the order in which they reconnect."""
        return [one for reference in self._monitors if (one := reference()) is not None]

    def find_deadlock(self, monitor: Monitor, pending: PendingCall) -> str | None:
        """Publish the call that this rank waits for in the group of `monitor`; return the error if nobody can go on.

        Raises:
            PeerFailed: nobody can, because a rank has started another forward.
        """
        if (joint := self._joint()) is None:
            return None
        among = [one for one in self.monitors if {*one.ranks} <= {*joint.ranks}]
        if monitor not in among:
            return None
        launched = {f"{one.group}/{comm}": count for one in among for comm, count in one.detector.launched().items()}
        name = f"{monitor.group}/{pending.comm}"
        key = pending.key and f"{monitor.group}/{pending.key}"
        mine = json.dumps(pending._replace(comm=name, key=key, launched=launched))
        joint.detector.store.set(f"across/{joint.detector.rank}", mine)
        found = joint.detector.read_calls("across")
        if len(found) < len(joint.ranks) or not all(_absent(one, found) for one in found.values()):
            return None
        time.sleep(STALL_SECONDS / 4)
        if joint.detector.read_calls("across") != found:  # read at different times, and now known to hold at one time
            return None
        for rank in [rank for rank, one in found.items() if one.is_restart]:
            joint.report_restart(rank)
        return describe_deadlock(found, joint.ranks, _absent)

    def clear(self) -> None:
        """This rank waits no longer."""
        if (joint := self._joint()) is not None:
            joint.detector.store.set(f"across/{joint.detector.rank}", "null")


def _absent(pending: PendingCall, found: dict[int, PendingCall]) -> list[int]:
    """The ranks of the group that have not made the call, nor are about to."""
    return absent_ranks(pending, {rank: theirs for rank, theirs in found.items() if pending.comm in theirs.launched})
