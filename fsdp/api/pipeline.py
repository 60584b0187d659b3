"""Stages of torch's pipeline schedules, over modules that are sharded."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.optim import Optimizer

from fsdp.api.clip_and_scale import ShardedGradScaler
from fsdp.autograd.frames import self_of_call
from fsdp.comm.open_communicators import ProcessGroup, open_routed
from fsdp.errors import ShardingError
from fsdp.params.gathered_copies import backward_without_a_loss
from fsdp.params.shown_params import owning_unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_in, reshard, unit_ref_of
from fsdp.shards.shard_tensor import plain
from state_machine import Event, Request


class PipelineStage(pipelining.PipelineStage):
    """A stage whose module `fully_shard` has wrapped, for every schedule of `torch.distributed.pipelining`.

    The arguments are those of torch's class. A stage keeps the gradients of its micro-batches, as `no_sync` does, and reduces
    them once, after the last one. Schedules that compute the gradients of inputs and of weights apart (zero bubble) are trained
    as well. Wrap with "SHARD_GRADIENTS": parameters are then gathered once a step, and freed after the last micro-batch. Other
    strategies gather them for each micro-batch, and once more for each gradient of weights that is computed apart.

    Memory: the unsharded gradients, until the last micro-batch.

    A step that failed can be done again: call `optimizer.zero_grad()`, and make the stages and the schedule anew, because torch's
    keep losses and buffers of it. A rank that failed outside a step of the schedule keeps both, as the others do: they would take
    the first messages of a new stage for those of a micro-batch.

    Make it after wrapping, on all ranks of the group alike: over gloo the group is routed, so that a rank that fails is named on
    the ranks of all stages. Communicates.

    A module without units is a stage as by torch's class, whose name `fsdp.compat.install("fully_shard")` gives to this one.

    Raises:
        ShardingError: in the first backward: the module is only a part of a root. In a step that is done again: this stage had
            reduced its gradients before another one of the rank failed, and they are still there.
    """

    @wraps(pipelining.PipelineStage.__init__)  # type: ignore[misc]  # the signature that help shows
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._grads_before: dict[nn.Parameter, Tensor] = {}
        """Copies of gradients outside units from before a step, until it has divided what it adds."""
        self._together: list[nn.Module] = []
        """The modules with units among the stages of this rank that take the step which runs."""
        if self.group_size > 1:
            for engine in self._engines():
                _staged.update(engine.units)
                _let_scalers_ask_stages()
        # torch 2.14 has a name for each direction besides
        for name in ("_downstream_group", "_upstream_group"):
            if getattr(self, name, self) in (None, self.group):
                setattr(self, name, self.group)

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks of the pipeline; None: all ranks. torch's constructor sets it."""
        return self._group

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        for engine in self._engines():
            group, comms = open_routed(group, engine.comms)
            engine.comms = comms
            comms.join_groups()
        self._group = group

    def _engines(self) -> Iterable[Engine]:
        """Those of the module, of which it may have none."""
        found = (unit_ref_of(module) for module in self.submod.modules())
        return {ref.engine: None for ref in found if ref is not None}

    def clear_runtime_states(self) -> None:
        """Begin a step, without what is left of one that failed before its gradients were reduced. Called by schedules."""
        super().clear_runtime_states()
        if not self._engines():
            return
        if self.has_backward:
            gradients = [p.grad for p in self.submod.parameters() if self.submod in _reduced and p.grad is not None]
            if any([plain(one).to_dense().any() for one in gradients]):
                raise ShardingError(
                    f"PipelineStage: stage {self.stage_index} has reduced the gradients of a step that failed in another stage "
                    "of this rank, and the step would add them once more; call optimizer.zero_grad() on all ranks first."
                )
            _reduced.discard(self.submod)
            schedule = self_of_call(PipelineScheduleMulti.step.__code__)
            stages = [self] if schedule is None else [one for one in schedule._stages if isinstance(one, PipelineStage)]
            self._together = [stage.submod for stage in stages if stage._engines()]
            self._grads_before = {parameter: gradient.clone() for parameter, gradient in self._grads_outside()}
        for engine in self._engines():
            engine.begin_pipeline_step()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, object], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, object]] | None]:
        """Compute one backward of a micro-batch, or the half of one. Called by schedules."""
        if not self._engines():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        given: dict[str, Any] = bwd_kwargs
        # torch finds the weights on the paths of inputs: if one requires no gradient, all gradients come in the first half
        inputs = [one for one in given.get("input_values", ()) if isinstance(one, Tensor) and one.is_floating_point()]
        leads_to_inputs = inputs and all([one.requires_grad for one in inputs])
        is_full = backward_type == "full" or (backward_type == "input" and not leads_to_inputs)
        if backward_type == "weight" and not given["param_groups"]:
            return (), None
        engines = engines_in(self.submod, "PipelineStage")
        with ExitStack() as stack:
            for engine in engines:  # keep gradients, on one rank as well
                stack.enter_context(engine.synchronising(False))
                engine.splits_backward = engine.splits_backward or not is_full
            if is_full:
                outputs, gradients = given["stage_output"], given["output_grads"]
                if gradients is None and isinstance(outputs, tuple):  # a loss, in the tuple in which torch splits backwards
                    (outputs,) = outputs
                return stage_backward(outputs, gradients, given["input_values"]), []
            # torch's functions compute the gradients of weights and put them into `.grad`: that of the unsharded parameters
            units = [unit for engine in engines for unit in engine.units]
            found = {id(shard): p for unit in units for shard, p in zip(unit.sharded_params, unit.unsharded_params, strict=True)}
            weights = iter([found.get(id(p), p) for p in self.submod.parameters()])
            if backward_type == "weight":
                for engine in engines:
                    stack.enter_context(_unsharded(engine))
                return stage_backward_weight(weights, given["param_groups"]), None
            return stage_backward_input(given["stage_output"], given["output_grads"], given["input_values"], weights)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of all micro-batches, and divide them. Called by schedules. Communicates.

        Under `no_sync` they are kept, and divided with those of the step that synchronises: by its factor.
        """
        if not self._engines():
            super().perform_reduce_grad(grad_scale_factor)
            return
        engines = engines_in(self.submod, "PipelineStage")
        divides = self.has_backward and grad_scale_factor != 1
        for engine in engines:
            if self.has_backward:
                engine.splits_backward = False
                engine.reducer.divisor = grad_scale_factor
                try:
                    # under no_sync each unit keeps what the half of a backward has left at its unsharded parameters
                    backward_without_a_loss(partial(_join_backward, engine))
                finally:
                    engine.reducer.divisor = 1
            reshard(engine)
            engine.in_pipeline_step = False
        if self.has_backward:
            _reduced.add(self.submod)
            if _reduced.issuperset(self._together):
                _reduced.difference_update(self._together)
        grads_before, self._grads_before = self._grads_before, {}
        for parameter, gradient in self._grads_outside() if divides else ():
            if (before := grads_before.get(parameter)) is None:
                gradient.div_(grad_scale_factor)
            else:
                gradient.sub_(before).div_(grad_scale_factor).add_(before)

    def _grads_outside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that no unit has, such as those of ignored modules, with their gradients, if they have one."""
        return [(p, p.grad) for p in self.submod.parameters() if owning_unit(p) is None and p.grad is not None]


