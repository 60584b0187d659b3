"""Routed groups: process groups of the user whose calls end when a rank abandons a step.

Tensor, expert and pipeline parallelism communicate over groups of torch that the user's device mesh has made. A rank that waits
there for one that has abandoned the step would wait until that one ends. So such a group is routed: under its name, by which a
mesh finds it, torch finds a `RoutedGroup`. That forwards each call to connections of ours, which a rank closes when it abandons a
step, and which are opened again for the next one, as those of communicators are (peer_monitor.py). Whoever holds the group of
before still has it, with its own connections.

Rule 1: a group stays routed until torch.distributed is destroyed. No moment before that is the same on all ranks.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from fsdp.comm.communicator import Communicator
from fsdp.comm.failure.desync import WatchedWork, is_of_backend
from fsdp.comm.failure.job_waits import MessageWaits
from fsdp.comm.failure.peer_monitor import ROUTED, PeerMonitor
from fsdp.comm.failure.pending_call import PendingCall, where_of
from fsdp.comm.process_group import ProcessGroupCommunicator
from fsdp.comm.work import Work
from fsdp.errors import WorldError

MESSAGES: Final = ("send", "recv", "recv_anysource")
"""The methods of a group that communicate between two ranks. Ranks call them in no common order."""
COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
"""Those that all ranks call, by their names in every version of torch."""
_NOTHING: Final = torch.empty(0)
_messages: Final = MessageWaits()
_bindings: Any = torch._C._distributed_c10d
_Group: Any = dist.ProcessGroup
_TorchWork: Any = dist.Work


class Beside(weakref.WeakSet[Communicator]):
    """The communicators of all roots that use a group, to be notified of what it finds.

    Its calls may be made outside all units, where no hook of the engine sees an error.
    """

    def abandon(self, failure: WorldError) -> None:
        """Abandon the step of these roots, which cannot end."""
        for comm in self:
            comm.abandon("", failure)


class RoutedCommunicator(ProcessGroupCommunicator):
    """The calls of a routed group, over connections of its own."""

    monitor: PeerMonitor

    def __init__(self, group: dist.ProcessGroup, peers: PeerMonitor) -> None:
        super().__init__(group, ROUTED, peers)
        self._label = group.group_desc
        self.beside = Beside()

    def call(self, kind: str, args: tuple[Any, ...], named: dict[str, Any]) -> "RoutedWork":
        """Make a call of torch."""
        launched: list[Any] = []

        def launch(carrier: Any) -> Any:
            launched.append(getattr(carrier, kind)(*args, **named))
            return launched[0]

        try:
            if kind in MESSAGES:
                work = self._launch_message(kind, launch, args)
            else:  # sizes are not compared: in an all-to-all ranks have their own, and batches may be of several lengths
                work = self._launch(kind, self._label, _NOTHING, launch, 0)
        except WorldError as failure:
            self.beside.abandon(failure)
            raise
        return RoutedWork(work, launched[0], self.beside)

    def _launch_message(self, kind: str, launch: Callable[[Any], Any], args: tuple[Any, ...]) -> Work:
        peers, where = self.monitor, where_of(kind, self._label)
        if peers.down:
            peers.reconnect()
        # no rank has this call in common with another, so it is compared with none
        here = peers.ranks[self.rank]
        other = here if kind == "recv_anysource" else peers.ranks[args[1]]
        name = f"messages {here} to {other}" if kind == "send" else f"messages {other} to {here}"
        number = peers.detector.messages[name] + 1
        describe = partial(PendingCall, name, number, where, "", {}, where=where, among=(other,))
        try:
            message = _Message(launch(peers.connections.get(ROUTED, self.group)), peers.detector, describe)
            peers.detector.messages[name] = number
            return message
        except RuntimeError as failure:
            self._explain(peers, failure, describe)
            raise

    def _explain(self, peers: PeerMonitor, failure: RuntimeError, describe: Callable[[], PendingCall]) -> None:
        if is_of_backend(failure):  # not one of the user's arguments
            super()._explain(peers, failure, describe)


class _Message(WatchedWork):
    """A send or a receive in flight. The host does not look for a reason while it waits: see job_waits.py."""

    __slots__ = ()

    def wait(self) -> None:
        try:
            with _messages.waiting(self._detector.peers, self._describe):
                self._work.wait()
        except RuntimeError as failure:
            try:
                if is_of_backend(failure):
                    self._detector.explain_failure(failure, self._describe().where)
            except WorldError:
                self._detector.peers.disconnect()
                raise
            raise


class RoutedWork(_TorchWork):  # type: ignore[misc]
    """A call in flight, as torch's functions and schedules expect it."""

    def __init__(self, work: Work, of_backend: Any, beside: Beside) -> None:
        super().__init__()
        self._work = work
        self._of_backend = of_backend
        self._beside = beside

    def wait(self, timeout: Any = None) -> bool:
        """Return when the result may be used."""
        if timeout:  # the user asks for an error after that time
            return bool(self._of_backend.wait(timeout))
        try:
            self._work.wait()
        except WorldError as failure:
            self._beside.abandon(failure)
            raise
        return True


class RoutedGroup(_Group):  # type: ignore[misc]
    """Stands for a group of the user, and equals it: torch's records of that group are found by this one too."""

    def __init__(self, group: dist.ProcessGroup, comm: RoutedCommunicator) -> None:
        super().__init__(comm.rank, comm.size)
        # the group's name, its devices, and every call that is not forwarded are those of its backend
        _add_backend(self, group._device_types, group._get_backend(torch.device("cpu")))
        self._set_group_desc(group.group_desc)
        self.comm = comm
        self.beside = comm.beside
        self._hash = hash(group)
        self._stands_for = weakref.ref(group)  # torch owns it

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return other is not None and (other is self or other is self._stands_for())


def _forwarded(kind: str) -> Callable[..., RoutedWork]:
    def call(group: RoutedGroup, *args: Any, **named: Any) -> RoutedWork:
        return group.comm.call(kind, args, named)

    return call


def _of_backend(name: str) -> Callable[..., Any]:
    def ask(work: RoutedWork, *args: Any) -> Any:
        return getattr(work._of_backend, name)(*args)

    return ask


for _name in (*COLLECTIVES, *MESSAGES):
    if hasattr(_Group, _name):
        setattr(RoutedGroup, _name, _forwarded(_name))
for _name in ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank", "synchronize", "get_future"):
    setattr(RoutedWork, _name, _of_backend(_name))


def carrier_of(gloo: Any, devices: Sequence[torch.device]) -> dist.ProcessGroup:
    """A group over new connections, whose methods torch's dispatcher passes on: shards refuse them there."""
    carrier = _Group(gloo.rank(), gloo.size())
    _add_backend(carrier, devices, gloo)
    return carrier  # type: ignore[no-any-return]


def _add_backend(group: Any, devices: Sequence[torch.device], gloo: Any) -> None:
    for device in reversed(devices):  # torch lists the last one first
        group._register_backend(device, _Group.BackendType.GLOO, gloo)
    group._set_default_backend(_Group.BackendType.GLOO)


def route(group: dist.ProcessGroup, comm: RoutedCommunicator) -> RoutedGroup:
    """From now on, find a routed group by the name of `group`."""
    routed = RoutedGroup(group, comm)
    _bindings._unregister_process_group(group.group_name)
    _bindings._register_process_group(group.group_name, routed)
    return routed
