"""Runs the real engine for one choice of options: two steps of rank 0, on the meta device, over communicators that send nothing.

Rule 1: bytes of the engine are those that its own memory tracker counts, so they are exact.
Rule 2: what the model and the optimizer allocate is counted by storage, from the operator that makes it to its release.
Rule 3: time is that of clock.py. An operator takes its operations over the device's throughput, or its bytes over the device's
        bandwidth, whichever is longer.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.api.wrap import fully_shard, no_sync
from fsdp.building.builder import stay_on_meta
from fsdp.comm.simulated import play
from fsdp.commands.rehearsal.clock import Clock
from fsdp.commands.rehearsal.hardware import Cluster
from fsdp.commands.rehearsal.kernels import Attention, SeesAutocast, kernels_of
from fsdp.commands.rehearsal.memory import GRADIENTS, OPTIMIZER_STATE, Memory, bytes_of
from fsdp.commands.rehearsal.recall import Recall, Recalling
from fsdp.commands.rehearsal.rehearsed_communicator import Collective, RehearsedRank, last_of_reductions
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.gathered_copies import to_local
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_in
from fsdp.shards.optimizer_state import ELEMENT_WISE_OPTIMIZERS
from fsdp.shards.optimizer_steps import parts_of_dtensors

DATA: Final = "dp"
REPLICATED: Final = ("dp_replicate", "dp_shard")
REPEATED, EXPERT, TENSOR = "edp", "ep", "tp"
"""Names of a mesh's dimensions: the ranks with the same experts, those that share the experts, those that share every layer."""
WARM_UP: Final = 1
"""Steps before the one that is reported: the first step learns the order of units, by which the next one prefetches."""


