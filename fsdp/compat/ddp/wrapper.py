"""DistributedDataParallel with torch's constructor, methods and names, over this engine with NO_SHARD."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parameter import is_lazy

from fsdp.api import reductions, wrap
from fsdp.building.copies import Memo
from fsdp.building.other_engines import refuse_other_engines
from fsdp.comm.exchanges import broadcast_buffers
from fsdp.comm.failure.pending_call import FOR_EVALUATION
from fsdp.comm.open_communicators import Mesh, ProcessGroup
from fsdp.compat.ddp.arguments import (
    ABSENT,
    IGNORED,
    check_hook,
    checked_hook,
    input_device,
    left_alone,
    refuse_other_options,
)
from fsdp.compat.shared.instances import copy_wrapper, moved
from fsdp.config import ReductionPolicy
from fsdp.errors import ShardingError
from fsdp.runtime.registry import UnitRef, refuse_unless_resting, unit_ref_of
from fsdp.runtime.uneven import join

TorchDDP: Final = nn.parallel.DistributedDataParallel
"""torch's own class, whatever that name is bound to later."""


class ReplicatedModule(nn.Module):
    """A module of which every rank keeps all parameters, and whose gradients are averaged. Names begin with `module.`."""

    module: nn.Module

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        if not any(p.requires_grad for p in module.parameters()):
            raise ShardingError(
                f"{type(module).__name__} has no parameter that requires a gradient, so nothing is to be averaged."
            )
        self.module = wrap.fully_shard(module, sharding_strategy="NO_SHARD", plain_shards=True, **options)
        self._requires_sync = True
        refuse_other_engines(self)

    @property
    def _unit_ref(self) -> UnitRef:
        found = unit_ref_of(self.module)
        assert found is not None, "the module was wrapped"
        return found

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins reduces its gradients. It may be set."""
        return self._requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, requires: bool) -> None:
        self._requires_sync = requires
        wrap.set_requires_gradient_sync(self, requires)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The forward of the wrapped module."""
        return wrap.run_forward(self.module, inputs, kwargs)


