"""The backend "pretend_nccl": a process group between processes, rank r on pretend:r, whose collectives are queued as NCCL's are.

Rule 1: a collective is queued on the stream of its communicator. `wait` makes a stream wait, and never the host.
Rule 2: where ranks launch different collectives, or one launches none, the others wait for ever.
Rule 3: `abort` ends what is in flight without a result, and every later launch raises.
Rule 4: a watchdog ends the process when a collective is not over after the time-out of its group.
"""

import os
import threading
import time
from collections import deque
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fsdp.comm import open_communicators
from tests.support.accelerator.device import NAME, Scheduler, configure, load
from tests.support.accelerator.world import (
    _BLOCKED,
    _BROADCAST,
    _EXCHANGE,
    _GATHER,
    _MAX,
    _SCATTER,
    _SUM,
    PretendWork,
    _scalar_type,
)

BACKEND: Final = "pretend_nccl"
PUMP: Final = 0.002
"""Seconds after which every queue advances by one piece of work, whatever the hosts do."""
ENDED_BY_WATCHDOG: Final = 77
"""The exit status of a process that a watchdog has ended."""
_keys: Final = count()
_groups: Final["list[PretendNccl]"] = []


class PretendNccl(dist.ProcessGroup):
    """The group of one rank. It is its own backend."""

    supports_coalescing: Final = False

    def __init__(self, folder: Path, rank: int, size: int, time_out: timedelta) -> None:
        super().__init__(rank, size)
        self._place = str(folder)
        self._here, self._members = rank, size
        self._stream: Any = None
        self._called = 0
        self._aborted = False
        self._launched: deque[tuple[int, str, float]] = deque()
        """The key of each collective that may be in flight, what it is, and when it was launched."""
        self.options = SimpleNamespace(_timeout=time_out)
        _groups.append(self)

    # what torch asks ----------------------------------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    @property
    def group_name(self) -> str:
        return str(c10d._world.pg_names[self])

    def _get_backend(self, device: torch.device) -> "PretendNccl":
        assert device.type == NAME
        return self

    def abort(self) -> None:
        self._aborted = True
        for key, *_ in list(self._launched):
            load().pa_abort(key)

    # collectives --------------------------------------------------------------------------

    def _launch(self, kind: int, given: Tensor, into: Tensor, elements: int, source: int = 0) -> PretendWork:
        if self._aborted:
            raise RuntimeError("the communicator of pretend_nccl was aborted")
        assert given.device.type == into.device.type == NAME and given.is_contiguous() and into.is_contiguous()
        module = torch.get_device_module(NAME)
        if self._stream is None:
            self._stream = module.Stream(given.device)
        key, self._called = next(_keys), self._called + 1
        self._stream.wait_stream(module.current_stream(given.device))
        load().pa_launch_between_processes(
            *(key, f"{self._place}.{self._called}".encode(), self._members, self._here, kind, source, _scalar_type(given.dtype)),
            *(given.device.index, self._stream.stream_id, given.data_ptr(), into.data_ptr(), elements),
        )
        # only now: the watchdog takes what is not in flight for over
        self._launched.append((key, f"collective {self._called} of kind {kind} with {elements} elements", time.monotonic()))
        if self._aborted:  # meanwhile, by another thread
            load().pa_abort(key)
        event = module.Event()
        event.record(self._stream)
        return PretendWork(event, (given, into))

    def _allgather_base(self, into: Tensor, own: Tensor, options: Any = None) -> PretendWork:
        return self._launch(_GATHER, own, into, own.numel())

    def _reduce_scatter_base(self, into: Tensor, bucket: Tensor, options: Any = None) -> PretendWork:
        return self._launch(_SCATTER, bucket, into, into.numel())

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> PretendWork:
        kind = _MAX if options is not None and options.reduceOp == dist.ReduceOp.MAX else _SUM
        return self._launch(kind, tensors[0], tensors[0], tensors[0].numel())

    def broadcast(self, tensors: list[Tensor], options: Any) -> PretendWork:
        return self._launch(_BROADCAST, tensors[0], tensors[0], tensors[0].numel(), options.rootRank)

    def alltoall_base(self, into: Tensor, sent: Tensor, to: list[int], of: list[int], options: Any = None) -> PretendWork:
        assert not to and not of, "all chunks have one size"
        return self._launch(_EXCHANGE, sent, into, sent.numel() // self._members)

    # the watchdog -------------------------------------------------------------------------

    def watch(self) -> None:
        """End the process if a collective has been in flight for longer than the time-out."""
        while self._launched and not load().pa_in_flight(self._launched[0][0]):
            self._launched.popleft()
        if not self._launched:
            return
        _, what, since = self._launched[0]
        if not self._aborted and time.monotonic() - since > self.options._timeout.total_seconds():
            print(f"watchdog of pretend_nccl: rank {self._here} has waited too long for {what}", flush=True)
            os._exit(ENDED_BY_WATCHDOG)


@_BLOCKED
def _on_blocked(key: int) -> int:
    """The host waits for a collective that a peer has not launched."""
    time.sleep(0.001)
    return 1


def _pump() -> None:
    """Devices work while no host waits for them; and the watchdogs of all groups."""
    while True:
        time.sleep(PUMP)
        load().pa_pump()
        for group in list(_groups):
            group.watch()


def start(rank: int, size: int, folder: Path, time_out: timedelta, scheduler: Scheduler, seed: int = 0) -> None:
    """Make the default process group of this process, which is rank `rank` on pretend:rank."""
    lib = load()
    configure(scheduler, seed)
    lib.pa_on_blocked(_on_blocked)
    torch.get_device_module(NAME).set_device(rank)

    def create(store: Any, group_rank: int, group_size: int, limit: timedelta) -> PretendNccl:
        if group_rank == 0:
            store.set("place", uuid4().hex)
        return PretendNccl(folder / store.get("place").decode(), group_rank, group_size, limit)

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
    threading.Thread(target=_pump, name="pretend device", daemon=True).start()
    # the engine knows NCCL by its name and its device
    mock.patch.object(open_communicators, "_CUDA", torch.device(NAME)).start()
    # torch 2.15 records the collectives of a backend in C++ that does not do so itself; this one is in Python
    recording = {*getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", ()), BACKEND}
    mock.patch.object(c10d, "_FR_SELF_RECORDING_BACKENDS", recording, create=True).start()
    store = _store(rank, size, folder / "port")
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=time_out)


def _store(rank: int, size: int, place: Path) -> Any:
    """A store that rank 0 holds. It writes its port to a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port), encoding="utf-8")
        os.replace(place.with_suffix(".new"), place)
        return store
    while not place.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(place.read_text(encoding="utf-8")), size, wait_for_workers=False)