class Dimensions(NamedTuple):
    """How many ranks divide a model among them in other ways than by data."""

    tp: int = 1
    """So many ranks share every layer, and their data."""
    ep: int = 1
    """So many ranks, of those with data of their own, share the experts."""
    pp: int = 1
    """So many groups of ranks have a stage of a pipeline each. `rehearse` takes one stage, and the ranks that have it."""

    @property
    def ranks(self) -> int:
        """So many ranks have one copy of the model, or a multiple of it."""
        return self.tp * self.ep * self.pp

    def __str__(self) -> str:
        """As " x tp 2": those that are not 1."""
        return "".join(f" x {name} {size}" for name, size in self._asdict().items() if size > 1)

    def sizes(self, world_size: int, hybrid: tuple[int, int] | None) -> dict[str, int]:
        """Of a mesh of these ranks, the dimensions. Ranks that share a layer are neighbours, on one host if it has enough.

        `hybrid`: (replicas, shards), for HYBRID_SHARD.
        """
        count = world_size // self.tp
        data = {DATA: count}
        if hybrid is not None:
            data = dict(zip(REPLICATED, hybrid, strict=True))
        elif self.ep > 1:
            data = {REPEATED: count // self.ep, EXPERT: self.ep}
        return data if self.tp == 1 else {**data, TENSOR: self.tp}


ALONE: Final = Dimensions()
"""Data alone divides the job."""


class Stage(NamedTuple):
    """One of the stages of a pipeline."""

    number: int
    total: int


ONLY: Final = Stage(0, 1)
"""There is no pipeline."""


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
    loss: Callable[[Any], Any]
    """From what the model returns to a scalar; of a stage that is not the last one: to the tensors that it sends."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
    world_size: int
    cluster: Cluster
    micro_batches: int = 1
    """Forwards and backwards before each step of the optimizer. All but the last one run under no_sync."""
    parallelize: Callable[[nn.Module, Any], object] | None = None
    """Applies torch's parallel styles to a model, over a DeviceMesh of all ranks."""
    loss_parallel: bool = False
    """Whether forwards and backwards run under torch's `loss_parallel` where ranks share layers."""
    cut: Callable[[nn.Module, int, int], nn.Module] | None = None
    """Of a model, a number and how many there are: the module of this stage of a pipeline."""
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
    passing: float = 0.0
    """Seconds of forwards and backwards, without reductions after the last one and without the optimizer, estimated."""
    sent: tuple[Any, ...] = ()
    """What a stage of a pipeline sends to the next one, for each micro-batch."""
    stages: tuple["Rehearsal", ...] = ()
    """Those of a pipeline."""

    @property
    def received(self) -> int:
        """Bytes that reach the rank in one step."""
        return sum(one.received for one in self.collectives)


def rehearse(
    job: Job,
    options: Mapping[str, Any],
    checkpointed: Callable[[nn.Module], list[nn.Module]] | None = None,
    dimensions: Dimensions = ALONE,
    stage: Stage = ONLY,
) -> Rehearsal:
    """Run the job with these options of `fully_shard`. `checkpointed`: the modules whose activations are recomputed.

    `stage`: what the job's model is of a pipeline.

    Raises:
        ShardingError: the engine refuses the options, or the model does something that needs values.
    """
    clock = Clock(job.cluster)
    memory = Memory(clock, job.recall)
    on_host = job.cluster.device.name == "cpu"
    played = RehearsedRank(job.world_size, clock, on_host, memory.note)
    with play(played), _groups(job, dimensions), _no_garbage_collection(), kernels_of(on_host, job.attention) as taken:
        with Recalling(job.recall):
            model = job.build()
        if dimensions != ALONE:
            model, options = _parallelized(job, model, options, dimensions)
        for module in checkpointed(model) if checkpointed is not None else ():
            module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # a stage may have no module of the units' class
            fully_shard(model, param_init_fn=stay_on_meta, **options)
        (engine,) = engines_in(model, "plan")
        offloaded = [flat.shard for unit in engine.units for flat in unit.flats if flat.home.copies]
        memory.observe(
            engine.tracker, partial(_accumulated, engine), chain(model.buffers(), _not_sharded(model, engine.units)), offloaded
        )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = job.optimizer(parameters) if job.optimizer is not None and parameters else None
        sees = SeesAutocast()
        passes = _passes(job, model, stage, dimensions)
        with Recalling(job.recall), sees:
            for _ in range(WARM_UP):
                _step(model, passes, optimizer, memory, played)
        if offloaded:
            played.copy_to_host(last_of_reductions(played.launched, {*played.dimensions.values(), "torch", "pp"}))
        played.launched.clear()
        clock.exposed.clear()
        taken.clear()
        began, computed, latency = clock.now, clock.computing, clock.latency
        with memory:
            passed = _step(model, passes, optimizer, memory, played)
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
            passing=passed - began,
            sent=passes.sent,
        )


def _groups(job: Job, dimensions: Dimensions) -> AbstractContextManager[None]:
    """The process groups of torch that a job with other dimensions than data needs."""
    if dimensions == ALONE:
        return nullcontext()
    from fsdp.commands.rehearsal.torch_groups import groups_of_torch  # the import takes half a second

    return groups_of_torch(job.cluster.per_host)


def _parallelized(
    job: Job, model: nn.Module, options: Mapping[str, Any], dimensions: Dimensions
) -> tuple[nn.Module, dict[str, Any]]:
    """The model after `parallelize`, with units of its experts; and the options of the root, with the mesh of its data ranks."""
    from fsdp.commands.rehearsal.torch_groups import open_mesh

    sizes = dimensions.sizes(job.world_size, options.get("mesh"))
    mesh = open_mesh(sizes, job.cluster.device.name == "cpu")
    data = tuple(name for name in sizes if name != TENSOR)
    root = mesh[data]._flatten(DATA) if dimensions.ep > 1 else mesh[data]
    assert job.parallelize is not None
    try:
        made = job.parallelize(model, mesh)
    except Exception as reason:
        raise ShardingError(f"plan: parallelize failed on {mesh} ({type(reason).__name__}: {reason}).") from reason
    model = made if isinstance(made, nn.Module) else model
    if dimensions.ep > 1:
        own = {name: value for name, value in options.items() if name != "auto_wrap_policy"}
        for module in _experts(model):
            fully_shard(module, param_init_fn=stay_on_meta, **{**own, "mesh": mesh[REPEATED]})
    return model, {**options, "mesh": root}