class DistributedDataParallel(ReplicatedModule):
    """Average the gradients of a module over the ranks of a group, each of which keeps the full model.

    The arguments are those of torch's class. The page "From DDP" lists each of them with what differs.

    Raises:
        ShardingError: an argument asks for what this engine does not have, or the ranks do not agree.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Mesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        **others: object,
    ) -> None:
        refuse_other_options(
            {
                "dim": dim,
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce,
                "mixed_precision": mixed_precision,
                "bucket_cap_mb_list": bucket_cap_mb_list,
                **others,
            },
            ("module", "device_ids", "process_group", "bucket_cap_mb", "find_unused_parameters", "static_graph"),
        )
        given = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        broadcasts = given is not False
        modules, params = left_alone(module, broadcasts)
        target = input_device(module, device_ids, output_device)
        # with torch, too, only the older of the two names leaves out the broadcast at the start
        keeps = not broadcasts and forward_sync_buffers is None
        own = [(one, one.detach().clone()) for one in module.buffers() if keeps and not is_lazy(one)]
        super().__init__(
            module,
            process_group=process_group,
            mesh=device_mesh,
            reduction=ReductionPolicy(
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters and not static_graph,
                static_graph=static_graph,
            ),
            sync_module_states=init_sync,
            broadcast_buffers=broadcasts,
            ignored_modules=modules,
            ignored_params=params,
        )
        for buffer, value in own:
            buffer.detach().copy_(value)
        self._input_device = target
        self._error = ""
        self._iteration = 0
        """The number of forwards."""
        self._is_manual = False
        self._has_trained = not init_sync
        """Whether the last forward was one of training, after which the ranks may differ in their buffers."""
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device = output_device
        self.process_group = getattr(self._unit_ref.engine.comms.world_comm, "group", None)
        self.device_mesh = device_mesh
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.device = next(module.parameters()).device
        self.device_type = self.device.type

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The forward of the wrapped module, with its inputs on the device of `device_ids` if that was given."""
        own, trains = self.__dict__, torch.is_grad_enabled()  # the setter of modules takes microseconds
        own["_iteration"] += 1
        if own["_has_trained"] and not trains and self.broadcast_buffers and not self._unit_ref.engine.watcher.is_join:
            self._unit_ref.unit.refuse_forked()
            broadcast_buffers(self._unit_ref.unit.modules, self._unit_ref.engine.comms.world_comm, label=FOR_EVALUATION)
        own["_has_trained"] = trains and self.require_backward_grad_sync
        return super().forward(*moved(inputs, self._input_device), **moved(kwargs, self._input_device))

    @staticmethod
    def _get_active_ddp_module() -> None:
        """Say to torch's compiler that no forward is to be cut where the buckets of torch's class end."""

    def __getattr__(self, name: str) -> Any:
        """Say what takes the place of an attribute that only torch's class has."""
        if name in ABSENT:
            raise AttributeError(f"DistributedDataParallel.{name} is part of torch's engine: {ABSENT[name]}.")
        return super().__getattr__(name)

    def __deepcopy__(self, memo: Memo) -> nn.Module:
        """A copy with parameters and hooks of its own, on the same ranks."""
        return copy_wrapper(self, (self.process_group, self.device_mesh), memo)

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forwards that record a graph, and the first one after them, give the buffers of rank 0 to all."""
        return self._unit_ref.unit.config.broadcast_buffers

    @property
    def forward_sync_buffers(self) -> bool:
        """The newer name of `broadcast_buffers`."""
        return self.broadcast_buffers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank. The next backward outside averages them together with its own."""
        before, self._requires_sync = self._requires_sync, False
        try:
            with wrap.no_sync(self):
                yield
        finally:
            self._requires_sync = before

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Train on ranks with different numbers of batches, in a loop that needs no change.

        At the end every rank has the weights, the buffers and the optimizer state of a rank that was left last.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks. False: of those that have data left.
            enable: False does nothing.
            throw_on_early_termination: let all ranks raise a RuntimeError when one has no further batch.
        """
        if not enable:
            return nullcontext()
        return join.join(self, divides_by_all_ranks=divide_by_initial_world_size, stops_at_first=throw_on_early_termination)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` may be called. It may be set. Gradients are ready at the end of a backward anyway."""
        return self._is_manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self.__dict__["_is_manual"] = bool(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait for the end of the backward."""
        return self._is_manual

    def finalize_backward(self) -> None:
        """Do nothing: the backward that has ended has averaged its gradients.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is False.
            ShardingError: a backward is running, whose gradients are not ready.
        """
        if not self._is_manual:
            raise RuntimeError("finalize_backward: set require_manual_backward_finalization to True first.")
        refuse_unless_resting("finalize_backward", self._unit_ref.engine)

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Raises:
        ShardingError: torch's `Join` cannot serve this engine's collectives.
        """
        raise ShardingError("torch's Join does not know the collectives of this engine; use `with model.join():`.")

    def register_comm_hook(self, state: object, hook: Callable[..., Future[Tensor]]) -> None:
        """Let `hook(state, bucket)` reduce the gradients. See `fsdp.register_comm_hook`.

        Raises:
            TypeError: `hook` cannot be called.
            ValueError: the annotations of `hook` are those of another function.
            RuntimeError: there is a hook already. Later, in a backward: `hook` returned no future.
        """
        try:
            check_hook(hook)
            if self._unit_ref.engine.reducer.reductions.hook is not None:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        except Exception as error:
            self._error = str(error)
            raise
        reductions.register_comm_hook(self, state, checked_hook(hook))

    def _get_ddp_logging_data(self) -> dict[str, object]:
        """The facts about the wrapper that torch logs, as far as they mean something here.

        `error` is the last text with which `register_comm_hook` refused a hook, and is not there before.
        """
        errors = {"has_error": 1, "error": self._error} if self._error else {"has_error": 0}
        facts = {"iteration": self._iteration, **errors}
        comm = self._unit_ref.engine.comms.world_comm
        names = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers")
        given = {name: getattr(self, name) for name in names}
        return {"world_size": comm.size, "rank": comm.rank, "is_multi_device_module": False, **given, **facts}

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        raise ShardingError(
            "the built-in hooks reduce torch's own buckets; register default_hooks.allreduce_hook or fp16_compress_hook of "
            "torch.distributed.algorithms.ddp_comm_hooks instead."
        )

    def _register_buffer_comm_hook(self, state: object, hook: Any, comm_hook_location: Any = None) -> None:
        raise ShardingError("buffers are broadcast by the engine; leave out the buffer hook, or give broadcast_buffers=False.")

    def _register_fused_optim(self, optim: Any, *args: Any, **kwargs: Any) -> None:
        raise ShardingError("gradients are committed all at once at the end of the backward; step the optimizer after it.")

    def _set_static_graph(self) -> None:
        if not self.static_graph:
            raise ShardingError("the engine was built for a graph that may change; give static_graph=True to the constructor.")

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Collection[str]) -> None:
        """Name parameters and buffers that the wrapper of `module` leaves alone."""
        module.__dict__[IGNORED] = params_and_buffers_to_ignore


# frameworks ask whether a model is one of torch's wrapper, through whatever reference they kept
TorchDDP.register(DistributedDataParallel)
