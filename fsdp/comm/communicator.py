"""The one interface for collectives.

Rule 1: only methods of a `Communicator` communicate. Its subclasses override each of them, and what they do is sent always.
Rule 2: every rank of a communicator calls the same methods in the same order.
Rule 3: a rank that is alone has a communicator too, so callers need not ask for the number of ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fsdp.comm.failure.peer_monitor import PeerMonitor
from fsdp.comm.failure.pending_call import Wait
from fsdp.comm.work import DONE, Work, Works, WorkThen
from fsdp.errors import PeerFailed, WorldError

ReduceOp = Literal["sum", "max"]
Recorder = Callable[[str, str, int, Callable[[], Work]], Work]
"""Launches a collective, and returns a work that records its end. Takes its kind, its label, the bytes received, its launch."""


class Communicator:
    """Collectives among the ranks of one group, one after the other. `label` names the unit in errors and traces.

    As they stand here, those of a rank that is alone: nothing is sent. What looks for ranks that have failed does nothing without
    a monitor.
    """

    name: str = ""
    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = ()
    """The numbers of its ranks among all of the program; none of a rank that is alone."""
    monitor: PeerMonitor | None = None
    """Finds out whether its other ranks have failed."""
    recorder: Recorder | None = None
    """Launches the collectives while a trace is made."""

    def supports_device(self, device: torch.device) -> bool:
        """Whether tensors on `device` can be communicated."""
        return True

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        """Fill `unsharded` (W * C,) with the chunks of all ranks. This rank's chunk is in its place already.

        The chunks travel as bytes. Callers that gather often keep two views as bytes (uint8) and give both: `unsharded`, and
        `own`, which is this rank's chunk.

        Traffic: this rank receives (W - 1) * C elements.
        """
        return DONE

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
        """Sum chunk `rank` of every rank's `bucket` (W * C,) into `into` (C,). The sum is there after `wait`.

        `bucket` must not be changed before `wait` returns. With `fixed_order`, the bits are those of `pairwise_sum` on every
        backend.

        Traffic: this rank receives (W - 1) * C elements.
        """
        into.copy_(bucket)
        return DONE

    def supports_coalescing(self, device: torch.device, fixed_order: bool = False) -> bool:
        """Whether `reduce_scatter_coalesced` can be called for tensors on `device`."""
        return False

    def reduce_scatter_coalesced(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> Work:
        """`reduce_scatter` each bucket: as one operation of the backend where that supports it, else one after the other."""
        return Works([self.reduce_scatter(bucket, chunk, label) for bucket, chunk in zip(buckets, into, strict=True)])

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        """Combine `tensor` (any shape) over all ranks, in place.

        A sum with `fixed_order` has the bits of `pairwise_sum`. It communicates a second time in `wait`, so every rank must
        wait for such collectives in the same order, and call nothing else on this communicator in between.

        Traffic: this rank receives 2 (W - 1) / W of the tensor.
        """
        return DONE

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        """Overwrite `tensor` (any shape, contiguous) with the one of rank `source` of the group. It travels as bytes."""
        return DONE

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        """Return the picklable `thing` of every rank, by rank. Slow: for construction and errors."""
        return [thing]

    def recent(self) -> Sequence[str]:
        """Return the last calls on this rank, oldest first: the collective and the label."""
        return ()

    def waits(self) -> Wait | None:
        """Return in which call this rank has waited since when for which ranks; None unless it waits long."""
        wait = None if self.monitor is None else self.monitor.detector.wait
        return None if wait is None or wait.pending.comm != self.name else wait

    def epoch(self) -> int:
        """Return a number that increases with every abandoned step of any model on this communicator."""
        return 0 if self.monitor is None else self.monitor.epoch

    def announce_restart(self, unit: str) -> PeerFailed | None:
        """Announce a forward that begins although the previous one had no backward. Returns when all ranks have done so.

        If the other ranks are in the backward of the previous forward, they abandon it with an error, which is returned here.
        """
        return None if self.monitor is None else self.monitor.announce_restart(self.name, unit)

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """Notify the other ranks, which may wait for this one, that it abandons a step. Does not wait for them."""
        if self.monitor is not None:
            self.monitor.abandon(unit, failure)

    def find_failed_peer(self) -> WorldError | None:
        """Return the error about another rank that has ended or has abandoned the step, if there is one. Does not wait."""
        try:
            if self.monitor is not None:
                self.monitor.check_peers(broken=False)
        except WorldError as reason:
            return reason
        except RuntimeError:  # the store has gone
            return None
        return None

    def completed(self) -> None:
        """Count a backward that ended without an error."""
        if self.monitor is not None:
            self.monitor.backward_completed()

    def reconnect(self) -> None:
        """After an abandoned step: wait for the other ranks, and connect to them for the next step."""
        if self.monitor is not None and self.monitor.down:
            self.monitor.reconnect()


class CarriesHostTensors:
    """For a communicator whose backend sends tensors of a device only, as NCCL does: tensors on the host travel as copies.

    Shards in host memory, their gradients and their optimizer state are such tensors. Buckets never are: they are reduced on the
    device. A subclass names this class first.
    """

    @property
    def carrier(self) -> torch.device:
        """The device on which the copies are made."""
        raise NotImplementedError

    def _carried(self, tensor: Tensor, launch: Callable[[Tensor], Work]) -> Work:
        """Launch a collective of a tensor of a device, or of a copy of one on the host. `wait` copies it back; the host waits."""
        if tensor.device.type != "cpu":
            return launch(tensor)
        copy = tensor.to(self.carrier)
        return WorkThen(launch(copy), partial(tensor.copy_, copy))

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        parent: Any = super()
        return self._carried(unsharded, lambda one: parent.all_gather(one, label, own if one is unsharded else None))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        parent: Any = super()
        return self._carried(tensor, lambda one: parent.all_reduce(one, op, label, fixed_order))

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        parent: Any = super()
        return self._carried(tensor, lambda one: parent.broadcast(one, source, label))


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes. No backend knows every dtype, and all know bytes."""
    return tensor.view(-1).view(torch.uint8)