def _join_backward(engine: Engine) -> None:
    """All units of the root take part in the backward that runs."""
    for index in range(len(engine.units)):
        engine.on_event(index, Event.EXTERNAL_GRAD)


_reduced: WeakSet[nn.Module] = WeakSet()
"""The modules of stages that have reduced their gradients in a step that has not ended for all stages of the rank."""
_staged: WeakSet[Any] = WeakSet()
"""The units of stages of pipelines of several ranks."""


@cache
def _let_scalers_ask_stages() -> None:
    """From now on, refuse gradient scalers that would let one stage of a pipeline skip a step alone."""
    scaler: Any = torch.amp.GradScaler
    step = scaler.step

    @wraps(step)
    def refuse(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepped = (owning_unit(p) for group in optimizer.param_groups for p in group["params"])
        asks_stages = isinstance(self, ShardedGradScaler) and self.asks_stages
        if self.is_enabled() and not asks_stages and any(unit in _staged for unit in stepped):
            raise ShardingError(
                f"{type(self).__name__}: the optimizer steps a stage of a pipeline, and an overflow in another stage would not "
                "be known here; use fsdp.ShardedGradScaler(module, pp_mesh=mesh['pp']), with the mesh of the stages."
            )
        return step(self, optimizer, *args, **kwargs)

    scaler.step = refuse


@contextmanager
def _unsharded(engine: Engine) -> Iterator[None]:
    """Gather what the gradients of inputs have released, because those of weights read it; then release it. Communicates.

    No hook sees what fails inside.
    """
    released = sorted({*range(len(engine.units))} - {*engine.gathered_units()})
    try:
        for index in released:
            engine.request(index, Request.UNSHARD)
        yield
    except BaseException as failure:
        engine.abandon_step(failure)
        raise
    finally:
        for index in released:
            engine.request(index, Request.RESHARD)
