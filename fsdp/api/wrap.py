"""FullyShardedDataParallel and fully_shard: two ways to wrap a model, one engine. Also no_sync."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fsdp.api import clip_and_scale
from fsdp.api.shard_grads import refuse_compiled_autograd, translate_shards
from fsdp.autograd.engine_calls import intercept_engine_calls
from fsdp.building.builder import build, check_initialisation
from fsdp.building.choose_units import Planned, WrapPolicy, make_plan
from fsdp.building.consistency import agree
from fsdp.building.dissolve import refuse_losses
from fsdp.building.other_engines import refuse_other_engines
from fsdp.building.peer_options import accepts_peer_options
from fsdp.building.shardable import (
    check_devices,
    check_numbers,
    check_ranks,
    check_renormalised,
    check_shardable,
    check_triggers,
    choose_cuts,
    choose_dtypes,
    device_of,
    with_dtensors,
)
from fsdp.building.torch_policies import offload_of, precision_of
from fsdp.comm.context import CommContext
from fsdp.comm.dtensor_mesh import groups_around, open_mesh, ranks_around
from fsdp.comm.open_communicators import Mesh, ProcessGroup, open_across, open_comms, open_routed
from fsdp.config import Config, ReductionPolicy, find_strategy, make_config
from fsdp.errors import ShardingError
from fsdp.runtime.registry import UnitRef, engines_in, refuse_traced, refuse_unless_resting, unit_ref_of

P = ParamSpec("P")
Module = TypeVar("Module", bound=nn.Module | list[nn.Module])


def run_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], unit_ref: UnitRef | None = None) -> Any:
    """Run the forward of a unit, or of a wrapper around `unit_ref`; abandon the step where torch runs no hook (Ctrl-C)."""
    try:
        return module(*args, **kwargs)
    except Exception:
        raise  # the hooks have abandoned the step
    except BaseException as failure:
        if (sharded := unit_ref or unit_ref_of(module)) is not None:
            sharded.engine.note(failure)
            sharded.engine.abandon_step(failure)
        raise


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of a wrapper around `module`. Does not refer to the wrapper, which would then outlive its last user."""

    @wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run_forward(module, args, kwargs)

    return forward


@accepts_peer_options
def fully_shard(
    module: Module,
    process_group: ProcessGroup | None = None,
    *,
    mesh: Mesh | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
    sharding_strategy: str | Enum | None = "FULL_SHARD",
    reshard_after_forward: bool | None = None,
    mp_policy: object = None,
    sync_module_states: bool = False,
    param_init_fn: Callable[[nn.Module], object] | None = None,
    ignored_modules: Collection[nn.Module] | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    prefetch: int = 1,
    guard: bool | None = None,
    reduction: ReductionPolicy | None = None,
    broadcast_buffers: bool = False,
    aligned: bool = True,
    plain_shards: bool = False,
    dtensors: bool = False,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    uneven_paths: bool = False,
    offload_policy: object = None,
) -> Module:
    """Shard `module` in place and return it. Its class, its name and the names of its parameters stay.

    A list of modules becomes one unit, whose parameters are gathered together for the forward of each module in it. Afterwards
    the parameters are shards: the same Parameter objects, with this rank's part as data. The arguments are those of
    `FullyShardedDataParallel`, which documents each. Communicates: every rank must call it alike.

    Raises:
        ShardingError: an argument, the module or the ranks are refused. Nothing was sharded, on any rank.
    """
    modules: Sequence[nn.Module] = module if isinstance(module, list) else [module]
    ranks = process_group, mesh, find_strategy(sharding_strategy).mesh_kind
    comms = open_comms(*ranks)
    given = [p for one in modules if isinstance(one, nn.Module) for p in one.parameters()]
    comms = open_across(mesh, comms, ranks_around(mesh, given))

    def prepare() -> tuple[Config, list[Planned]]:
        if not modules or not all(isinstance(one, nn.Module) for one in modules):
            raise ShardingError(f"fully_shard takes an nn.Module or a list of them, not {type(module).__name__}.")
        config = make_config(
            sharding_strategy=sharding_strategy,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision_of(mp_policy, modules[0], auto_wrap_policy is not None),
            prefetch=prefetch,
            sync_module_states=sync_module_states,
            guard=guard,
            reduction=reduction,
            broadcast_buffers=broadcast_buffers,
            aligned=aligned,
            plain_shards=plain_shards,
            dtensors=dtensors,
            uneven_paths=uneven_paths,
            offload=offload_of(offload_policy),
        )
        plan = _plan(modules, auto_wrap_policy, ignored_modules, ignored_params)
        config = with_dtensors(config, plan)
        _check_plan(plan, comms, config, modules[0])
        choose_cuts(plan, config, mesh, shard_placement_fn, comms, is_implied=not dtensors)
        choose_dtypes(plan, config, mp_policy)
        check_initialisation(plan, param_init_fn)
        return config, plan

    config, plan = agree(comms.joint, prepare)
    own = [info for one in plan for info in one.param_infos if info.mesh is not None]
    meshes = dict.fromkeys((mesh, *(info.mesh for info in own)))
    around = dict.fromkeys(group for one in meshes for group in groups_around(one, given))
    del given  # DTensors take the places of parameters, whose memory is released unit by unit
    intercept_engine_calls(translate_shards, refuse_compiled_autograd)
    clip_and_scale.let_scalers_agree()
    dtensor_mesh = open_mesh(process_group, mesh, device_of(plan) or torch.device("cpu")) if config.dtensors else None
    comms = open_comms(*ranks, config.reduction.streams)._replace(across=comms.across)
    for info in own:
        info.comms = open_comms(None, info.mesh, config.mesh_kind, config.reduction.streams)
    comms = comms._replace(inner=tuple(dict.fromkeys(info.comms for info in own if info.comms is not None)))
    for group in around:
        comms = open_routed(group, comms)[1]
    with torch.inference_mode(False):  # the shards can be trained, also if the module is wrapped in inference mode
        build(plan, config, comms, param_init_fn, (*(ignored_modules or ()), *(ignored_params or ())), dtensor_mesh)
    return module


