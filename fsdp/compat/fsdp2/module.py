"""FSDPModule: the methods that `fully_shard` adds to a module. They are FSDP2's; each maps to the engine or is refused.

Rule 1: a method that asks for another order or memory of communication may be without effect where numbers stay the same. The
        page "From FSDP2" says which.
Rule 2: a method that would change numbers, or hand communication to the user's code, does so or raises.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as _Theirs

from fsdp.api.wrap import set_requires_gradient_sync
from fsdp.autograd.frames import load_call, settle_assign
from fsdp.compat.fsdp2 import residence
from fsdp.compat.fsdp2.move_module import apply_to_tensors, make_room
from fsdp.compat.fsdp2.residence import GradientReductionHandle, UnshardHandle
from fsdp.compat.shared.instances import divide_by
from fsdp.compat.shared.newer_peers import refused_names
from fsdp.device.streams import call_on
from fsdp.errors import ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import UnitRef, refuse_unless_resting, unit_ref_of
from state_machine import ReshardPolicy


@dataclass(slots=True)
class Settings:
    """The settings of one module. They survive when an outer module is wrapped around it."""

    ATTRIBUTE: ClassVar = "_fsdp2_settings"
    reduces: bool = True
    """Whether gradients are reduced."""
    all_reduces: bool = True
    """Whether gradients are summed over replicas."""
    policy: ReshardPolicy | None = None
    """When unsharded parameters are freed, as `set_reshard_after_forward` has said last. None: as the arguments say."""
    reshards_after_backward: bool = True
    """Whether unsharded parameters are freed after a backward."""


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module. The first call makes them."""
    found: Settings = module.__dict__.setdefault(Settings.ATTRIBUTE, Settings())
    return found


_CUSTOM = "communication is the engine's own: reduce gradients by fsdp.register_comm_hook(model, state, hook), or leave it out."


