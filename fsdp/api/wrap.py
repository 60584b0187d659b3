"""FullyShardedDataParallel and fully_shard: two doors to one engine. The public door."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fsdp.api import clipping
from fsdp.build.builder import build, check_initialisation
from fsdp.build.consistency import agree
from fsdp.build.plan import Planned, make_plan
from fsdp.comm.connect import open_comms
from fsdp.comm.context import CommContext
from fsdp.config import Config, ReductionPolicy, find_strategy, make_config
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit
from fsdp.runtime.registry import engines_in, unit_ref_of

Module = TypeVar("Module", bound=nn.Module)


class FullyShardedDataParallel(nn.Module):
    """Wraps a module so that each rank keeps a part of its parameters, gradients and optimizer state: see `sharding_strategy`.

    The wrapped module is `.module`; parameter names are those of the plain module. The options are
    those of `fully_shard`, which does the same without a wrapper.
    """

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        super().__init__()
        fully_shard(module, process_group, **options)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the wrapped module."""
        try:
            return self.module(*args, **kwargs)
        except Exception:
            raise  # the hooks have heard it
        except BaseException as failure:
            # torch calls no hook for Ctrl-C
            sharded = unit_ref_of(self.module)
            assert sharded is not None, "the constructor made it a unit"
            sharded.engine.note(failure)
            sharded.engine.abandon_step(failure)
            raise

    def __getattr__(self, name: str) -> Any:
        """Methods and attributes of the wrapped module, where the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Like the plain module's: the wrapper adds nothing to a name."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's: plain names, this rank's parts, which torch's Distributed Checkpoint saves and loads."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's: takes parts of an equally sharded model, or full values, the same on every rank."""
        return self.module.load_state_dict(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `fsdp.no_sync`."""
        with no_sync(self):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `fsdp.clip_grad_norm_`."""
        return clipping.clip_grad_norm_(self, max_norm, norm_type)


def fully_shard(
    module: Module,
    process_group: Any = None,
    *,
    mesh: Any = None,
    auto_wrap_policy: Any = None,
    sharding_strategy: Any = "FULL_SHARD",
    reshard_after_forward: bool | None = None,
    mp_policy: Any = None,
    sync_module_states: bool = False,
    param_init_fn: Any = None,
    ignored_modules: Any = None,
    prefetch: int = 1,
    guard: bool | None = None,
    reduction: ReductionPolicy | None = None,
    broadcast_buffers: bool = False,
    **unknown: Any,
) -> Module:
    """Shard `module` in place over the ranks of a group; return the same module, class and names untouched.

    Afterwards its parameters are shards: the same Parameter objects, with this rank's part as data.
    Communicates: every rank must call it alike.

    Args:
        module: the unit; units wrapped before inside it become its inner units.
        process_group: the ranks to shard over; None means `mesh`, or the default group.
        mesh: a one-dimensional DeviceMesh, instead of a group. For "HYBRID_SHARD" a two-dimensional one, whose second
            dimension shards and whose first one holds the same shards, or its shape over all ranks (replicas, shards).
        auto_wrap_policy: inner units: a set of module classes, `callable(name, module) -> bool`, or torch's `ModuleWrapPolicy`.
        sharding_strategy: "FULL_SHARD" gives the whole parameters back after forward and after backward, "SHARD_GRAD_OP"
            after backward only. "HYBRID_SHARD" is the former over one dimension of a mesh. "NO_SHARD" shards nothing: every
            rank holds the whole model, and gradients are averaged.
        reshard_after_forward: True gives them back after the forward, in the root's own unit too; False keeps them until the
            backward; None follows the strategy, and keeps the root's own unit, which the backward needs first.
        mp_policy: `fsdp.MixedPrecisionPolicy` or torch's.
        sync_module_states: overwrite parameters and buffers with rank 0's before sharding. Without it, ranks that hold the same
            shards ("NO_SHARD", "HYBRID_SHARD") must begin with the same parameters, which is checked.
        param_init_fn: initialises one module that is on the meta device, after it has been given memory; None means its
            `reset_parameters`. The model comes to memory unit by unit, never whole. If it raises, build the model anew.
        ignored_modules: modules (with everything below them) whose parameters stay as they are: whole, on every rank, their
            gradients neither averaged nor clipped.
        prefetch: how many units may be gathered ahead of the one that computes; that of the outermost unit counts.
        guard: True looks for mistakes that would crash or go unseen: a backward that enters a unit by a way no hook sees, an edit
            of a weight that leaves no trace. It costs a look at every tensor that is saved for the backward, and a second copy of
            the whole parameters while a unit's forward runs. None means whether the environment variable FSDP_GUARD is 1.
        reduction: how gradients are put into buckets and summed, see `fsdp.ReductionPolicy`.
        broadcast_buffers: overwrite the buffers with rank 0's at the beginning of each forward of the outermost unit that records
            a graph, as DDP does; False leaves each rank its own. That of the outermost unit counts.

    Raises:
        ShardingError: an option, the module or the ranks are not as they must be. Nothing was sharded.
    """
    ranks = process_group, mesh, find_strategy(sharding_strategy).mesh_kind
    comms = open_comms(*ranks)
    options = (
        sharding_strategy,
        reshard_after_forward,
        mp_policy,
        prefetch,
        sync_module_states,
        guard,
        reduction,
        broadcast_buffers,
    )

    def prepare() -> tuple[Config, list[Planned]]:
        config, plan = _prepare(module, auto_wrap_policy, ignored_modules, comms, options, unknown)
        check_initialisation(plan, param_init_fn)
        return config, plan

    config, plan = agree(comms.world_comm, prepare)
    build(plan, config, open_comms(*ranks, config.reduction.streams), param_init_fn, ignored_modules or ())
    return module


def _prepare(
    module: nn.Module, policy: Any, ignored: Any, comms: CommContext, options: tuple[Any, ...], unknown: dict[str, Any]
) -> tuple[Config, list[Planned]]:
    """Everything that can be refused, before anything moves."""
    if unknown:
        _refuse(unknown)
    if not isinstance(module, nn.Module):
        raise ShardingError(f"fully_shard takes an nn.Module, not {type(module).__name__}.")
    config = make_config(*options)
    if unit_ref_of(module) is not None:
        raise ShardingError(f"{type(module).__name__} is a unit already; wrap a module once.")
    if isinstance(module, FullyShardedDataParallel):
        raise ShardingError("the module is a FullyShardedDataParallel already; wrap a module once.")
    plan = make_plan(module, policy, _unit_of, lambda one: isinstance(one, FullyShardedDataParallel), ignored)
    names = {place.names[0] for one in plan for place in one.param_infos if place.parameter.requires_grad}
    for trigger in config.reduction.triggers:
        if trigger not in names:
            raise ShardingError(
                f"reduction.triggers: {type(module).__name__} has no trainable parameter {trigger!r}, or it is in a unit already."
            )
    for one in plan:
        inner = unit_ref_of(one.module)
        if inner is not None and inner.engine.reducer.keeps_gradients:
            raise ShardingError(
                f"unit {one.name!r} keeps gradients under no_sync; run the backward that synchronises before wrapping around it."
            )
        if inner is not None and inner.engine.reducer.hook is not None:
            raise ShardingError(
                f"unit {one.name!r} has a communication hook, which would be lost; register it on the outermost module, after "
                "wrapping."
            )
        if inner is not None and not inner.engine.comms.same_ranks_as(comms):
            raise ShardingError(
                f"unit {one.name!r} was wrapped over another process group or mesh, or with a strategy that shares the work in "
                "another way; wrap all units of a model alike."
            )
    devices: dict[torch.device, str] = {}
    for place in (place for one in plan for place in one.param_infos if not place.parameter.is_meta):
        devices.setdefault(place.parameter.device, place.names[0])
    if len(devices) > 1:
        (a, first), (b, second) = list(devices.items())[:2]
        raise ShardingError(
            f"parameter {first!r} is on {a}, but {second!r} is on {b}; move the module to one device before wrapping it."
        )
    for device, name in devices.items():
        if not comms.world_comm.supports_device(device):
            raise ShardingError(
                f"parameter {name!r} is on {device}, where this process group cannot communicate; "
                "move the module to the group's device before wrapping it."
            )
    return config, plan


def _unit_of(module: nn.Module) -> Unit | None:
    sharded = unit_ref_of(module)
    return None if sharded is None else sharded.unit


ELSEWHERE = {
    "use_orig_params": "parameters are always the original objects",
    "device_id": "move the module to its device before wrapping it",
    "backward_prefetch": "prefetch follows the recorded order; set prefetch=0 to switch it off",
    "forward_prefetch": "prefetch follows the recorded order; set prefetch=0 to switch it off",
    "limit_all_gathers": "at most `prefetch` units are gathered ahead",
    "mixed_precision": "give mp_policy",
    "bucket_cap_mb": "give reduction=fsdp.ReductionPolicy(bucket_cap_mb=...)",
    "find_unused_parameters": "give reduction=fsdp.ReductionPolicy(find_unused_parameters=True)",
    "static_graph": "give reduction=fsdp.ReductionPolicy(static_graph=True)",
    "gradient_as_bucket_view": "gradients are always views of what was reduced",
    "delay_allreduce": "give reduction=fsdp.ReductionPolicy(at_end=True)",
    "allreduce_trigger_params": "give reduction=fsdp.ReductionPolicy(triggers=names)",
    "message_size": "give reduction=fsdp.ReductionPolicy(bucket_cap_mb=...)",
    "gradient_predivide_factor": "give reduction=fsdp.ReductionPolicy(predivide_factor=...)",
    "gradient_average": "give reduction=fsdp.ReductionPolicy(average=...)",
    "allreduce_always_fp32": "give mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)",
}


def _refuse(unknown: dict[str, Any]) -> NoReturn:
    name = next(iter(unknown))
    known = ", ".join(("process_group", *inspect.getfullargspec(fully_shard).kwonlyargs))
    remedy = ELSEWHERE.get(name)
    raise ShardingError(f"unknown option {name!r}" + (f": {remedy}." if remedy else f"; the options are {known}."))


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards that begin inside keep their gradients, whole and unreduced, for the next backward that synchronises.

    Memory: the whole gradients, until then. `zero_grad()` forgets them as it would any gradient.
    """
    engines = engines_in(model, "no_sync")
    before = [engine.synchronises for engine in engines]
    for engine in engines:
        engine.synchronises = False
    try:
        yield
    finally:
        for engine, synchronises in zip(engines, before, strict=True):
            engine.synchronises = synchronises


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Switch the reduction of gradients off or on, for backwards that begin from now on. See `no_sync`."""
    for engine in engines_in(model, "set_requires_gradient_sync"):
        engine.synchronises = bool(requires_gradient_sync)


def memory_bytes(model: nn.Module, peak: bool = False) -> int:
    """Bytes the engine holds on this rank for `model`: shards, whole and lent parameters, buckets and what reducing them takes,
    gradients reduced but not yet in `.grad`, gradients kept under `no_sync`. What is in `.grad` is the user's, and not counted.

    With `peak`, the most it ever held at once.
    """
    ledgers = [engine.tracker for engine in engines_in(model, "memory_bytes")]
    return sum(tracker.peak if peak else tracker.now for tracker in ledgers)