def _takes_arguments_of(function: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Show the arguments of `function` as those of a method, which gives them on."""

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        of_function = inspect.signature(function)
        parameters = [own, *of_function.parameters.values()]
        method.__signature__ = of_function.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
        return method

    return decorate


class FullyShardedDataParallel(nn.Module):
    """Shard the parameters, gradients and optimizer state of a module over the ranks of a group, and wrap the module.

    The wrapped module is `.module`. Parameter names are those of the plain module. `fully_shard` takes the same arguments and
    does the same without a wrapper. Wrapping communicates: every rank must wrap the same model with the same arguments. All
    arguments but `module` are optional.

    Args:
        module: the module to shard. It becomes a unit: its parameters are gathered and released together. Units that were
            wrapped before inside it become its inner units. A parameter that one of these shares with a module outside of it
            moves to `module`, or to the unit around all its uses. Refused: a module that is wrapped already, a container
            without a forward (such as ModuleList), parameters on several devices.
        process_group: the ranks to shard over. Default None: the ranks of `mesh`, else the default group, else the simulated
            ranks inside `fsdp.simulate`. Refused together with `mesh`, and inside `fsdp.simulate`.
        mesh: a one-dimensional DeviceMesh, instead of a group. "HYBRID_SHARD" requires a two-dimensional mesh: its second
            dimension shards, its first dimension holds replicas. The shape of that mesh over all ranks, (replicas, shards), is
            accepted too, and is the only form inside `fsdp.simulate`. Default None.
        auto_wrap_policy: chooses the inner units: "auto", a set of module classes, a `callable(name, module) -> bool`, or a
            policy of FSDP1 (`ModuleWrapPolicy`, `CustomPolicy`, a function of `(module, recurse, nonwrapped_numel)`). A
            `CustomPolicy` may give a module of experts a `mesh` of their own. "auto"
            makes units of at most an eighth of the parameters, and none of less than 1 MiB. Default None: no unit besides
            `module` and those wrapped already. Refused: an empty set, a class outside a set, a policy that chooses
            a module without a forward.
        sharding_strategy: what a rank holds, by name or as the member of torch's enum with that name. Default "FULL_SHARD",
            which None stands for as well.

            - "FULL_SHARD" (ZeRO-3) releases the unsharded parameters after the forward and after the backward of each unit.
            - "SHARD_GRAD_OP" releases them after the backward only.
            - "SHARD_GRADIENTS" (ZeRO-2) keeps them, and gathers them again after each optimizer step. Gradients and optimizer
              state are sharded.
            - "SHARD_OPTIMIZER" (ZeRO-1) does the same and keeps the memory of unsharded gradients between steps too.
            - "HYBRID_SHARD" is "FULL_SHARD" inside each replica of a mesh, and sums gradients over the replicas.
            - "NO_SHARD" shards nothing: every rank holds the full model, and gradients are averaged, as DDP does.
        reshard_after_forward: True releases the unsharded parameters after the forward, in the root's own unit too. False keeps
            them until the backward. Default None: as the strategy says, except that the root's own unit keeps them, because
            the backward needs them first. True is refused with strategies that keep them.
        mp_policy: the dtypes of computation and reduction: a `fsdp.MixedPrecisionPolicy`, FSDP2's class of that name, or FSDP1's
            `MixedPrecision`. Default None: no dtype is changed.
        sync_module_states: True overwrites parameters and buffers with rank 0's before sharding. Default False. Ranks that hold
            the same shards ("NO_SHARD", "HYBRID_SHARD") are refused if their parameters then differ.
        param_init_fn: a function that initialises one module whose tensors were on the meta device, after they got memory.
            Default None: the module's `reset_parameters`. The model gets memory unit by unit, never all at once. Refused: a
            function that assigns new parameters instead of copying into them. If the function raises, build the model anew.
        ignored_modules: a collection of modules whose parameters, with all below them, stay as they are: complete on every rank,
            their gradients neither averaged nor clipped. Default None. Refused: `module` itself, a module that contains a unit,
            a module that shares a parameter with a module that is not ignored.
        ignored_params: a collection of parameters that stay as they are, like those of `ignored_modules`. Default None.
        prefetch: how many units may be gathered ahead of the one that computes, in the order of the last pass. Default 1; 0
            switches prefetch off. The value of the outermost unit counts.
        guard: True checks for mistakes that would crash or go unseen: a backward that enters a unit by a path no hook sees, and
            a change of a weight through `.data`. It costs a check of every tensor that is saved for the backward, and a second
            copy of the unsharded parameters while a unit's forward runs. Default None: True if the environment variable
            FSDP_GUARD is 1.
        reduction: how gradients are put into buckets and summed: a `fsdp.ReductionPolicy`. Default None: its defaults. The
            policy of the outermost unit counts, except for sizes and triggers. Refused if an inner one was given another
            `average`, `predivide_factor` or `deterministic`.
        broadcast_buffers: True overwrites the buffers with rank 0's at the start of each forward of the outermost unit that
            records a graph, as DDP does. Default False: each rank keeps its own. The value of the outermost unit counts;
            refused if an inner one was given True and it was not.
        aligned: True makes the shards of every flat buffer multiples of 16 bytes, which NCCL needs in order to be fast. False
            cuts a buffer at any element, so that a single vector whose length is a multiple of the ranks is cut into equal
            parts without padding. Default True.
        plain_shards: True leaves the shards ordinary parameters: this rank's part and nothing else. Every operator computes on
            that part, so a norm or a number of elements is the part's, on each rank another. A part without elements gets no
            gradient. Default False: the operators of a shard compute over all ranks, or raise.
        dtensors: True makes the shards torch's DTensors, as in FSDP2: new Parameter objects with `placements`, `to_local()` and
            `full_tensor()`, which torch's functions for state dicts and clipping know. Each parameter is cut evenly. A
            DTensor that tensor parallelism has made is cut once more. Make the optimizer after wrapping. Refused: "NO_SHARD", a
            parameter without dimensions. Default False: only if a parameter is a DTensor. Then all shards are on one mesh.
        shard_placement_fn: with `dtensors`, a function that returns `Shard(dim)` for a parameter to be cut along `dim`, or None.
            Default None: between rows, Shard(0). Shards along another dimension are not contiguous. FSDP2's
            `ShardPlacementResult` cuts it over a mesh of its own, over some of the ranks: an expert's.
        uneven_paths: True lets ranks go different ways: leave units out, repeat them, take them in another order, evaluate on
            some ranks only. Gradients are averages over all ranks, in which a rank without a gradient counts as zero. Reductions
            begin when all ranks are at the end of the backward, and unsharded gradients are in memory until then. It includes
            `find_unused_parameters`. Refused: `broadcast_buffers`, `static_graph`, `offload_policy`. Default False: ranks that
            call different collectives are named. The value of the outermost unit counts.
        offload_policy: keeps shards, gradients and optimizer state in host memory: a `fsdp.OffloadPolicy`, FSDP2's
            `CPUOffloadPolicy`, or FSDP1's `CPUOffload`. Each gather copies this rank's shard to the device first, and the
            optimizer steps on the host. Default None: they stay on the device of the module.

    Options of DDP, Apex, fairscale, FSDP1 and FSDP2 are accepted where their value means what happens here anyway.

    Raises:
        ShardingError: an argument, the module or the ranks are refused. Nothing was sharded, on any rank.
    """

    @_takes_arguments_of(fully_shard)  # type: ignore[arg-type]  # which is generic in the module
    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        if isinstance(module, list):
            raise ShardingError("FullyShardedDataParallel wraps one module; give a list of modules to fully_shard.")
        fully_shard(module, *args, **options)
        self.module = module
        refuse_other_engines(self)
        if type(self).forward is FullyShardedDataParallel.forward:
            # on the object, because callers such as data loaders of transformers inspect the arguments of `model.forward`
            self.__dict__["forward"] = _forward_of(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the wrapped module, with its arguments."""
        return _forward_of(self.module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or method of the wrapped module if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            # what `inspect.signature(model)` looks for first
            return inspect.signature(self.module.forward) if name == "__signature__" else getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """A copy around a copy of the module, see `fsdp/building/copies.py`."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        state = {name: deepcopy(value, memo) for name, value in self.__dict__.items() if name != "forward"}
        copied.__setstate__(state)  # type: ignore[no-untyped-call]
        if "forward" in self.__dict__:
            copied.__dict__["forward"] = _forward_of(copied.module)
        return copied

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch's functions for state dicts that the wrapper adds nothing to a name. They ask for the values alone."""
        return {"": "module"}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Like `named_modules` of the plain module. The wrapper adds nothing to a name."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(  # type: ignore[override]  # torch has an overload, and positional arguments that it deprecates
        self, *, destination: dict[str, object] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, object]:
        """Return the state dict of the wrapped module: plain names, and this rank's shards in a form that torch's Distributed
        Checkpoint saves and loads."""
        into: Any = destination  # torch has no annotation for None, its default
        state: dict[str, object] = self.module.state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> nn.modules.module._IncompatibleKeys:
        """Load a state dict into the wrapped module: shards of a model sharded alike, or full values, the same on every rank."""
        keys: nn.modules.module._IncompatibleKeys = self.module.load_state_dict(state_dict, strict, assign)
        return keys

    def no_sync(self) -> AbstractContextManager[None]:
        """See `fsdp.no_sync`."""
        return no_sync(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `fsdp.clip_grad_norm_`."""
        return clip_and_scale.clip_grad_norm_(self, max_norm, norm_type)


def _plan(modules: Sequence[nn.Module], policy: Any, ignored: Any, ignored_params: Any) -> list[Planned]:
    for module in modules:
        if unit_ref_of(module) is not None:
            raise ShardingError(f"{type(module).__name__} is a unit already; wrap a module once.")
        if isinstance(module, FullyShardedDataParallel):
            raise ShardingError("the module is a FullyShardedDataParallel already; wrap a module once.")
    return make_plan(modules, policy, lambda one: isinstance(one, FullyShardedDataParallel), ignored, ignored_params)


def _check_plan(plan: Sequence[Planned], comms: CommContext, config: Config, module: nn.Module) -> None:
    """Check everything that can be refused, before anything changes."""
    check_shardable(plan, config)
    check_triggers(plan, config, module)
    for one in plan:
        if (inner := unit_ref_of(one.module)) is None:
            continue
        refuse_unless_resting("fully_shard", inner.engine)
        refuse_traced("fully_shard", inner.engine)
        refuse_losses(inner.engine, "fully_shard")
        if not inner.engine.synchronises:
            raise ShardingError(
                f"unit {one.name!r} does not reduce its gradients, by no_sync or set_requires_gradient_sync, and would now; "
                "say so on the outermost module, after wrapping."
            )
        if inner.engine.reducer.reductions.hook is not None:
            raise ShardingError(
                f"unit {one.name!r} has a communication hook, which would be lost; register it on the outermost module, after "
                "wrapping."
            )
        if config.uneven_paths and any(inner.unit.settings.ahead):
            raise ShardingError(f"unit {one.name!r} has a prefetch list, and with uneven_paths all ranks gather in one order.")
        inner.unit.refuse_put_away()
        check_ranks(one.name, inner.unit, comms, config)
        check_numbers(one.name, inner.unit.config, config)
    check_devices(plan, comms.world_comm)
    slots = ((info.names[0], module) for one in plan for info in one.param_infos for module, _ in info.slots)
    check_renormalised(slots, comms.world_comm.size)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication: a backward that begins inside keeps its unsharded gradients on this rank.

    The next backward outside reduces them together with its own. `zero_grad()` drops them, as it drops any gradient.
    On one rank there is nothing to keep: each backward adds to `.grad`.

    Memory: the unsharded gradients, until that backward.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    before = [(engine.units[0].module, engine.synchronises) for engine in engines_in(model, "no_sync")]
    set_requires_gradient_sync(model, False)
    try:
        yield
    finally:
        for root, synchronises in before:
            # a conversion of the model inside has put another engine over the root, and `unwrap` none
            if (ref := unit_ref_of(root)) is not None:
                ref.engine.synchronises = synchronises


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Switch the reduction of gradients off or on for every backward that begins from now on. See `no_sync`.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    for engine in engines_in(model, "set_requires_gradient_sync"):
        engine.synchronises = bool(requires_gradient_sync) or engine.reducer.keeps_nothing
