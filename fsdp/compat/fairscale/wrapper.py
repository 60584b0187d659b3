"""FullyShardedDataParallel with fairscale's constructor, methods and names. Each instance is one unit of the engine.

Rule 1: the module of the unit is a FlattenParamsWrapper, whose vectors are the unit's parameters.
Rule 2: whatever happens in a forward or backward is the engine's. This file casts the root's inputs and shows views.
"""

import contextlib
from collections.abc import Generator, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.api.summon import summoned_units
from fsdp.api.wrap import no_sync, run_forward
from fsdp.autograd.frames import in_backward
from fsdp.autograd.pytree import tensors_in
from fsdp.compat.fairscale import gradients, optim_states, sharding, states
from fsdp.compat.fairscale.flatten import FlattenParamsWrapper
from fsdp.compat.fairscale.groups import ProcessGroupName, can_communicate, get_process_group_cached, reduce_group
from fsdp.compat.fairscale.sharding import cast_inputs, get_fsdp_instances
from fsdp.compat.shared.instances import Wrapper
from fsdp.errors import ShardingError
from fsdp.runtime.registry import UnitRef, unit_ref_of, units_in
from fsdp.state_dict.fqns import plain_fqn


class TrainingState(Enum):
    """What an instance does now."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()


_FIXED = (
    "reshard_after_forward",
    "disable_reshard_on_root",
    "mixed_precision",
    "fp32_reduce_scatter",
    "flatten_parameters",
    "move_params_to_cpu",
    "compute_dtype",
    "move_grads_to_cpu",
    "bucket_cap_mb",
)
"""The attributes that nothing reads after wrapping."""
_VERBOSE = ("rank", "reshard_after_forward", "compute_dtype", "buffer_dtype", "fp32_reduce_scatter", "bucket_cap_mb")


class FullyShardedDataParallel(Wrapper):
    """Shard the parameters of a module, its gradients and the optimizer's state over the ranks of a group.

    The arguments are fairscale's. The page "From fairscale" lists each of them with what differs.

    Raises:
        ValueError: the arguments contradict each other or do not fit the parameters.
        TypeError: `process_group_reduce_scatter` is no group.
        ShardingError: an argument asks for what this engine does not have.
    """

    _fsdp_answers = "module"
    _fsdp_keeps_engine = "call its summon_full_params() and copy what you need"
    """See `fsdp.runtime.registry.KEEPS_ENGINE`."""

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool | None = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.buffers_are_cast = False
        """Whether buffers have the `buffer_dtype`."""
        self.keeps_shards = False
        """Whether `state_dict()` gives shards, for `local_state_dict()`."""
        self.process_group = get_process_group_cached() if process_group is None else process_group
        self.process_group_reduce_scatter = reduce_group(process_group_reduce_scatter, self.process_group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.reshard_after_forward = self._orig_reshard_after_forward = bool(reshard_after_forward)
        self.disable_reshard_on_root = disable_reshard_on_root
        self.mixed_precision = mixed_precision
        self.fp32_reduce_scatter = bool(fp32_reduce_scatter)
        self.flatten_parameters = flatten_parameters
        self.move_params_to_cpu = move_params_to_cpu or cpu_offload
        self.compute_dtype = compute_dtype or (torch.float16 if mixed_precision else torch.float32)
        self.buffer_dtype = buffer_dtype or self.compute_dtype
        self.move_grads_to_cpu = self.move_params_to_cpu if move_grads_to_cpu is None else move_grads_to_cpu
        self.bucket_cap_mb = bucket_cap_mb
        self.no_broadcast_optim_state = bool(no_broadcast_optim_state)
        """Whether the optimizer's state of this instance is this rank's own."""
        self.clear_autocast_cache = clear_autocast_cache
        self.force_input_to_fp32 = force_input_to_fp32
        self.verbose = verbose
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        given = gradient_predivide_factor is not None
        self._divide_factors = sharding.divide_factors(self.world_size, gradient_predivide_factor) if given else None
        """What gradients are divided by before and after the sum, as the user has set it."""
        self.allow_reset_parameters = allow_reset_parameters
        self.numel_padded_per_param: list[int] = []
        own = [p for p in module.parameters() if not hasattr(p, "_is_sharded")]
        sharding.check_options(self, module, own)
        self._compute_device_given, self._state_dict_device_given = compute_device, state_dict_device
        self.compute_device = sharding.computing_device(compute_device, self.move_params_to_cpu, module, own)
        with sharding.put_back_if_refused(module, own):
            self._shared = sharding.take_shared(module, self.compute_dtype, bool(own))
            self._fsdp_wrapped_module = FlattenParamsWrapper(
                module, own if flatten_parameters and own else [[]], multiple=self.world_size
            )
            if not flatten_parameters:
                self._fsdp_wrapped_module.store_as_vectors(own, self.world_size)
            self.params = self._fsdp_wrapped_module.flat_params
            self.is_lazily_sharded = not can_communicate(self.process_group)
            """Whether the engine takes over at the first use, because there is no process group yet."""
            for flat, parameter in zip(self._fsdp_wrapped_module.flats, self.params, strict=True):
                parameter._is_sharded = self.world_size > 1  # type: ignore[attr-defined]
                parameter._orig_size = parameter.size() if not flat.has_own_name else flat.shapes[0]  # type: ignore[attr-defined]
                self.numel_padded_per_param.append(states.padding(flat, self.rank, self.world_size))
            self._fsdp_wrapped_module.stop_showing_views(self._shared)
            if self.is_lazily_sharded:
                states.cut_without_group(self)
            else:
                sharding.shard(self)
        self.register_state_dict_post_hook(partial(states.remove_own_name))  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(states.add_own_name)  # type: ignore[no-untyped-call]

    @property
    def _unit_ref(self) -> UnitRef:
        found = unit_ref_of(self.module)
        if found is None:
            raise ShardingError(
                "this FullyShardedDataParallel was made or unpickled without a process group that communicates; set "
                "process_group and process_group_reduce_scatter on every instance before its first use."
            )
        return found

    @property
    def _is_root(self) -> bool:
        return self._unit_ref.index == 0

    # what nn.Module shows -----------------------------------------------------------------

    @property
    def module(self) -> FlattenParamsWrapper:
        """The FlattenParamsWrapper around the wrapped module. It has the attributes of the wrapped module."""
        wrapped = self._fsdp_wrapped_module
        if wrapped.views and not in_backward() and self.training_state is TrainingState.IDLE:
            wrapped.hide_views()  # a backward has shown them, and their memory is released
        return wrapped

    @property
    def cpu_offload(self) -> bool:
        """Whether parameters are kept on the host."""
        return self.move_params_to_cpu

    @property
    def state_dict_device(self) -> torch.device:
        """Where `state_dict()` puts its values."""
        return self._state_dict_device_given or self.compute_device

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before the sum. It may be set."""
        return (self._divide_factors or sharding.divide_factors(self.world_size))[0]

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factors(factor, self.gradient_postdivide_factor, False)

    @property
    def gradient_postdivide_factor(self) -> float:
        """What gradients are divided by after the sum. It may be set."""
        return (self._divide_factors or sharding.divide_factors(self.world_size))[1]

    @gradient_postdivide_factor.setter
    def gradient_postdivide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factors(self.gradient_predivide_factor, factor, False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what is fixed at wrapping.

        Raises:
            ShardingError: it would have no effect.
        """
        if name in _FIXED and self.__dict__.get(name, value) != value:
            raise ShardingError(f"{name} is fixed at wrapping: give {name}={value!r} to FullyShardedDataParallel.")
        super().__setattr__(name, value)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [p for p in self.parameters() if p.grad is not None]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters. Without vectors, and inside `summon_full_params`, the names are those of the plain module."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            is_plain = not self.flatten_parameters or self.training_state is TrainingState.SUMMON_FULL_PARAMS
            yield plain_fqn(name) if is_plain else name, parameter

    def extra_repr(self) -> str:
        names = ("world_size", "flatten_parameters", "mixed_precision", *(_VERBOSE if self.verbose else ()))
        return "".join(f"{name}={getattr(self, name)}, " for name in names)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.assert_state(TrainingState.IDLE)
        sharding.move_units(self, fn)
        applied = super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.move_params_to_cpu:
            self.compute_device = sharding.computing_device(self._compute_device_given, False, self.module, self.params)
        return applied

    def apply(self, fn: Any) -> "FullyShardedDataParallel":
        """Call `fn` on every module, with the full parameters of its instance."""
        with self.summon_full_params(recurse=False):
            return super().apply(fn)

    def reset_parameters(self) -> Any:
        """Call the wrapped module's `reset_parameters` if `allow_reset_parameters` was given.

        Raises:
            RuntimeError: it was not given.
        """
        if not self.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters: the module was wrapped without allow_reset_parameters=True; reset it before wrapping, or "
                "give that argument and call it inside summon_full_params()."
            )
        return self.module.reset_parameters()

    # states -------------------------------------------------------------------------------

    @property
    def training_state(self) -> TrainingState:
        """What the instance does now."""
        ref = unit_ref_of(self._fsdp_wrapped_module)
        if ref is None:
            return TrainingState.IDLE
        state = ref.engine.root.lifecycles[ref.index].state.name
        return TrainingState.SUMMON_FULL_PARAMS if state == "SUMMONED" else TrainingState[state]

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raises:
        ValueError: the instance is in none of these states.
        """
        allowed = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in allowed:
            raise ValueError(
                f"this instance is in {self.training_state.name}; here it may be in {', '.join(one.name for one in allowed)}."
            )

    def _reset_lazy_init(self) -> None:
        """Cast the buffers again in the next forward. Nothing else is set up lazily here."""
        self.buffers_are_cast = False

    def _free_full_params(self, params: Any = None) -> None:
        """Do nothing: the engine releases full parameters when their last use is over."""

    def _register_post_backward_hooks(self) -> None:
        """Do nothing: the engine has its hooks since wrapping. It is called in each forward, for subclasses."""

    def _register_pre_backward_hooks(self, outputs: Any) -> Any:
        """Show the views of this forward again when a backward enters it, for checkpoints that compute parts of it again."""
        wrapped = self._fsdp_wrapped_module
        views = wrapped.take_last_views()
        if views and torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: wrapped.show_again(views))  # type: ignore[no-untyped-call]
        return outputs

    # forward ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the wrapped module. The outermost instance casts fp32 inputs to fp16 under mixed precision."""
        states.shard_late(self)
        sharding.cast_buffers(self)
        if self._is_root and self.mixed_precision:
            args, kwargs = cast_inputs(args, kwargs, torch.float32, torch.float16, keeps_graph=False)
        elif self.force_input_to_fp32 and not self.mixed_precision:
            args, kwargs = cast_inputs(args, kwargs, torch.float16, torch.float32, keeps_graph=True)
        self._register_post_backward_hooks()
        outputs = self._register_pre_backward_hooks(run_forward(self._fsdp_wrapped_module, args, kwargs))
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """See `fsdp.no_sync`. Call it on the outermost instance.

        Raises:
            AssertionError: this is an inner instance.
        """
        states.shard_late(self)
        if not self._is_root:
            raise AssertionError("no_sync: this instance is inside another one; call it on the outermost.")
        with no_sync(self):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; return the norm before. Communicates.

        Raises:
            AssertionError: this is an inner instance.
            NotImplementedError: the instances have different process groups.
        """
        return gradients.clip_norm(self, float(max_norm), float(norm_type))

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by `pre` before the sum, and by `post` after it: with `recursive` those of inner instances too."""
        self.assert_state(TrainingState.IDLE)
        gradients.set_factors(self, pre, post, recursive)

    def _remember_factors(self, pre: float, post: float) -> None:
        """Remember what the gradients of this instance are divided by."""
        self._divide_factors = pre, post

    # full parameters and state dicts ------------------------------------------------------

    @contextlib.contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Generator[None, None, None]:
        """Give the modules their full parameters, with plain names, inside. `volatile`: drop changes. Communicates on entry.

        Raises:
            IllegalTransition: a forward, a backward or another summon is running.
        """
        states.shard_late(self)
        units_in(self.module, "summon_full_params")
        instances = get_fsdp_instances(self) if recurse else [self]
        with contextlib.ExitStack() as stack:
            for instance in instances:
                stack.enter_context(summoned_units([instance._unit_ref], writeback=not volatile))
                stack.enter_context(instance.module.unflatten_params())
            for instance in instances:
                for shared in instance._shared:
                    stack.enter_context(shared.shown_in_full())
            yield
            for instance in instances:  # all of them before the first one writes
                instance.module.check_shown()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full state dict with plain names. Communicates, except inside `summon_full_params`."""
        return states.full_state_dict(self, super().state_dict, *args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        """Load a full state dict; every rank gives the same. Communicates."""
        with self.summon_full_params():
            return super().load_state_dict(state_dict, strict)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's shards: vectors, padded to the same length on all ranks."""
        with states.shards_shown(self):
            return nn.Module.state_dict(self, *args, **kwargs)

    def load_local_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load this rank's shards, as `local_state_dict` returned them."""
        with states.shards_shown(self):
            return nn.Module.load_state_dict(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Return what `consolidate_shard_weights` needs to know about this rank's `local_state_dict`."""
        return states.local_metadata(self)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: list[dict[str, Tensor]],
        shard_metadata: list[dict[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """Return the full state dict from the local state dicts and metadata of all ranks. Needs no process group."""
        return states.consolidate(shard_weights, shard_metadata, with_module_buffers, strict)

    def gather_full_optim_state_dict(self, optim: torch.optim.Optimizer, **ignored: Any) -> dict[str, Any] | None:
        """Return the optimizer's state for the plain module's parameters on rank 0, and None elsewhere. Communicates."""
        return optim_states.gather_full(self, optim)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a dict from `gather_full_optim_state_dict`, for the optimizer. Changes its argument."""
        return optim_states.shard_of(self, full_optim_state_dict)

    # shared parameters --------------------------------------------------------------------

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Declare that `p`, a parameter of another instance, is used in this one. Needed for fairscale; here it is a check.

        Raises:
            AssertionError: this instance has no parameter of its own, or no module in it uses `p`.
        """
        if not self.params:
            raise AssertionError("append_shared_param: this instance needs at least one parameter of its own.")
        if not any(shared.parameter is p for shared in self._shared):
            raise AssertionError("append_shared_param: no module of this instance has this parameter; tie it before wrapping.")
        p._is_shared = True  # type: ignore[attr-defined]

    def non_shared_params(self) -> list[nn.Parameter]:
        """The parameters that this instance owns."""
        return list(self.params)

    def __getstate__(self) -> dict[str, Any]:
        return states.for_pickle(self)
