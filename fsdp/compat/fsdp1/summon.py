"""Full parameters, and full gradients beside them, for a while."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp.api.summon import summoned_units
from fsdp.autograd.frames import in_backward
from fsdp.compat.fsdp1.root_forward import take_over
from fsdp.compat.fsdp1.torch_names import ShardingStrategy, TrainingState
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.runtime.registry import UnitRef
from fsdp.state_dict.param_shard import param_shards_of


@contextmanager
def summoned(
    instances: Sequence[Any], writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    """See `FullyShardedDataParallel.summon_full_params`. Communicates on entry."""
    for one in instances:
        _check(one, writeback, rank0_only, offload_to_cpu, with_grads)
    _take_over(instances)
    written: list[UnitRef] = []
    with ExitStack() as stack:
        for one in instances:
            ref = one._unit_ref
            if ref is None:
                continue
            if rank0_only and one.rank != 0:
                with _full_grads(ref, False) if with_grads else nullcontext(), summoned_units([ref], writeback=False):
                    pass  # to join the collectives
            else:
                # under FSDP1 a rank that holds all of it changes it in place, unless what it shows is a copy of the host's
                in_place = one.sharding_strategy is ShardingStrategy.NO_SHARD and not one.cpu_offload.offload_params
                writes = writeback or in_place
                grads = stack.enter_context(_full_grads(ref, writes)) if with_grads else {}
                stack.enter_context(summoned_units([ref], writes))
                written += [ref] * writes
                stack.enter_context(_grads_shown(ref, grads))
            one.set_summoned(True)
            stack.callback(one.set_summoned, False)
        yield
        _take_over(instances)  # a full parameter that was put in inside
        for ref in written:
            ref.unit.check_full()


def _take_over(instances: Sequence[Any]) -> None:
    for one in instances:
        if one._unit_ref is not None:
            take_over(one._unit_ref.engine)


def _check(instance: Any, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    if instance.training_state is not TrainingState.IDLE or in_backward():
        when = "during forward/backward"
        if instance.training_state is TrainingState.SUMMON_FULL_PARAMS:
            when = "when already unsharding parameters"
        raise AssertionError(f"Cannot manually unshard parameters {when}: leave summon_full_params out there.")
    is_replicated = instance.sharding_strategy is ShardingStrategy.NO_SHARD
    for is_given, text in (
        (
            with_grads and (offload_to_cpu or not instance._use_orig_params),
            "with_grads=True needs use_orig_params=True, and offload_to_cpu=False",
        ),
        (
            with_grads and instance._unit_ref is not None and instance._unit_ref.unit.replaces_params,
            "with_grads=True needs a model without tensor parallelism; read p.grad.full_tensor()",
        ),
        (offload_to_cpu and is_replicated, "offload_to_cpu=True needs a strategy that shards; NO_SHARD does not"),
        (writeback and rank0_only, "writeback=True needs the full parameters on every rank; leave rank0_only out"),
    ):
        if is_given:
            raise NotImplementedError(f"summon_full_params: this is not supported: {text}.")
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True copies the full parameters to the host on every rank; give rank0_only=True.", stacklevel=6
        )


Grads = dict[int, Tensor]
"""Full gradients, by the id of the user's Parameter object."""


@contextmanager
def _full_grads(ref: UnitRef, writeback: bool) -> Iterator[Grads]:
    """Gather the gradients of a unit. At the end each rank keeps its part of every change."""
    found: Grads = {}
    for flat in ref.unit.flats:
        found.update(_gather_grads(flat, ref))
    yield found
    if not writeback:
        return
    for param_shard in param_shards_of(ref.unit):
        parameter, placement = param_shard.parameter, param_shard.placement
        if id(parameter) not in found or not placement.part.numel:
            continue
        local = placement.local_part(found[id(parameter)])
        if parameter.grad is None:
            parameter.grad = placement.as_shard(local.clone())
        else:
            parameter.grad.copy_(local)


def _gather_grads(flat: FlatBuffer, ref: UnitRef) -> Grads:
    comm = ref.unit.comm
    here = [parameter.grad is not None for parameter in flat.sharded_params]
    anywhere = [any(flags) for flags in zip(*comm.gather_objects(here, "summon_full_params"), strict=True)]
    if not any(anywhere):
        return {}
    mine = torch.zeros(flat.layout.shard_numel, dtype=flat.shard.dtype, device=flat.device)
    for number in flat.local_params:
        if (gradient := flat.sharded_params[number].grad) is not None:
            flat.shard_view(number, mine).copy_(gradient)
    full, work = flat.launch_copy(mine, mine.dtype, "full value of gradients")
    work.wait()
    found = zip(flat.sharded_params, flat.placements, anywhere, strict=True)
    return {id(parameter): placement.full_in(full) for parameter, placement, is_there in found if is_there}


@contextmanager
def _grads_shown(ref: UnitRef, grads: Grads) -> Iterator[None]:
    """Let the full parameters of a unit have full gradients inside."""
    parameters = [p for flat in ref.unit.flats for p in flat.sharded_params if id(p) in grads]
    for parameter in parameters:
        parameter.grad = grads[id(parameter)]
    yield
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad is not grads[id(parameter)]:
            grads[id(parameter)].copy_(parameter.grad)
        parameter.grad = None
