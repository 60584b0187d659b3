"""Counts what a rehearsal holds, from the operators that are called, and passes their time on the clock."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fsdp.commands.rehearsal.clock import Clock
from fsdp.commands.rehearsal.hardware import Device
from fsdp.commands.rehearsal.kernels import attention_flops
from fsdp.commands.rehearsal.recall import Recall, Recalling, is_collective, opens
from fsdp.device.storage import MemoryTracker, size_of, storage_key
from fsdp.params.gathered_copies import to_local
from fsdp.shards.shard_tensor import local_operators

OPTIMIZER_STATE: Final = "optimizer state"
OPTIMIZER: Final = "what the optimizer computes with"
GRADIENTS: Final = "gradients"
ACTIVATIONS: Final = "activations"
UNSHARDED: Final = "unsharded parameters"
BUCKETS: Final = "buckets"
AT_REST: Final = "buffers and parameters that are not sharded"
KINDS: Final = {
    "shards": "shards",
    "whole": UNSHARDED,
    "bucket": BUCKETS,
    "scratch": BUCKETS,
    "reduced": "reduced gradients",
    "kept": "gradients kept under no_sync",
    "lent": UNSHARDED,
}
"""For each kind of the engine's memory tracker, its name in a plan."""


class Memory(Recalling):  # type: ignore[no-untyped-call]
    """Counts what the model and the optimizer hold, beside what the engine says of itself, and passes time for each operator."""

    def __init__(self, clock: Clock, recall: Recall) -> None:
        super().__init__(recall)
        self._clock = clock
        self._tracker = MemoryTracker()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live = 0
        """Bytes that operators of the model and of the optimizer made and that are alive."""
        self._kept: dict[str, int] = {}
        """Bytes by kind that no operator has made since the last look at them."""
        self._accumulated: Callable[[], Iterable[Tensor]] = tuple
        """The gradients that the engine keeps under no_sync."""
        self._of_both = (0, 0)
        """What the engine says of these, and how much of it operators of the model have made, when it last changed."""
        self._offloaded: set[int] = set()
        """The storages of shards in host memory."""
        self._host_kept: dict[str, int] = {}
        self._host_live = 0
        """Bytes that an optimizer on the host made and that are alive."""
        self._is_on_host = False
        """Whether operators run on the host now."""
        self.host_peak = 0
        self.host_at_peak: dict[str, int] = {}
        self._is_optimizing = False
        self.saved = 0
        """Bytes of activations when the last forward had ended."""
        self.peak = 0
        """The most bytes that were held at once while operators were watched."""
        self.at_peak: dict[str, int] = {}

    def observe(
        self,
        tracker: MemoryTracker,
        accumulated: Callable[[], Iterable[Tensor]],
        at_rest: Iterable[Tensor],
        offloaded: Sequence[Tensor],
    ) -> None:
        """Look at this engine's bytes from now on.

        `accumulated`: returns the gradients that it keeps. `at_rest`: tensors that stay where they are. `offloaded`: shards in
        host memory, as are gradients and optimizer state.
        """
        self._tracker, self._accumulated = tracker, accumulated
        self._offloaded = {storage_key(shard) for shard in offloaded}
        self.hold(AT_REST, sum(map(size_of, at_rest)))
        if offloaded:
            self._host_kept["shards"] = sum(map(size_of, offloaded))

    def hold(self, kind: str, count: int) -> None:
        """From now on `count` bytes of this kind are held."""
        on_host = self._offloaded and kind in (GRADIENTS, OPTIMIZER_STATE)
        (self._host_kept if on_host else self._kept)[kind] = count
        self._note_on_host()

    def hold_gradients(self, model: nn.Module) -> None:
        """From now on the gradients that the model's parameters have now are held."""
        self.hold(GRADIENTS, bytes_of(parameter.grad for parameter in model.parameters()))

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """The optimizer steps inside: on the host, where the shards are there."""
        self._is_optimizing, self._is_on_host = True, bool(self._offloaded)
        try:
            yield
        finally:
            self._is_optimizing = self._is_on_host = False

    def forward_ended(self) -> None:
        """A forward has ended, and its backward has not begun."""
        self.saved = self._live - self._counted_by_both()

    def wait_for_copies(self) -> None:
        """A backward has ended: the host program waits for the copies."""
        if self._offloaded:
            self._clock.wait_for_copies()

    def _note_on_host(self) -> None:
        total = self._host_live + sum(self._host_kept.values())
        if total > self.host_peak:
            self.host_peak = total
            self.host_at_peak = {kind: held for kind, held in {**self._host_kept, OPTIMIZER: self._host_live}.items() if held}

    def note(self) -> None:
        """Compare what is held now with the peak."""
        live = self._live - self._counted_by_both()
        total = self._tracker.now + live + sum(self._kept.values())
        if total > self.peak:
            self.peak = total
            kinds = Counter({OPTIMIZER if self._is_optimizing else ACTIVATIONS: live, **self._kept})
            for kind, held in self._tracker.held.items():
                kinds[KINDS[kind]] += held
            self.at_peak = {kind: held for kind, held in kinds.items() if held}

    def _counted_by_both(self) -> int:
        """Bytes of gradients that the engine keeps, and that operators of the model have made."""
        said, count = self._tracker.held.get("kept", 0), self._of_both[1]
        if said != self._of_both[0]:
            made = {storage_key(one): size_of(one) for one in self._accumulated() if storage_key(one) in self._storages}
            self._of_both = said, (count := sum(made.values()))
        return count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if opens(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = self._recall.call(func, args, kwargs)
        if func.is_view:
            return result
        given = tensors_in((args, kwargs))
        made = [one for one in tensors_in(result) if one.is_meta and not opens((type(one),))]
        known = {storage_key(one) for one in given}
        fresh = [one for one in made if storage_key(one) not in known]
        if self._offloaded and self._passes_time_on_host(func, given, fresh):
            pass
        elif not is_collective(func) and (fresh or any(one.is_meta for one in given)):
            self._clock.compute(_seconds(self._clock.device, func, args, kwargs, result, (*given, *fresh)))
        if fresh and not _in_engine():
            for one in fresh:
                self._add(one.untyped_storage())
            self.note()
        return result

    def _passes_time_on_host(self, func: Any, given: Sequence[Tensor], fresh: Sequence[Tensor]) -> bool:
        """Pass the time of an operator of an optimizer on the host, or of a copy of a shard to the device. False for others."""
        if self._is_on_host:
            self._clock.compute_on_host(sum(map(_local_size, (*given, *fresh))))
        elif func is torch.ops.aten.copy_.default and storage_key(given[1]) in self._offloaded:
            self._clock.upload(size_of(given[1]))
        else:
            return False
        return True

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            size = storage.nbytes()
            self._count(size, self._is_on_host)
            self._storages[key] = weakref.ref(storage, partial(self._release, key, size, self._is_on_host))

    def _release(self, key: int, size: int, on_host: bool, _: Any) -> None:
        del self._storages[key]
        self._count(-size, on_host)

    def _count(self, size: int, on_host: bool) -> None:
        if on_host:
            self._host_live += size
            self._note_on_host()
        else:
            self._live += size


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dicts, as arguments and results of an operator are. The pytree of torch takes longer."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_in(tuple(value.values()))
    return [one for item in value for one in tensors_in(item)] if isinstance(value, tuple | list) else []


def bytes_of(values: Iterable[Any]) -> int:
    """Bytes of the memory behind the tensors among these values, each memory once."""
    tensors = [to_local(value) for value in values if isinstance(value, Tensor) and value.is_meta]
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _local_size(tensor: Tensor) -> int:
    """Bytes of the elements on this rank: a shard shows the sizes of the full parameter."""
    with local_operators():
        return tensor.shape.numel() * tensor.element_size()


def _seconds(device: Device, func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]) -> float:
    """What an operator takes: its operations, where torch counts them, or its traffic with the memory."""
    traffic = sum(map(_local_size, tensors)) / device.bandwidth
    flops = attention_flops(func, args, kwargs)
    if flops is None:
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return traffic
        flops = float(count(*args, **kwargs, out_val=result))
    return max(traffic, flops / device.flops_of(tensors[0].dtype))


_OF_THE_USER: Final = ("torch.nn.modules", "torch.optim", "fsdp.autograd.engine_calls")
"""Modules whose operators are the model's or the optimizer's. The last one calls torch's autograd, which runs the backward."""


def _in_engine() -> bool:
    """Whether the engine, and neither the model nor an optimizer, calls the operator."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OF_THE_USER):
            return False
        if not name.startswith(("torch.", "fsdp.commands.rehearsal", "fsdp.commands.planning")) and name != "torch":
            return bool(name.startswith("fsdp."))
        frame = frame.f_back  # type: ignore[assignment]
    return False