class FSDPModule:
    """A module that `fully_shard` has wrapped. Its class is FSDP<Name>, a subclass of this one and of its own."""

    _fsdp_keeps_engine = "load full_state_dict(model, rank0_only=False) into a plain model"
    """See `fsdp.runtime.registry.KEEPS_ENGINE`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the module's own class, because containers make one of `type(self)` for a slice."""
        own = cls.__mro__[2]
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy without calling `__new__`, which makes an object of the module's own class."""
        return object.__new__, (type(self),), self.__dict__

    # where the parameters are -------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit; those of inner units stay. Communicates: every rank must call it alike."""
        return residence.unshard(_ref(self), async_op)

    def reshard(self) -> None:
        """Free the unsharded parameters of this unit; those of inner units stay."""
        residence.reshard(_ref(self))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refused if it is True: unsharded parameters have other memory after each gather."""
        if keep:
            raise ShardingError(
                "set_keep_unsharded_storage: resharding frees unsharded parameters, and the next gather gives them other memory; "
                "leave it out, and capture no CUDA graph of their addresses."
            )

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """From now on, free the unsharded parameters after the forward, or keep them until the backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be True or False, not {reshard_after_forward!r}.")
        policy = ReshardPolicy.AFTER_FORWARD if reshard_after_forward else ReshardPolicy.AFTER_BACKWARD
        for ref in _refs(self, recurse):
            settings = settings_of(ref.unit.module)
            residence.set_policy(
                ref, policy if settings.reshards_after_backward else ReshardPolicy.NEVER, "set_reshard_after_forward"
            )
            settings.policy = policy

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """From now on, free the unsharded parameters after the backward, or keep them until the weights change."""
        for ref in _refs(self, recurse):
            settings = settings_of(ref.unit.module)
            residence.set_policy(
                ref, settings.policy if reshard_after_backward else ReshardPolicy.NEVER, "set_reshard_after_backward"
            )
            settings.reshards_after_backward = bool(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """From now on, gather the units of `modules` whenever this one is gathered in a forward."""
        residence.prefetch(_ref(self), refuse_unwrapped(modules), in_backward=False)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """From now on, gather the units of `modules` whenever this one is gathered in a backward."""
        residence.prefetch(_ref(self), refuse_unwrapped(modules), in_backward=True)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Do nothing: a backward gathers what it enters."""
        _ref(self)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: where memory of all-gathers is allocated does not change."""

    def set_post_optim_event(self, event: Any) -> None:
        """Do nothing: all-gathers wait for all that the optimizer has launched."""

    # gradients ----------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """From now on, reduce gradients at the end of a backward, or keep them on this rank.

        A backward is refused while only some units of the root are to reduce theirs.
        """
        reduces = bool(requires_gradient_sync)
        for ref in _refs(self, recurse):
            settings_of(ref.unit.module).reduces = reduces
        _set_sync(_ref(self).engine)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas: from now on, sum gradients over the replicas, or keep them: see `set_requires_gradient_sync`."""
        for ref in _refs(self, recurse):
            settings_of(ref.unit.module).all_reduces = bool(requires_all_reduce)
        _set_sync(_ref(self).engine)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Do nothing: a backward reduces its gradients, and `finalize_backward` those that were kept. Call it on the root.

        Raises:
            ShardingError: this is not the root, or a backward is running.
        """
        refuse_unless_resting("set_manual_backward_finalization", self._root_ref("set_manual_backward_finalization").engine)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that backwards without synchronisation have kept. Call it on the root. Communicates.

        Raises:
            ShardingError: this is not the root, or a forward or backward is running.
        """
        residence.reduce_kept(self._root_ref("finalize_backward"))
        return GradientReductionHandle() if async_op else None

    def _root_ref(self, method: str) -> UnitRef:
        ref = _ref(self)
        if ref.index:
            raise ShardingError(f"{method} must be called on the root; call it on the outermost module.")
        return ref

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: each backward waits for its own reductions."""
        _ref(self)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """From now on, divide the gradients of this unit by `factor` instead of the number of ranks. Inner units keep theirs.

        Raises:
            ShardingError: the factor is not a positive number, or a backward is running.
        """
        divide_by("set_gradient_divide_factor", _ref(self), 1.0, float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """See `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None, *, stream: Any = None) -> None:
        """From now on, call `hook` with the reduced gradients of this unit, which it changes in place. Inner units keep theirs.

        It gets this rank's chunk (C,) in the dtype of the reduction, averaged over the ranks of the mesh: to average over other
        jobs as well, for example. A unit that is cut in several ways has several chunks. The hook runs on the stream of the
        reduction, or on `stream`, and every rank calls it in the same order. None: no hook any more.

        Raises:
            ValueError: there are replicas, whose stream is the engine's.
            ShardingError: the hook cannot be called, or a forward or backward is running.
        """
        ref = _ref(self)
        if not (hook is None or callable(hook)):
            raise ShardingError(f"set_all_reduce_hook takes a function of a tensor, not {hook!r}.")
        if stream is not None and ref.engine.comms.replica_comm.size > 1:
            raise ValueError("set_all_reduce_hook: stream cannot be set when there are replicas; leave it out.")
        refuse_unless_resting("set_all_reduce_hook", ref.engine)
        ref.unit.set(after_reduction=partial(call_on, stream, hook) if hook and stream else hook)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: reductions are sums always."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: ranks may use different parameters of a unit."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: how many buckets are in flight follows from their size.

        Raises:
            TypeError: it is no number.
            ValueError: it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be a number, not {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be 1 or more, not {max_input_buffers}.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: reductions have a communicator of their own."""

    def reset_iter_state(self) -> None:
        """Do nothing: an exception resets the step by itself."""

    # refused ------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: gathers are the engine's own."""
        raise ShardingError(f"set_custom_all_gather: {_CUSTOM}")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: see `fsdp.register_comm_hook`."""
        raise ShardingError(f"set_custom_reduce_scatter: {_CUSTOM}")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused if it is True: buffers are torch's own memory."""
        if enable:
            raise ShardingError("set_allocate_memory_from_process_group_for_comm: buffers are torch's own memory; leave it out.")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused: buffers are torch's own memory."""
        raise ShardingError("set_symm_mem_for_comm: buffers are torch's own memory; leave it out.")

    # conversions --------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply a conversion such as `to_empty` or `double` to the shards and buffers. Parameters keep their objects."""
        assert isinstance(self, nn.Module)
        return apply_to_tensors(self, fn, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load values into the parameters and buffers. Those on the meta device that `state_dict` names get memory first.

        With `assign` they get the dtype of the given values, too. The objects stay.
        """
        assert isinstance(self, nn.Module)
        make_room(self, state_dict, assign)
        return super().load_state_dict(state_dict, strict=strict)  # type: ignore[misc]  # nn.Module's, or the user's

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        """Load this module's own values. A module around it that is not wrapped may be loading with assign=True."""
        call = load_call()
        if settle_assign(local_metadata) and call is not None:
            if self is next(one for one in call.module.modules() if isinstance(one, FSDPModule)):
                make_room(call.module, call.state_dict, assigns=True)
            del local_metadata["assign_to_params_buffers"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # type: ignore[misc]


def _ref(module: Any) -> UnitRef:
    found = unit_ref_of(module)
    if found is None:
        raise ShardingError(f"{type(module).__name__} is a copy of a wrapped module; wrap it with fully_shard first.")
    return found


def _refs(module: Any, recurse: bool) -> Iterator[UnitRef]:
    """The units of the module, outermost first; without `recurse`, its own."""
    for one in module.modules() if recurse else (module,):
        if isinstance(one, FSDPModule):
            yield _ref(one)


def _set_sync(engine: Engine) -> None:
    """Set whether the root reduces its gradients, as the settings of its units say."""
    all_reduces = engine.comms.replica_comm.size == 1
    modules = [unit.module for unit in engine.units if isinstance(unit.module, FSDPModule)]
    wanted = {one.reduces and (one.all_reduces or all_reduces) for one in map(settings_of, modules)}
    set_requires_gradient_sync(engine.units[0].module, all(wanted))
    if len(wanted) > 1 and not engine.synchronises:
        engine.synchronises = None


def refuse_unwrapped(modules: Iterable[Any]) -> list[nn.Module]:
    """Return the modules if `fully_shard` has wrapped each; else raise ValueError."""
    found = list(modules)
    for module in found:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard has wrapped, not {type(module).__name__}.")
    return found


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def become_fsdp_module(module: nn.Module) -> None:
    """Make the class of `module` FSDP<Name>, once."""
    kind = type(module)
    if not isinstance(module, FSDPModule):
        if kind not in _classes:
            namespace = {"__module__": kind.__module__, **refused_names(_Theirs, FSDPModule)}
            _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), namespace)
        module.__class__ = _classes[kind]
