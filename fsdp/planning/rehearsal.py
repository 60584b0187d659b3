"""Runs the real engine for one choice of options: two steps of rank 0, on the meta device, over communicators that send nothing.

Rule 1: bytes of the engine are those that its own memory tracker counts, so they are exact.
Rule 2: what the model and the optimizer allocate is counted by storage, from the operator that makes it to its release.
Rule 3: time is that of clock.py. An operator takes its operations over the device's throughput, or its bytes over the device's
        bandwidth, whichever is longer.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from fsdp.api.wrap import fully_shard, no_sync
from fsdp.comm.simulated import play
from fsdp.device.storage import MemoryTracker, size_of, storage_key
from fsdp.errors import ShardingError
from fsdp.params.external_use import to_local
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.planning.clock import Clock
from fsdp.planning.communicator import Collective, RehearsedRank, last_of_reductions
from fsdp.planning.hardware import Cluster, Device
from fsdp.planning.recall import Recall, Recalling
from fsdp.runtime.registry import engines_in

WARM_UP: Final = 1
"""Steps before the one that is reported: the first step learns the order of units, by which the next one prefetches."""
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


class Batch(NamedTuple):
    """What one forward takes."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Job:
    """What is trained: the same for every choice."""

    build: Callable[[], nn.Module]
    """Makes the model, with every tensor on the meta device."""
    batch: Callable[[], Batch]
    """Makes a rank's micro-batch on the meta device."""
    loss: Callable[[Any], Tensor]
    """From what the model returns to a scalar."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
    world_size: int
    cluster: Cluster
    micro_batches: int = 1
    """Forwards and backwards before each step of the optimizer. All but the last one run under no_sync."""
    recall: Recall = field(default_factory=Recall, compare=False)
    """The results of operators, shared by all rehearsals of the job."""


@dataclass(frozen=True)
class Rehearsal:
    """What the last step of rank 0 did."""

    peak: int
    """Bytes: the most that were held at once."""
    held: Mapping[str, int]
    """Bytes by kind at that moment."""
    engine_peak: int
    """Bytes: the most that the engine held at once, as `fsdp.memory_bytes(model, peak=True)` says after the same steps."""
    collectives: tuple[Collective, ...]
    """Of tensors, in the order of their launch."""
    padding: int
    """Bytes of the shards of all ranks together that belong to no parameter."""
    units: int
    seconds: float
    """Of one step, estimated."""
    computing: float
    """Seconds of it, estimated."""
    exposed: Mapping[str, float]
    """Seconds of waiting for collectives, by unit, and for copies from and to the host, estimated."""
    latency: float
    """Seconds that the collectives would take if they sent nothing."""
    host_peak: int = 0
    """Bytes of host memory with an offload policy: the most that were held at once."""
    host_held: Mapping[str, int] = field(default_factory=dict)
    """These bytes by kind."""

    @property
    def received(self) -> int:
        """Bytes that reach the rank in one step."""
        return sum(one.received for one in self.collectives)


def rehearse(
    job: Job, options: Mapping[str, Any], checkpointed: Callable[[nn.Module], list[nn.Module]] | None = None
) -> Rehearsal:
    """Run the job with these options of `fully_shard`. `checkpointed`: the modules whose activations are recomputed.

    Raises:
        ShardingError: the engine refuses the options, or the model does something that needs values.
    """
    clock = Clock(job.cluster)
    memory = _Memory(clock, job.recall)
    on_host = job.cluster.device.name == "cpu"
    played = RehearsedRank(job.world_size, clock, on_host, memory.note)
    with play(played), _no_garbage_collection():
        with Recalling(job.recall):
            model = job.build()
        for module in checkpointed(model) if checkpointed is not None else ():
            module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(model, param_init_fn=_keep_values, **options)
        (engine,) = engines_in(model, "plan")
        offloaded = [flat.shard for unit in engine.units for flat in unit.flats if flat.is_offloaded]
        memory.observe(engine.tracker, chain(model.buffers(), _not_sharded(model, engine.units)), offloaded)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = job.optimizer(parameters) if job.optimizer is not None and parameters else None
        with Recalling(job.recall):
            for _ in range(WARM_UP):
                _step(job, model, optimizer, memory)
        if offloaded:
            played.copy_to_host(last_of_reductions(played.launched))
        played.launched.clear()
        clock.exposed.clear()
        began, computed, latency = clock.now, clock.computing, clock.latency
        with memory:
            _step(job, model, optimizer, memory)
        return Rehearsal(
            peak=memory.peak,
            held=dict(memory.at_peak),
            engine_peak=engine.tracker.peak,
            collectives=tuple(played.launched),
            padding=sum(_padding(flat) for unit in engine.units for flat in unit.flats),
            units=len(engine.units),
            seconds=clock.now - began,
            computing=clock.computing - computed,
            exposed=dict(clock.exposed),
            latency=clock.latency - latency,
            host_peak=memory.host_peak,
            host_held=dict(memory.host_at_peak),
        )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage: looking through all objects takes a seventh of a plan, and counts must not depend on its moments."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer | None, memory: "_Memory") -> None:
    for number in range(job.micro_batches):
        batch = job.batch()
        try:
            with no_sync(model) if number < job.micro_batches - 1 else nullcontext():
                torch.autograd.backward(job.loss(model(*batch.args, **batch.kwargs)))
        except Exception as reason:
            raise ShardingError(
                f"plan: a forward and backward on the meta device failed ({type(reason).__name__}: {reason}); give inputs that "
                "fit the model, and a model that does not read the value of a tensor, because tensors have none there."
            ) from reason
        memory.wait_for_copies()
        memory.hold(GRADIENTS, _bytes_of(parameter.grad for parameter in model.parameters()))
    if optimizer is not None:
        with memory.optimizing():
            # without a closure the engine calls the operators of torch's optimizers where no mode sees them
            optimizer.step(*([_no_loss] if type(optimizer).__module__.startswith("torch.optim") else []))
        memory.hold(OPTIMIZER_STATE, _bytes_of(value for values in optimizer.state.values() for value in values.values()))
    model.zero_grad()
    memory.hold(GRADIENTS, 0)


def _no_loss() -> float:
    """The closure of an optimizer: the forward and the backward are over."""
    return 0.0


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the model and the optimizer hold, beside what the engine says of itself, and passes time for each operator."""

    def __init__(self, clock: Clock, recall: Recall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._recall = recall
        self._tracker = MemoryTracker()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live = 0
        """Bytes that operators of the model and of the optimizer made and that are alive."""
        self._kept: dict[str, int] = {}
        """Bytes by kind that no operator has made since the last look at them."""
        self._offloaded: set[int] = set()
        """The storages of shards in host memory."""
        self._host_kept: dict[str, int] = {}
        self._host_live = 0
        """Bytes that an optimizer on the host made and that are alive."""
        self._is_on_host = False
        """Whether operators run on the host now."""
        self.host_peak = 0
        self.host_at_peak: dict[str, int] = {}
        self.peak = 0
        """The most bytes that were held at once while operators were watched."""
        self.at_peak: dict[str, int] = {}

    def observe(self, tracker: MemoryTracker, at_rest: Iterable[Tensor], offloaded: Sequence[Tensor]) -> None:
        """Look at this engine's bytes from now on.

        `at_rest`: tensors that stay where they are. `offloaded`: shards in host memory, as are gradients and optimizer state.
        """
        self._tracker = tracker
        self._offloaded = {storage_key(shard) for shard in offloaded}
        self.hold(AT_REST, sum(map(size_of, at_rest)))
        if offloaded:
            self._host_kept["shards"] = sum(map(size_of, offloaded))

    def hold(self, kind: str, count: int) -> None:
        """From now on `count` bytes of this kind are held."""
        on_host = self._offloaded and kind in (GRADIENTS, OPTIMIZER_STATE)
        (self._host_kept if on_host else self._kept)[kind] = count
        self._note_on_host()

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """The optimizer steps inside: on the host, where the shards are there."""
        self._is_on_host = bool(self._offloaded)
        try:
            yield
        finally:
            self._is_on_host = False

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
        total = self._tracker.now + self._live + sum(self._kept.values())
        if total > self.peak:
            self.peak = total
            kinds = Counter({ACTIVATIONS: self._live, **self._kept})
            for kind, held in self._tracker.held.items():
                kinds[KINDS[kind]] += held
            self.at_peak = {kind: held for kind, held in kinds.items() if held}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As of `Recalling`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._recall.call(func, args, kwargs)
        if func.is_view:
            return result
        given = _tensors_in((args, kwargs))
        made = [one for one in _tensors_in(result) if one.is_meta]
        known = {storage_key(one) for one in given}
        fresh = [one for one in made if storage_key(one) not in known]
        if self._offloaded and self._passes_time_on_host(func, given, fresh):
            pass
        elif fresh or any(one.is_meta for one in given):
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


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the arguments or the results of an operator. The pytree of torch takes longer."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors_in(tuple(value.values()))
    return [one for item in value for one in _tensors_in(item)] if isinstance(value, tuple | list) else []


def _local_size(tensor: Tensor) -> int:
    """Bytes of the elements on this rank: `numel` of a shard is that of the full parameter."""
    return tensor.shape.numel() * tensor.element_size()


def _seconds(device: Device, func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[Tensor]) -> float:
    """What an operator takes: its operations, where torch counts them, or its traffic with the memory."""
    traffic = sum(map(_local_size, tensors)) / device.bandwidth
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return traffic
    return max(traffic, float(count(*args, **kwargs, out_val=result)) / device.flops_of(tensors[-1].dtype))


_OF_THE_USER: Final = ("torch.nn.modules", "torch.optim", "fsdp.autograd.engine_calls")
"""Modules whose operators are the model's or the optimizer's. The last one calls torch's autograd, which runs the backward."""


def _in_engine() -> bool:
    """Whether the engine, and neither the model nor an optimizer, calls the operator."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OF_THE_USER):
            return False
        if not name.startswith(("torch.", "fsdp.planning")) and name != "torch":
            return bool(name.startswith("fsdp."))
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _padding(flat: FlatBuffer) -> int:
    """Bytes of a flat buffer that belong to no parameter."""
    return (flat.layout.numel - sum(slot.numel for slot in flat.layout.slots)) * flat.shard.element_size()


def _not_sharded(model: nn.Module, units: Iterable[Unit]) -> list[nn.Parameter]:
    """The parameters that belong to no unit."""
    sharded = {id(parameter) for unit in units for flat in unit.flats for parameter in flat.sharded_params}
    return [parameter for parameter in model.parameters() if id(parameter) not in sharded]


def _bytes_of(values: Iterable[Any]) -> int:
    """Bytes of the memory behind the tensors among these values, each memory once."""
    tensors = [to_local(value) for value in values if isinstance(value, Tensor) and value.is_meta]
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _keep_values(module: nn.Module) -> None:
    """Initialise nothing: there are no values."""
