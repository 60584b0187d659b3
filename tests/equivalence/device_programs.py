"""What happens to the others when a rank abandons a step or dies, with collectives on a device. Run as a script, it is one rank.

python -m tests.equivalence.device_programs RANK WORLD_SIZE FOLDER PROGRAM ...

After "--nccl" each rank has a device. Without it there is none: collectives are gloo's, and whoever waits for one waits as a host
does in CUDA. Nobody looks for a reason, and only the collective itself or an abort ends it, which leaves what was to be filled.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist

import fsdp
from fsdp.comm import open_communicators
from fsdp.comm.failure.watchdog import DevicePeerMonitor
from fsdp.comm.process_group import ProcessGroupCommunicator
from tests.equivalence import peer_programs
from tests.equivalence.peer_programs import LIMIT, Mine, Told, kill, told
from tests.support.models import CASES, is_at_rest, loss_of

aborted = Event()


class OnDevice:
    """A collective that the host has launched, and knows no more of."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        while not aborted.is_set():
            try:
                self._work.wait(timedelta(milliseconds=100))
            except RuntimeError:
                time.sleep(0.01)  # it takes longer; or broke because a peer has ended, which is not heard on a device
            else:
                return


def launch(self: ProcessGroupCommunicator, kind: str, label: str, tensor: torch.Tensor, launch: Any, nbytes: int = 0) -> Any:
    """Instead of `_launch`, whose tensors are on the host here."""
    peers = self.monitor
    assert isinstance(peers, DevicePeerMonitor)
    if peers.down or peers.pending_error is not None:
        peers.reconnect()
    note = peers.sequences[self.name].check_call(kind, label, nbytes or tensor.nbytes)
    return peers.launch_on_device(self.name, note, lambda: OnDevice(launch(self.group)))


def abort(reference: "ref[dist.ProcessGroup]") -> None:
    aborted.set()


def stand_in() -> None:
    """For devices."""
    open_communicators._gloo = lambda group: None
    open_communicators._carries_on_device = lambda group: True
    open_communicators._abort = abort
    ProcessGroupCommunicator._launch = launch  # type: ignore[method-assign]


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    backend = "gloo"
    if names[0] == "--nccl":
        backend, names = "nccl", names[1:]
        torch.cuda.set_device(rank)
    else:
        stand_in()
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=10 * LIMIT),
    )
    found = {}
    for name in names:
        found[name] = PROGRAMS[name](rank), aborted.is_set()
        torch.save(found, folder / f"{rank}.pt")  # the last one may end it
    # what was aborted may still be in flight, which an end would wait for
    os._exit(0)


def cannot_go_on(how: Callable[[], None]) -> Callable[[int], list[Told]]:
    """The last rank fails in the third step, and all want to start it again; what each was told."""

    def program(rank: int) -> list[Told]:
        case, device = CASES["net"], "cuda" if dist.get_backend() == "nccl" else "cpu"
        model = fsdp.fully_shard(case.model().to(device), auto_wrap_policy=case.policy)
        heard: list[Told] = []
        for step in range(3):
            if rank == dist.get_world_size() - 1 and step == 2:
                model.blocks[1].up.register_forward_pre_hook(lambda *_: how())
            while len(heard) < 2:
                try:
                    loss = loss_of(model(case.batch(rank, step).to(device)))
                    loss.backward()
                    loss.item()  # on a device, the host waits here
                    break
                except (Mine, fsdp.WorldError) as error:
                    assert is_at_rest(model), fsdp.story(model)
                    heard.append(told(error))
        return heard

    return program


PROGRAMS: Final = {
    "all fail in a backward": peer_programs.PROGRAMS["all fail in a backward"],
    "fails": cannot_go_on(peer_programs.fail),
    "killed": cannot_go_on(kill),
}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
