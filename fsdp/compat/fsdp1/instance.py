"""What of an instance changes after its constructor, and by which call: its class alone writes it."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import caller_of_torch_states
from fsdp.building.copies import Memo
from fsdp.compat.fsdp1 import states
from fsdp.compat.fsdp1.flat_param import FlatParamHandle, FlatParamView, FlatPart, NoEvents
from fsdp.compat.fsdp1.torch_names import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    StateDictSettings,
    StateDictType,
)
from fsdp.compat.fsdp2 import residence
from fsdp.compat.fsdp2.move_module import apply_to_tensors
from fsdp.compat.shared.dtype_and_device import changes
from fsdp.compat.shared.instances import Wrapper, convert_from, copy_wrapper, drop_state_hooks
from fsdp.errors import ShardingError
from fsdp.params.shown_params import owning_unit
from fsdp.runtime.registry import unit_ref_of
from fsdp.state_dict.param_shard import ParamShard


class InstanceState(Wrapper):
    """The base of FullyShardedDataParallel."""

    _fsdp_gives_shards = False
    """See `fsdp.state_dict.model_view.GIVES_SHARDS`."""
    _unit_module: nn.Module
    """The module that is the unit."""
    process_group: Any
    _inter_node_pg: Any
    _device_mesh: Any
    _mesh: Any
    cpu_offload: CPUOffload
    mixed_precision: MixedPrecision

    def __init__(self) -> None:
        super().__init__()
        self._settings = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        """The dtype that each buffer had before it was cast to `buffer_dtype`, by its plain name."""
        self._buffers_are_cast = False
        self._full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"
        """Whether evaluations leave mixed precision out. The variable is FSDP1's."""
        self._comm_hook: Any = None
        self._comm_hook_state: Any = None
        self._is_summoned = False
        self.has_started = False
        self.compute_device = torch.device("cpu")
        self._device_handle = self._free_event_queue = NoEvents()

    def __deepcopy__(self, memo: Memo) -> nn.Module:
        """A copy with shards of its own, on the same ranks. Only the outermost instance can be copied by itself."""
        copied = copy_wrapper(self, (self.process_group, self._inter_node_pg, self._device_mesh, self._mesh), memo)
        ref = unit_ref_of(memo[id(self._unit_module)])
        if ref is not None:  # it has the whole engine: an inner instance gets it after the outermost one
            drop_state_hooks(ref.engine)
            for one in copied.modules():
                if isinstance(one, InstanceState):
                    one.hook_low_precision_grads()
        return copied

    def _refuse_factor(self, value: Any) -> None:
        """Raises:
        ShardingError: gradients would be divided by something else in FSDP1.
        """
        raise ShardingError(
            f"a factor of an instance was set to {value!r}, and gradients are averaged over its ranks: scale the loss, or reduce "
            "them by register_comm_hook."
        )

    _gradient_predivide_factor = _gradient_postdivide_factor = property(None, _refuse_factor)

    def hook_low_precision_grads(self) -> None:
        """With `keep_low_precision_grads`, let gradients get a dtype of mixed precision, once they are reduced."""
        ref = unit_ref_of(self._unit_module)
        for parameter in ref.unit.sharded_params if ref is not None and self.mixed_precision.keep_low_precision_grads else ():
            if parameter.is_floating_point() or parameter.is_complex():
                trains = parameter.requires_grad
                hooked: Any = parameter.requires_grad_(True)
                hooked.register_post_accumulate_grad_hook(_keep_low_precision)
                parameter.requires_grad_(trains)

    def set_started(self) -> None:
        """Remember that a forward has begun, before which the model was checked."""
        self.has_started = True

    def set_settings(self, settings: StateDictSettings) -> None:
        """From now on `state_dict()` gives this kind of state."""
        self._settings = settings

    def set_comm_hook(self, state: object, hook: Any) -> None:
        """Remember that the gradients of this instance are reduced by `hook`, which is called with `state`."""
        self._comm_hook, self._comm_hook_state = hook, state

    def set_compute_device(self, device: torch.device) -> None:
        """Remember where the instance computes, and where the outermost one moves its inputs."""
        self.compute_device = device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert the parameters of this instance and of those inside it: `half()`, `to(dtype)`, `cuda()`."""
        ref = unit_ref_of(self._unit_module)
        if ref is not None:
            convert_from(ref, fn, lambda unit: changes(unit, fn))
        if ref is not None and ref.unit.replaces_params:
            applied: Any = apply_to_tensors(self, fn, recurse)  # torch would exchange the objects
        else:
            applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        ref = unit_ref_of(self._unit_module)
        if ref is not None and ref.unit.flats and not self.cpu_offload.offload_params:
            self.set_compute_device(ref.unit.device)
        return applied

    def set_summoned(self, is_summoned: bool) -> None:
        """Remember whether `summon_full_params` shows full parameters, or has shown them to rank 0 alone."""
        self._is_summoned = is_summoned

    def remember_buffer(self, name: str, dtype: torch.dtype) -> None:
        """Remember the dtype that a buffer had before it was cast."""
        self._buffer_dtypes[name] = dtype

    def set_buffers_are_cast(self, are_cast: bool) -> None:
        """Remember whether buffers have their `buffer_dtype` now, or the dtype that they had before."""
        self._buffers_are_cast = are_cast

    @property
    def params(self) -> list[FlatPart]:
        """This rank's part of each parameter that this instance shards, as a vector with FSDP1's names and ranges."""
        found: dict[ParamShard, FlatPart] = {}
        for name, param_shard in states.names_of(self).items():
            found.setdefault(param_shard, FlatPart(name, param_shard))
        return [*found.values()]

    @property
    def _handle(self) -> FlatParamHandle | None:
        """What code reads of FSDP1's handle; None if this instance has no parameters."""
        ref = unit_ref_of(self._unit_module)
        return FlatParamHandle(self, self._unit_module) if ref is not None and ref.unit.flats else None

    @property
    def _flat_param(self) -> FlatParamView | None:
        """What Accelerate reads in mixed precision, and to which it assigns trainable parameters of low precision as float32."""
        return None if self._handle is None else self._handle.flat_param

    def _fqn_modifiers(self) -> dict[str, str]:
        """What torch's functions for state dicts ask of a module.

        Raises:
            ShardingError: they do not know this class, because the door is not installed, and what they do needs that.
        """
        call = caller_of_torch_states()
        if call is not None and not isinstance(self, call.f_globals["FSDP"]):
            name, given = call.f_code.co_name, call.f_locals
            loads_full = name.startswith("set") and getattr(given.get("options"), "full_state_dict", False)
            if "model" not in name or loads_full or given.get("submodules"):
                raise ShardingError(
                    f"{name} does not know this class, and would take this rank's part of a state for all of it, or nothing: "
                    'call fsdp.compat.install("torch_fsdp") before, or use the methods of FSDP for state dicts.'
                )
        return {}

    def _unshard(self, async_op: bool = False) -> residence.UnshardHandle | None:
        """Gather the parameters of this instance ahead of its forward. Communicates: every rank must call it alike."""
        return residence.unshard(unit_ref_of(self._unit_module), async_op)

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Do nothing: the engine's streams wait for each other."""

    # what FSDP1 calls these ------------------------------------------------------------------

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._settings.state_dict_type

    @property
    def _state_dict_config(self) -> Any:
        return self._settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> Any:
        return self._settings.optim_state_dict_config


def _keep_low_precision(parameter: nn.Parameter) -> None:
    """Give a gradient the dtype that its unit computes in, past the check of `.grad`, as FSDP1 does.

    Without shards it gets the dtype in which it was reduced.
    """
    unit: Any = owning_unit(parameter)
    policy, is_replicated = unit.config.mp_policy, unit.comm.size == 1  # NO_SHARD
    if parameter.grad is not None and (dtype := (is_replicated and policy.reduce_dtype) or policy.param_dtype) is not None:
        parameter.grad.data = parameter.grad.to(dtype)
