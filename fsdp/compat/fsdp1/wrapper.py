"""FullyShardedDataParallel with FSDP1's constructor, methods and names. Each instance is one unit of the engine.

Rule 1: the unit's parameters are the user's own, with and without `use_orig_params`.
Rule 2: whatever happens in a forward or backward is the engine's. This file casts buffers and moves inputs.
"""

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.api.wrap import no_sync, run_forward
from fsdp.autograd.frames import own_method
from fsdp.compat.fsdp1 import gradients, optim_states, root_forward, sharding, state_types, states, summon, torch_names
from fsdp.compat.fsdp1.instance import InstanceState
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.compat.fsdp1.torch_names import (
    HYBRID,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    TrainingState,
)
from fsdp.compat.shared.instances import WRAPPED_NAME
from fsdp.params.shown_params import owning_unit
from fsdp.runtime.registry import UnitRef, unit_ref_of

_OWN_ARGUMENTS = ("module", "auto_wrap_policy", "ignored_modules", "ignored_states")
"""The arguments of an instance that those inside it, which its policy chooses, do not get."""
_OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class FullyShardedDataParallel(InstanceState):
    """Shard the parameters of a module, its gradients and the optimizer's state over the ranks of a group.

    The arguments are FSDP1's. The page "From FSDP1" lists each of them with what differs.

    Raises:
        ValueError: the arguments contradict each other or do not fit the module.
        TypeError: an argument has a wrong type.
        ShardingError: an argument asks for what this engine does not have.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", *_OWN_ARGUMENTS)}
        super().__init__()
        self._ignored_modules, self._ignored_params = sharding.ignored_modules(module, ignored_modules, ignored_states)
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._use_orig_params = use_orig_params
        self._device_mesh = device_mesh
        sharding.check_options(self)
        self._find_groups(process_group, auto_wrap_policy)
        own = [p for p in module.parameters() if p not in self._ignored_params and owning_unit(p) is None]
        device = sharding.device_of(device_id)
        self.set_compute_device(sharding.computing_device(device, self.cpu_offload, module, own))
        if device is not None or self.cpu_offload.offload_params:
            sharding.move(module, self.compute_device, own)
        sharding.check(module)
        if auto_wrap_policy is not None:
            if self.sharding_strategy in HYBRID and device_mesh is None:
                given["process_group"] = process_group or self._mesh
            arguments = {**given, "ignored_states": self._ignored_params}
            sharding.wrap_children(module, auto_wrap_policy, self, arguments, FullyShardedDataParallel)
        self._fsdp_wrapped_module = module
        # apart from the attribute, in which torch puts a wrapper for activation checkpointing
        self.__dict__["_unit_module"] = module
        sharding.shard(self, param_init_fn, sync_module_states)
        self.register_state_dict_pre_hook(states.check_save)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(partial(states.put_values))  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(states.take_values)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(states.plain_keys)  # type: ignore[no-untyped-call]

    def _find_groups(self, process_group: Any, policy: Any) -> None:
        """Choose the ranks that share the shards."""
        if process_group is not None and self._device_mesh is not None:
            raise ValueError("process_group and device_mesh contradict each other; give one of them.")
        self._inter_node_pg = self._mesh = None
        if self.sharding_strategy in HYBRID:
            if process_group is None and policy is None and self._device_mesh is None:
                raise ValueError(
                    f"sharding_strategy={self.sharding_strategy.name} without a policy requires explicit specification of "
                    "process group or device_mesh. Give the same to every instance."
                )
            self._mesh, self.process_group, self._inter_node_pg = torch_names.hybrid_mesh(process_group, self._device_mesh)
        elif self._device_mesh is not None:
            self.process_group = self._device_mesh.get_group(mesh_dim=0)
        else:
            self.process_group = process_group or torch_names.default_group()
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        if self.world_size == 1 and sharding.kind_of(self.sharding_strategy) == "shard":
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {self.sharding_strategy} since the world size is 1.",
                stacklevel=4,
            )
            self.sharding_strategy = ShardingStrategy.NO_SHARD
        self._ranks_key = torch_names.ranks_of(self.process_group), sharding.kind_of(self.sharding_strategy)

    # what nn.Module shows -----------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper for activation checkpointing around it."""
        found = self._fsdp_wrapped_module
        inner = found._checkpoint_wrapped_module if isinstance(found, torch_names.ActivationWrapper) else found
        assert isinstance(inner, nn.Module)
        return inner

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters. Inside `summon_full_params` the names are those of the plain module."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(WRAPPED_NAME, "") if self._is_summoned else name, parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Names and buffers. Inside `summon_full_params` the names are those of the plain module."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(WRAPPED_NAME, "") if self._is_summoned else name, buffer

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call `fn` on every module, with the full parameters of its instance.

        Raises:
            ValueError: inside a forward, a backward or `summon_full_params`.
        """
        self._assert_state(TrainingState.IDLE)
        with summon.summoned([self], True, False, False, False):
            return super().apply(fn)

    # instances and states -----------------------------------------------------------------

    @property
    def _unit_ref(self) -> UnitRef | None:
        """The unit; None if all parameters of the module are ignored."""
        return unit_ref_of(self._unit_module)

    @property
    def training_state(self) -> TrainingState:
        """What the instance does now."""
        ref = self._unit_ref
        if self._is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        is_idle = ref is None or ref.engine.root.lifecycles[ref.index].state.name == "IDLE"
        return TrainingState.IDLE if is_idle else TrainingState.FORWARD_BACKWARD

    def _assert_state(self, state: Any) -> None:
        """Raises:
        ValueError: the instance is in none of these states.
        """
        allowed = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in allowed:
            names = ", ".join(one.name for one in allowed)
            raise ValueError(f"this instance is expected to be in states {names} but it is in {self.training_state.name}.")

    @property
    def _is_root(self) -> bool:
        return self._unit_ref is not None and self._unit_ref.index == 0

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        """Do nothing. Scripts undo by it that torch takes an instance for outermost after it was summoned by itself."""

    @property
    def _has_params(self) -> bool:
        return self._unit_ref is not None and bool(self._unit_ref.unit.flats)

    def check_is_root(self) -> bool:
        """Whether no other instance over the same ranks is around this one."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> "list[FullyShardedDataParallel]":
        """Return the instances in `module`; with `root_only` the outermost ones."""
        return [one for one in instances_in(module) if not root_only or one._is_root]

    # forward and backward -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the wrapped module. The outermost instance moves the inputs to its device."""
        if self._is_root:
            return root_forward.run(self, args, kwargs)
        return run_forward(self._fsdp_wrapped_module, args, kwargs, self._unit_ref)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """See `fsdp.no_sync`. Call it on the outermost instance.

        Raises:
            RuntimeError: this is an inner instance.
        """
        if not self._is_root:
            raise RuntimeError("no_sync: this instance is inside another one; call it on the outermost.")
        self._assert_state(TrainingState.IDLE)
        with no_sync(self):
            yield

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; return the norm before. Communicates.

        Raises:
            RuntimeError: this is an inner instance.
        """
        return gradients.clip_norm(self, float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let `hook(state, gradient)` under NO_SHARD, or `hook(state, gradient, result)`, reduce the gradients of each unit.

        Raises:
            AssertionError: this is an inner instance, there is a hook already, or the strategy is a hybrid one.
            ValueError: `hook` cannot be called.
        """
        gradients.set_hook(self, state, hook)

    # full parameters and state dicts ------------------------------------------------------

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None, None, None]:
        """Give the modules their full parameters, with plain names, inside. Communicates on entry.

        Raises:
            NotImplementedError: arguments contradict each other.
            AssertionError: a forward, a backward or another summon of an instance is running.
        """
        found = instances_in(module)
        if not recurse:
            found = [one for one in found if one is module] or [one for one in found if one._is_root]
        with summon.summoned(found, writeback, rank0_only, offload_to_cpu, with_grads):
            yield

    @staticmethod
    def set_state_dict_type(
        module: nn.Module, state_dict_type: StateDictType, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> StateDictSettings:
        """Set the format of the state dicts of all instances in `module`; return the one before."""
        return state_types.set_settings(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """Return the format of the state dicts of all instances in `module`."""
        return state_types.settings_of(module)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module, state_dict_type: StateDictType, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Generator[None, None, None]:
        """Set the format of the state dicts of all instances in `module`, inside."""
        with state_types.settings_inside(module, state_dict_type, state_dict_config, optim_state_dict_config):
            yield

    # optimizer state ----------------------------------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: _OptimInput = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the full state by parameter name; with `rank0_only`, {} on other ranks. Communicates."""
        optim_states.warn_of(optim_input)
        return optim_states.full(model, optim, rank0_only)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """Return the state by parameter name, with parts cut by rows. Communicates."""
        return optim_states.sharded(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of a full state, for `optim.load_state_dict`."""
        return optim_states.to_load(full_optim_state_dict, model, optim_states.order_of(model, optim, optim_input))

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return this rank's part of the full state that rank 0 gives, for `optim.load_state_dict`. Communicates."""
        given = optim_states.broadcast(full_optim_state_dict, model, group)
        return optim_states.to_load(given, model, optim_states.order_of(model, optim, optim_input))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return this rank's part of a state with parts cut by rows, for `optim.load_state_dict`. Communicates."""
        return optim_states.to_load(sharded_optim_state_dict, model, optim_states.order_of(model, optim, None))

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return a full state by number of the parameter in the optimizer, or by name."""
        order = optim_states.order_of(model, optim, optim_input)
        return optim_states.rekey(optim_state_dict, optim_state_key_type, model, order)

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None = None, group: Any = None
    ) -> dict[str, Any]:
        """Return the state by parameter name, in the format of `set_state_dict_type`. Communicates.

        Raises:
            ShardingError: `optim_state_dict` has parameters that `optim` has not.
            RuntimeError: an optimizer leaves out a sharded parameter that rank 0's steps.
        """
        return optim_states.in_format(model, optim, optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return this rank's part of a state by parameter name, for `optim.load_state_dict`. Communicates.

        With `is_named_optimizer` the result is by name, for an optimizer that gives its parameters names.
        """
        settings = state_types.settings_of(model)
        rank0_only = settings is not None and getattr(settings.optim_state_dict_config, "rank0_only", False)
        given = optim_states.broadcast(optim_state_dict, model, group) if rank0_only else optim_state_dict
        result = optim_states.to_load(given, model, optim_states.order_of(model, optim, None), is_named_optimizer)
        if load_directly:
            own_method(optim, "load_state_dict")(result)
        return result