def _experts(model: nn.Module) -> list[nn.Module]:
    """The modules whose own parameters some ranks have alone.

    Raises:
        ShardingError: there are none.
    """
    own = {module: [getattr(one, "device_mesh", None) for one in module.parameters(recurse=False)] for module in model.modules()}
    found = [one for one, meshes in own.items() if any(mesh is not None and EXPERT in mesh.mesh_dim_names for mesh in meshes)]
    if not found:
        raise ShardingError(
            f'plan: parallelize has spread no parameter over mesh["{EXPERT}"]; give one that does, or leave out ep.'
        )
    return found


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


class _Passes:
    """The forwards and backwards of a step, one after the other."""

    sent: tuple[Any, ...] = ()
    part = "a forward"
    """What runs now, for errors."""

    def __init__(self, job: Job, model: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._job = job
        self._model = model
        self._around = around
        """What they run under."""

    def run(self, memory: Memory, played: RehearsedRank) -> None:
        """The passes of all micro-batches. The last one reduces gradients."""
        for number in range(self._job.micro_batches):
            batch, self.part = self._job.batch(), "a forward"
            with no_sync(self._model) if number < self._job.micro_batches - 1 else nullcontext(), self._around():
                output = self._model(*batch.args, **batch.kwargs)
                self.part = f"the loss of {type(output).__name__}, which the model returns,"
                loss = self._job.loss(output)
                del output
                memory.forward_ended()
                self.part = f"a backward from {type(loss).__name__}, the loss,"
                torch.autograd.backward(loss)
                del loss
            memory.wait_for_copies()
            memory.hold_gradients(self._model)

    def reduce(self) -> None:
        """Nothing: the last backward has."""


def _passes(job: Job, model: nn.Module, stage: Stage, dimensions: Dimensions) -> Any:
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if dimensions.tp > 1 and job.loss_parallel:
        from fsdp.commands.rehearsal.torch_groups import loss_parallel

        around = loss_parallel
    if stage.total == 1:
        return _Passes(job, model, around)
    from fsdp.commands.rehearsal.stage_passes import PassesOfStage  # the import takes a second

    return PassesOfStage(model, stage, lambda: [job.batch() for _ in range(job.micro_batches)], job.loss, around)


def _step(model: nn.Module, passes: Any, optimizer: torch.optim.Optimizer | None, memory: Memory, played: RehearsedRank) -> float:
    """One step; returns when the passes had ended."""
    try:
        passes.run(memory, played)
        passed = played.clock.now
        passes.reduce()
    except Exception as reason:
        raise ShardingError(
            f"plan: {passes.part} on the meta device failed ({type(reason).__name__}: {reason}); give inputs that fit the "
            "model, a loss that makes one number of what it returns, and read no value of a tensor, because tensors have none "
            "there."
        ) from reason
    memory.wait_for_copies()
    memory.hold_gradients(model)
    if optimizer is not None:
        # on local tensors, as in training, and with a closure: without one a step calls operators where no mode sees them
        on_parts = parts_of_dtensors(optimizer) if isinstance(optimizer, ELEMENT_WISE_OPTIMIZERS) else nullcontext()
        with memory.optimizing(), on_parts:
            optimizer.step(*([_no_loss] if type(optimizer).__module__.startswith("torch.optim") else []))
        memory.hold(OPTIMIZER_STATE, bytes_of(value for values in optimizer.state.values() for value in values.values()))
    model.zero_grad()
    memory.hold(GRADIENTS, 0)
    return passed


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


def _accumulated(engine: Engine) -> list[Tensor]:
    """The gradients that are kept under no_sync."""
    kept = [one.unsharded for bucket in engine.reducer.buckets for one in bucket.accumulated.values()]
    return [to_local(one) for one in kept]


def _dtypes_of(optimizer: torch.optim.Optimizer) -> str:
    """The names of the dtypes of its state, but for counts of steps."""
    values = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor) and one.ndim]
    return " and ".join(sorted({str(one.dtype).removeprefix("torch.") for one in values}))
