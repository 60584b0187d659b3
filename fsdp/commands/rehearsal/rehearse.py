"""Runs the real engine for one choice of options: two steps of rank 0, on the meta device, over communicators that send nothing.

Rule 1: bytes of the engine are those that its own memory tracker counts, so they are exact.
Rule 2: what the model and the optimizer allocate is counted by storage, from the operator that makes it to its release.
Rule 3: time is that of clock.py. An operator takes its operations over the device's throughput, or its bytes over the device's
        bandwidth, whichever is longer.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.api.wrap import fully_shard, no_sync
from fsdp.comm.simulated import play
from fsdp.commands.rehearsal.clock import Clock
from fsdp.commands.rehearsal.hardware import Cluster
from fsdp.commands.rehearsal.kernels import Attention, SeesAutocast, kernels_of
from fsdp.commands.rehearsal.memory import GRADIENTS, OPTIMIZER_STATE, Memory
from fsdp.commands.rehearsal.recall import Recall, Recalling
from fsdp.commands.rehearsal.rehearsed_communicator import Collective, RehearsedRank, last_of_reductions
from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.params.use_outside_forward import to_local
from fsdp.runtime.registry import engines_in

WARM_UP: Final = 1
"""Steps before the one that is reported: the first step learns the order of units, by which the next one prefetches."""


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
    attention: Attention = "auto"
    """Which kernel a scaled_dot_product_attention takes."""
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
    saved: int
    """Bytes of activations when the forward of the last micro-batch has ended: what its backward needs, and what it returned."""
    attention: Mapping[str, int]
    """How often each kernel of attention was called."""
    optimizer_dtypes: str
    """Of the optimizer's state. Empty: there is none."""
    autocast: bool
    """Whether the model used torch.autocast, which has no effect on tensors without memory."""
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
    memory = Memory(clock, job.recall)
    on_host = job.cluster.device.name == "cpu"
    played = RehearsedRank(job.world_size, clock, on_host, memory.note)
    with play(played), _no_garbage_collection(), kernels_of(on_host, job.attention) as taken:
        with Recalling(job.recall):
            model = job.build()
        for module in checkpointed(model) if checkpointed is not None else ():
            module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(model, param_init_fn=_keep_values, **options)
        (engine,) = engines_in(model, "plan")
        offloaded = [flat.shard for unit in engine.units for flat in unit.flats if flat.home.copies]
        memory.observe(engine.tracker, chain(model.buffers(), _not_sharded(model, engine.units)), offloaded)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = job.optimizer(parameters) if job.optimizer is not None and parameters else None
        sees = SeesAutocast()
        with Recalling(job.recall), sees:
            for _ in range(WARM_UP):
                _step(job, model, optimizer, memory)
        if offloaded:
            played.copy_to_host(last_of_reductions(played.launched))
        played.launched.clear()
        clock.exposed.clear()
        taken.clear()
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
            saved=memory.saved,
            attention=dict(taken),
            optimizer_dtypes="" if optimizer is None else _dtypes_of(optimizer),
            autocast=sees.used,
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


def _step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer | None, memory: Memory) -> None:
    for number in range(job.micro_batches):
        batch, part = job.batch(), "a forward"
        try:
            with no_sync(model) if number < job.micro_batches - 1 else nullcontext():
                output = model(*batch.args, **batch.kwargs)
                part = f"the loss of {type(output).__name__}, which the model returns,"
                loss = job.loss(output)
                del output
                memory.forward_ended()
                part = f"a backward from {type(loss).__name__}, the loss,"
                torch.autograd.backward(loss)
                del loss
        except Exception as reason:
            raise ShardingError(
                f"plan: {part} on the meta device failed ({type(reason).__name__}: {reason}); give inputs that fit the model, a "
                "loss that makes one number of what it returns, and read no value of a tensor, because tensors have none there."
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


def _dtypes_of(optimizer: torch.optim.Optimizer) -> str:
    """The names of the dtypes of its state, but for counts of steps."""
    values = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor) and one.ndim]
    return " and ".join(sorted({str(one.dtype).removeprefix("torch.") for one in values}))


def _keep_values(module: nn.Module) -> None:
    """Initialise nothing: there are no values."""
